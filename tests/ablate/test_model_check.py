"""Check of the models in several processes: their shares, findings, ends and progress."""

import multiprocessing
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from helpers import studies
from helpers.training_cells import digits_cell

from lit_attn.ablate import model_check
from lit_attn.ablate.model_check import (
    Check,
    ModelCheck,
    count_processes,
    describe_step,
    list_untried,
    share_numbers,
)
from lit_attn.ablate.plan import expand
from lit_attn.train import CheckedCell, CheckEnd

NAMES = ["a", "b", "c", "d"]
NOT_CHECKED = "the models and data were not checked: "

Find = Callable[[str, bool], Any]
"""Function from the name of a cell, and whether its process is alone, to what a process does:
a `CheckedCell`, an error's text, or None if the process dies."""


def passing(warnings: list[str] | None = None) -> CheckedCell:
    return CheckedCell(0, warnings or [], is_crowded=False)


CROWDED = CheckedCell(0, [], is_crowded=True)


class FakeProcess:
    """Process that sends all its messages when it starts."""

    started: ClassVar[list[tuple[list[str], list[int], bool]]] = []
    gpus: ClassVar[list[str | None]] = []

    def __init__(self, find: Find, arguments: tuple[Any, ...]) -> None:
        self.find = find
        self.arguments = arguments

    def start(self) -> None:
        names, sender, _, untried, is_alone, gpu = self.arguments
        self.started.append((names, untried, is_alone))
        self.gpus.append(gpu)
        for number, name in enumerate(names):
            sender.send(number)
            end = self.find(name, is_alone)
            if end is None:
                return
            if isinstance(end, str):
                sender.send(CheckEnd((number, end, "", False), []))
                return
            sender.send(end)
        sender.send(CheckEnd(None, []))

    def join(self, seconds: float = 0.0) -> None:
        pass

    def kill(self) -> None:
        pass


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    yield
    FakeProcess.started.clear()
    FakeProcess.gpus.clear()


def make_check(find: Find, names: list[str] = NAMES) -> ModelCheck:
    cells: list[Any] = [SimpleNamespace(model_dump=lambda mode, name=name: name) for name in names]

    def create(target: object, args: tuple[Any, ...]) -> Any:
        return FakeProcess(find, args)

    return ModelCheck(create, cells, names, is_local=True, untried=range(len(names)))


def test_the_first_wrong_variant_of_the_study_is_named() -> None:
    """The process of b and d finds its mistake before that of a and c has been read."""
    wrong = {"b": "b is wrong", "c": "c is wrong", "d": "d is wrong"}
    for processes in (1, 2, 3, 4):
        check = make_check(lambda name, _: wrong.get(name, passing())).run(processes)
        assert check.mistake == (1, "b is wrong", "", False)
    first_process = {"c": "c is wrong", "d": "d is wrong"}
    check = make_check(lambda name, _: first_process.get(name, passing())).run(2)
    assert check.mistake == (2, "c is wrong", "", False)


def test_warnings_have_the_order_of_the_variants_and_no_repetition() -> None:
    warnings = {"a": ["x"], "b": ["data", "b"], "c": ["data", "c"]}
    for processes in (1, 2, 4):
        check = make_check(lambda name, _: passing(warnings.get(name))).run(processes)
        assert check == Check(None, ["x", "data", "b", "c"])


def test_nothing_after_the_first_wrong_variant_is_told() -> None:
    def find(name: str, is_alone: bool) -> Any:
        return "wrong" if name == "b" else passing([name])

    for processes in (1, 2):
        assert make_check(find).run(processes).warnings == ["a"]


def test_a_crowded_step_is_made_again_alone() -> None:
    def find(name: str, is_alone: bool) -> Any:
        return passing() if is_alone or name != "c" else CROWDED

    assert make_check(find).run(2) == Check(None, [])
    assert FakeProcess.started == [
        (["a", "c"], [0, 1], False),
        (["b", "d"], [0, 1], False),
        (["c"], [0], True),
    ]


def test_an_error_beside_other_processes_counts_only_if_it_comes_again_alone() -> None:
    """A GPU without memory for the handle of a library raises errors of many kinds."""

    def find(name: str, is_alone: bool) -> Any:
        return passing([name]) if is_alone or name != "a" else "a is wrong"

    assert make_check(find).run(2) == Check(None, NAMES)
    # The process of a and c has not reached c.
    (*_, (names, untried, is_alone)) = FakeProcess.started
    assert {"a", "c"} <= set(names)
    assert untried == list(range(len(names)))
    assert is_alone


def test_processes_use_the_gpus_in_turn() -> None:
    check = make_check(lambda name, _: passing())
    check.gpus = ["0", "1", "GPU-aa"]
    check.run(4)
    assert FakeProcess.gpus == ["0", "1", "GPU-aa", "0"]


def test_the_cells_of_a_dead_process_are_checked_again_alone() -> None:
    def find(name: str, is_alone: bool) -> Any:
        if name == "b" and not is_alone:
            return None
        return "d is wrong" if name == "d" else passing([name])

    check = make_check(find).run(2)
    assert check == Check((3, "d is wrong", "", False), ["a", "b", "c"])
    assert FakeProcess.started[-1] == (["b", "d"], [0, 1], True)


@pytest.mark.parametrize("processes", [1, 2])
def test_a_check_whose_process_dies_is_not_silent(processes: int) -> None:
    """A process that ends without an answer closes its end of the pipe."""
    check = make_check(lambda name, _: None if name == "b" else passing([name])).run(processes)
    assert check.mistake is None
    assert check.warnings[:2] == ["a", NOT_CHECKED + "the process of the check has ended"]


def test_a_process_that_cannot_start_is_not_silent() -> None:
    def create(target: object, args: object) -> Any:
        raise EOFError

    check = ModelCheck(create, [], ["a"], is_local=True, untried=[])
    check.contents = ["a"]  # type: ignore[list-item]
    assert check.run(1).warnings == [NOT_CHECKED + "the process of the check has ended"]


def wait_with(monkeypatch: pytest.MonkeyPatch, actions: list[Callable[[], object]]) -> None:
    """Let every wait for the processes do the next of `actions` first."""
    wait = model_check.wait
    steps = iter(actions)

    def act_and_wait(receivers: list[Any], timeout: float) -> list[Any]:
        next(steps)()
        return wait(receivers, 0.0)

    monkeypatch.setattr(model_check, "wait", act_and_wait)


def test_a_long_check_names_the_variants_that_it_has_reached(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(model_check, "PROGRESS_SECONDS", 0.0)
    pipes = [multiprocessing.Pipe(duplex=False) for _ in range(2)]
    (first, second) = (sender for _, sender in pipes)
    process: Any = FakeProcess(lambda name, is_alone: None, ())
    shares = []
    for numbers, (receiver, _) in zip(([0, 2], [1, 3]), pipes, strict=True):
        shares.append(model_check.Share(numbers, False, process, receiver))
    check = make_check(lambda name, is_alone: None)
    check.findings.started.update((0, 1))
    actions: list[Callable[[], object]] = [
        lambda: None,
        lambda: first.send(passing()),
        lambda: first.send(1),
        lambda: second.send(CheckEnd(None, [])),
        lambda: first.send(CheckEnd(None, [])),
    ]
    wait_with(monkeypatch, actions)
    assert check._await_shares(shares) == [shares[1], shares[0]]
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(" (")[0] for line in lines] == [
        "  2 of 4: a, b",
        "  2 of 4: a, b",
        "  3 of 4: c, b",
        "  3 of 4: c",
    ]


def test_a_check_without_an_end_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_check, "CHECK_LIMIT", 0.02)
    receiver, sender = multiprocessing.Pipe(duplex=False)
    process: Any = FakeProcess(lambda name, is_alone: None, ())
    check = make_check(lambda name, is_alone: None)
    check._await_shares([model_check.Share([0], True, process, receiver)])
    assert check.findings.make_check().warnings == [NOT_CHECKED + "no answer within 0 s"]
    sender.close()
    receiver.close()


def test_each_process_has_its_share_of_the_steps() -> None:
    assert share_numbers(range(5), set(range(5)), 2) == [[0, 2, 4], [1, 3]]
    # Only 1, 2 and 5 make a step.
    assert share_numbers(range(6), {1, 2, 5}, 3) == [[0, 1], [2, 3], [4, 5]]
    assert share_numbers(range(2), set(), 3) == [[0], [1]]


def test_a_gpu_has_up_to_four_processes_and_a_cpu_one_for_each_cell_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cores = 32
    monkeypatch.setattr("os.sched_getaffinity", lambda process: range(cores))
    cell = digits_cell(training={"accelerator": "auto"})
    assert count_processes([cell] * 26, cells_at_once=1, has_gpus=True) == 4
    assert count_processes([cell] * 3, cells_at_once=1, has_gpus=True) == 3
    cores = 8
    assert count_processes([cell] * 26, cells_at_once=1, has_gpus=True) == 2
    assert count_processes([], cells_at_once=1, has_gpus=True) == 1
    assert count_processes([cell] * 26, cells_at_once=8, has_gpus=False) == 7
    assert count_processes([cell] * 26, cells_at_once=2, has_gpus=False) == 2
    assert count_processes([cell] * 4, cells_at_once=8, has_gpus=False) == 1
    assert count_processes([], cells_at_once=8, has_gpus=False) == 1
    on_cpu = digits_cell(training={"accelerator": "cpu"})
    assert count_processes([on_cpu] * 4, cells_at_once=8, has_gpus=True) == 1


def test_variants_that_differ_in_a_rate_share_a_step(tmp_path: Path) -> None:
    body = "baseline: a\ncells: {a: {}, b: {optimizer.lr: 1}, c: {attention: belief2}}"
    matrix = expand(studies.study(tmp_path, body), tmp_path / "runs")
    cells = [job.cell for job in matrix.jobs if job.cell.seed == 0]
    assert list_untried(cells, [False] * 3) == [0, 2]
    # The step of b does not come from a, which has a result.
    assert list_untried(cells, [True, False, True]) == [1]
    steps = {job.cell.variant: describe_step(job.cell) for job in matrix.jobs}
    assert len(set(steps.values())) == 2
    assert all(describe_step(job.cell) == steps[job.cell.variant] for job in matrix.jobs)
