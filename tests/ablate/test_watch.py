"""`status --watch`: one status after another, until every cell has ended."""

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers.fake_study import write_study

from lit_attn.ablate import status
from lit_attn.ablate.__main__ import main

Pauses = Callable[..., list[float]]


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> Pauses:
    """Function that sets what happens in each pause; a further pause fails the test.

    It returns the list of the pauses, in seconds.
    """

    def set_events(*events: Callable[[], object]) -> list[float]:
        waiting = list(events)
        seconds: list[float] = []

        def sleep(duration: float) -> None:
            seconds.append(duration)
            assert waiting, "the watch did not end"
            waiting.pop(0)()

        monkeypatch.setattr(status.time, "sleep", sleep)
        return seconds

    return set_events


def test_a_watch_ends_with_the_last_result(
    tmp_path: Path, pauses: Pauses, capsys: pytest.CaptureFixture[str]
) -> None:
    write_study(tmp_path, seeds=1, skip=(("belief", 0), ("belief2", 0)))
    seconds = pauses(
        lambda: write_study(tmp_path, seeds=1, skip=(("belief2", 0),)),
        lambda: None,
        lambda: write_study(tmp_path, seeds=1),
    )
    assert main(["status", "--watch", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    counts = [line.partition(";")[0].strip() for line in lines if "3 cells" in line]
    # A status that has not changed is not printed again.
    assert counts == [
        "3 cells: 1 done, 2 missing",
        "3 cells: 2 done, 1 missing",
        "3 cells: 3 done",
    ]
    assert seconds == [status.PAUSE] * 3


def test_a_watch_of_an_ended_study_prints_what_status_prints(
    tmp_path: Path, pauses: Pauses, capsys: pytest.CaptureFixture[str]
) -> None:
    write_study(tmp_path, "first", seeds=1)
    write_study(tmp_path, "second", seeds=1, failures={("belief", 0): "diverged"})
    pauses()
    assert main(["status", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert main(["status", "--watch", str(tmp_path)]) == 0
    assert capsys.readouterr().out == printed


@pytest.mark.parametrize("failure", ["killed", "timed-out", "no-space", "out-of-memory"])
def test_a_watch_waits_for_a_retry_of_the_runner(
    failure: str, tmp_path: Path, pauses: Pauses
) -> None:
    folder = write_study(tmp_path, seeds=1, failures={("belief", 0): failure})
    (end,) = folder.glob("v1/*/attempts/1/exit.json")

    def set_age(seconds: float) -> None:
        finished = time.time() - seconds
        os.utime(end, (finished, finished))

    seconds = pauses(
        lambda: set_age(status.RETRY_TIME - 10), lambda: set_age(status.RETRY_TIME + 1)
    )
    assert main(["status", "--watch", str(tmp_path)]) == 0
    assert len(seconds) == 2


def test_a_watch_goes_on_while_a_cell_is_interrupted(tmp_path: Path, pauses: Pauses) -> None:
    folder = write_study(tmp_path, seeds=1, failures={("belief", 0): "killed"})
    (end,) = folder.glob("v1/*/attempts/1/exit.json")
    end.unlink()
    seconds = pauses(lambda: write_study(tmp_path, seeds=1))
    assert main(["status", "--watch", str(tmp_path)]) == 0
    assert len(seconds) == 1


def test_ctrl_c_ends_a_watch(tmp_path: Path, pauses: Pauses) -> None:
    write_study(tmp_path, seeds=1, skip=(("belief", 0),))

    def interrupt() -> None:
        raise KeyboardInterrupt

    pauses(interrupt)
    assert main(["status", "--watch", str(tmp_path)]) == 130


def test_a_terminal_shows_the_newest_status_alone(
    tmp_path: Path,
    pauses: Pauses,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    write_study(tmp_path, seeds=1, skip=(("belief", 0),))
    # Its message would be lost on a terminal if it were printed before the screen is cleared.
    (tmp_path / "torn").mkdir()
    (tmp_path / "torn" / "plan.json").write_text("{")
    pauses(lambda: write_study(tmp_path, seeds=1))
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert main(["status", "--watch", str(tmp_path)]) == 0
    captured = capsys.readouterr()
    before, first, second = captured.out.split(status.CLEAR_SCREEN)
    assert before == ""
    assert "2 done, 1 missing" in first
    assert "3 cells: 3 done" in second
    for text in (first, second):
        assert f"{tmp_path / 'torn' / 'plan.json'}: is not a plan" in text
    assert captured.err == ""


def test_a_watch_shows_why_jobs_wait_and_seldom_asks(
    tmp_path: Path, pauses: Pauses, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_study(tmp_path, seeds=1, skip=(("belief", 0),))
    questions: list[list[Path]] = []

    def ask(studies: list[Path]) -> dict[Path, list[str]]:
        questions.append(studies)
        return {folder: [f"waiting  question {len(questions)}"]}

    # The second pause ends with the last result, long before the next question.
    pauses(lambda: None, lambda: write_study(tmp_path, seeds=1))
    status.watch(tmp_path, ask)
    assert questions == [[folder]]
    assert "  waiting  question 1\n" in capsys.readouterr().out


def test_a_watch_without_a_study_is_one_error_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["status", "--watch", str(tmp_path)]) == 2
    assert capsys.readouterr().err == f"{tmp_path}: contains no study (no */plan.json)\n"
