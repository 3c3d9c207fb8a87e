"""Check of the models before the first cell: its end, its progress, and which variants it tries."""

import multiprocessing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers import studies

from lit_attn.ablate import model_check
from lit_attn.ablate.model_check import await_end, check_variants, describe_step, list_untried
from lit_attn.ablate.plan import expand
from lit_attn.train import CheckEnd

NOT_CHECKED = "the models and data were not checked: "


class FakeProcess:
    """Process that sends `messages` when it starts, and ends."""

    def __init__(self, messages: list[Any], arguments: tuple[Any, ...]) -> None:
        self.messages = messages
        self.sender = arguments[1]
        self.pid: int | None = None

    def start(self) -> None:
        self.pid = 1
        for message in self.messages:
            self.sender.send(message)

    def join(self, seconds: float = 0.0) -> None:
        pass

    def kill(self) -> None:
        pass


def check(*messages: Any) -> CheckEnd:
    """Return the end of a check of two variants whose process sends `messages`."""

    def create(target: object, args: tuple[Any, ...]) -> Any:
        return FakeProcess(list(messages), args)

    return check_variants(create, [], ["a", "b"], is_local=True, untried=[], selects={})


def test_the_end_of_the_process_is_the_end_of_the_check() -> None:
    mistake = (1, "b is wrong", "", False)
    assert check(0, 1, CheckEnd(mistake, ["data"])) == (mistake, ["data"])
    # A process that dies closes its end of the pipe.
    assert check(0) == (None, [NOT_CHECKED + "the process of the check has ended"])


def test_a_process_that_cannot_start_is_not_silent() -> None:
    class Refused(FakeProcess):
        def start(self) -> None:
            raise EOFError

    def create(target: object, args: tuple[Any, ...]) -> Any:
        return Refused([], args)

    end = check_variants(create, [], ["a"], is_local=True, untried=[], selects={})
    assert end == (None, [NOT_CHECKED + "the process of the check has ended"])


def test_a_long_check_names_the_variant_that_it_has_reached(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(model_check, "PROGRESS_SECONDS", 0.0)
    receiver, sender = multiprocessing.Pipe(duplex=False)
    sends: list[Callable[[], object]] = [
        lambda: sender.send(0),
        lambda: sender.send(1),
        lambda: sender.send(CheckEnd(None, [])),
    ]
    poll = receiver.poll

    def send_and_poll(seconds: float) -> bool:
        sends.pop(0)()
        return poll(seconds)

    monkeypatch.setattr(receiver, "poll", send_and_poll)
    assert await_end(receiver, ["a", "b"]) == (None, [])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(" (")[0] for line in lines] == ["  1 of 2: a", "  1 of 2: a", "  2 of 2: b"]


def test_a_check_without_an_end_is_given_up() -> None:
    receiver, sender = multiprocessing.Pipe(duplex=False)
    assert await_end(receiver, ["a"], limit=0.02).warnings == [NOT_CHECKED + "no answer within 0 s"]
    sender.close()
    receiver.close()


def test_variants_that_differ_in_a_rate_share_a_step(tmp_path: Path) -> None:
    body = "baseline: a\ncells: {a: {}, b: {optimizer.lr: 1}, c: {attention: belief2}}"
    matrix = expand(studies.study(tmp_path, body), tmp_path / "runs")
    cells = [job.config for job in matrix.jobs if job.seed == 0]
    assert list_untried(cells, [False] * 3) == [0, 2]
    # The step of b does not come from a, which has a result.
    assert list_untried(cells, [True, False, True]) == [1]
    steps = {job.variant: describe_step(job.config) for job in matrix.jobs}
    assert len(set(steps.values())) == 2
    assert all(describe_step(job.config) == steps[job.variant] for job in matrix.jobs)
