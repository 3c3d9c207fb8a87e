"""Faults on real processes: kills, hangs, time limits, full memory and disks, lost servers."""

import contextlib
import errno
import os
import random
import resource
import signal
import time
import traceback
from collections import Counter
from pathlib import Path

import pytest
from helpers import fake_cells, studies
from helpers.runs import (
    TIMEOUT,
    Recorder,
    count_runs,
    expire_hangs,
    is_alive,
    jobs,
    list_holders,
    make_body,
    start_cli,
    wait_until,
)

from lit_attn.ablate import runner
from lit_attn.ablate.job import Job
from lit_attn.ablate.launch import CellProcess, Launcher
from lit_attn.ablate.outcomes import Outcome, Summary
from lit_attn.ablate.plan import expand
from lit_attn.ablate.runner import RETRIES, Runner
from lit_attn.ablate.slots import make_slots
from lit_attn.cells import folder
from lit_attn.cells.failure import DISK_FULL, classify_failure
from lit_attn.cells.records import Exit, FailureClass

pytestmark = pytest.mark.usefixtures("retry_at_once")

STALL = 600.0
"""Stall limit of tests in which only the runner's clock advances, whatever the machine's load."""


def run(cells: list[Job], stall: float = 1800.0, at_once: int = 2) -> tuple[Summary, str]:
    display = Recorder()
    launcher = Launcher(fake_cells.TARGET)
    summary = Runner(launcher, make_slots(at_once), display, stall).run(cells)
    return summary, "\n".join(display.events)


def failures(cell: Job) -> list[FailureClass]:
    """Return the recorded failure class of every attempt."""
    ends = [folder.read_exit(attempt) for attempt in folder.list_attempts(cell.folder)]
    return [end.failure for end in ends if end is not None]


@pytest.mark.process
def test_a_hang_is_killed_with_its_stack_in_the_log_and_retried_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expire_hangs(monkeypatch, STALL, "child.pid")
    stuck, once = (job for job in jobs(tmp_path, "stuck", "stuckonce") if job.seed == 0)
    summary, events = run([stuck, once], STALL)
    assert [(o.job.name, o.failure) for o in summary.failed] == [("tiny/stuck/0", "timed-out")]
    assert failures(stuck) == ["timed-out"] * 2
    assert failures(once) == ["timed-out"]
    assert once.state() == "done"
    assert "retry    tiny/stuck/0  in 0 s, after timed-out: no step for 600 s" in events
    log = folder.read_log_tail(folder.list_attempts(stuck.folder)[0])
    assert "in _stuck" in log, log
    wait_until(lambda: not is_alive(int((stuck.folder / "child.pid").read_text())))


@pytest.mark.process
def test_a_cell_that_makes_steps_does_not_count_as_hanging(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time of the progress file changes, even if the disk's clock is wrong."""
    (gated, *_) = jobs(tmp_path, "gated")
    progress = gated.folder / "progress.json"
    rounds = iter(range(10))

    def stepping(self: Runner) -> None:
        if next(rounds, None) is None:
            (tmp_path / "runs" / "tiny" / "go").touch()
        else:
            progress.touch()
            os.utime(progress, ns=(1, next(stamps)))
            for cell in self.running.values():
                cell.last_step -= STALL / 2
        enforce(self)

    enforce = Runner._enforce
    stamps = iter(range(1, 100))
    monkeypatch.setattr(Runner, "_enforce", stepping)
    summary, events = run([gated], STALL)
    assert summary.failed == []
    assert "retry" not in events


@pytest.mark.process
def test_a_killed_cell_is_retried_a_limited_number_of_times(tmp_path: Path) -> None:
    always, once = (job for job in jobs(tmp_path, "killed", "killedonce") if job.seed == 0)
    summary, events = run([always, once])
    assert [(o.job.name, o.failure) for o in summary.failed] == [("tiny/killed/0", "killed")]
    assert failures(always) == ["killed"] * (RETRIES["killed"] + 1)
    assert once.state() == "done"
    assert events.count("retry    tiny/killed/0") == RETRIES["killed"]


def test_the_delay_doubles_with_each_retry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "BACKOFF", 10.0)
    quiet = Runner(Launcher(fake_cells.TARGET), make_slots(1), Recorder())
    (job, *_) = jobs(tmp_path, "ok")

    def delay(failure: FailureClass, seconds: float = 1.0) -> float | None:
        return quiet._retry_delay(Outcome(job, seconds, failure))

    assert [delay("killed") for _ in range(5)] == [10.0, 20.0, 40.0, None, None]
    assert delay("no-space") == 10.0
    assert [delay(f) for f in ("error", "diverged", "out-of-memory", "bad-configuration")] == (
        [None] * 4
    )
    quiet.urgency = 1
    assert delay("timed-out") is None


def test_an_interrupted_run_does_not_wait_for_retries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "BACKOFF", 1000.0)
    (job, *_) = jobs(tmp_path, "killed")
    stop = Recorder()

    def add_event(text: str) -> None:
        if text.startswith("retry"):
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(stop, "add_event", add_event)
    begun = time.monotonic()
    summary = Runner(Launcher(fake_cells.TARGET), make_slots(1), stop).run([job])
    assert summary.stopped_by == signal.SIGINT
    assert time.monotonic() - begun < TIMEOUT


def test_an_out_of_memory_error_of_torch_is_out_of_memory() -> None:
    """The name of the exception class counts, not its message."""
    import torch

    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    printed = "".join(traceback.format_exception_only(error))
    assert classify_failure(1, f"Traceback (most recent call last):\n{printed}") == "out-of-memory"
    assert classify_failure(1, printed.replace("CUDA out of memory", "HIP")) == "out-of-memory"


@pytest.mark.process
def test_a_full_disk_is_no_space(small_disk: Path) -> None:
    """The class is known even if the record of the failure cannot be written."""
    first, full, second = (
        next(job for job in jobs(small_disk, "ok", "full", "ok-2") if job.variant == name)
        for name in ("ok", "full", "ok-2")
    )
    assert run([first])[0].failed == []
    # One at a time, so that the second cell always meets a full disk.
    summary, events = run([full, second], at_once=1)
    assert {o.failure for o in summary.failed} == {"no-space"}, events
    assert events.count("retry    tiny/full/0") == RETRIES["no-space"]
    # With free space, the next run continues; finished cells stay done.
    (full.folder / "ballast").unlink()
    again, _ = run([first, second])
    assert again.failed == []
    assert count_runs(small_disk)["ok/0"] == 1


@pytest.mark.process
@pytest.mark.parametrize("is_full_at_the_end", [False, True])
def test_a_failure_is_recorded_as_soon_as_the_disk_has_space(
    is_full_at_the_end: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (job, *_) = jobs(tmp_path, "crash")
    write = Exit.write
    refused = []

    def refuse(record: Exit, path: Path) -> None:
        if is_full_at_the_end or len(refused) <= RETRIES["no-space"]:
            refused.append(path)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        write(record, path)

    monkeypatch.setattr(Exit, "write", refuse)
    summary, events = run([job], at_once=1)
    assert [outcome.failure for outcome in summary.failed] == ["no-space"]
    message = f"{job.folder}: its failure is not recorded: No space left on device; status shows"
    assert (message in events) == is_full_at_the_end
    ends = [folder.read_exit(attempt) for attempt in folder.list_attempts(job.folder)]
    assert len(ends) == 1 + RETRIES["no-space"]
    assert ends[:-1] == [None, None]
    if not is_full_at_the_end:
        assert ends[-1] is not None
        assert ends[-1].failure == "no-space"
        assert job.state() == "no-space"


def test_a_full_disk_during_locking_has_its_own_exit_code(small_disk: Path) -> None:
    """The cell has no log, and the disk may have space again when its end is recorded."""
    (job,) = (job for job in jobs(small_disk, "ok") if job.seed == 0)
    job.write_config()
    ballast = small_disk / "ballast"
    with pytest.raises(OSError, match="No space left"):
        ballast.write_bytes(bytes(2**21))
    slot = make_slots(1).reserve(job)
    assert slot is not None
    cell = Launcher(fake_cells.TARGET).start(job, slot, 0)
    assert cell.end() == DISK_FULL
    ballast.unlink()
    summary, _ = run([job])
    assert summary.failed == []


@pytest.mark.process
def test_cells_of_a_killed_fork_server_are_retried(tmp_path: Path) -> None:
    """The cells end with their server; a new server forks them again."""
    studies.write(tmp_path, make_body("gated"))
    with start_cli(tmp_path, "--jobs", "2", has_own_server=True) as process:
        wait_until(lambda: len(list_holders(tmp_path)) == 2)
        cells = list_holders(tmp_path)
        server = server_of(cells[0])
        assert server is not None
        os.kill(server, signal.SIGKILL)
        wait_until(lambda: not any(is_alive(pid) for pid in cells))
        (tmp_path / "runs" / "tiny" / "go").touch()
        assert process.wait(TIMEOUT) == 0
    assert {job.state() for job in jobs(tmp_path, "gated")} == {"done"}
    (job, *_) = jobs(tmp_path, "gated")
    assert failures(job) == ["killed"]


@pytest.mark.process
def test_random_kills_of_cells_and_runners_lose_no_result(tmp_path: Path) -> None:
    """After eight kills and an undisturbed run, every cell has a result.

    Two cells wait for the last kill, so that no command can end before it.
    """
    chance = random.Random(0)
    variants = [*(f"brief-{number}" for number in range(5)), "gated"]
    studies.write(tmp_path, make_body(*variants))
    kills = 0
    while kills < 8:
        with start_cli(tmp_path, "--jobs", "2") as process:
            wait_until(lambda process=process: list_holders(tmp_path) or process.poll() is not None)
            while kills < 8 and process.poll() is None:
                time.sleep(chance.uniform(0, 0.1))
                cells = list_holders(tmp_path)
                victim = chance.choice([process.pid, *cells, *cells])
                with contextlib.suppress(ProcessLookupError):
                    os.kill(victim, signal.SIGKILL)
                kills += 1
                if victim == process.pid:
                    process.wait(TIMEOUT)
                    wait_until(lambda cells=cells: not any(is_alive(pid) for pid in cells))
    (tmp_path / "runs" / "tiny" / "go").touch()
    with start_cli(tmp_path, "--jobs", "2") as process:
        assert process.wait(TIMEOUT) == 0
    cells = jobs(tmp_path, *variants)
    assert {job.state() for job in cells} == {"done"}
    # A cell with a result never runs again, so a kill costs at most the running cells. The ninth
    # kill is that of the command that was disturbed last.
    counts: Counter[str] = count_runs(tmp_path)
    assert len(counts) == 12
    assert counts.total() <= 12 + 9 * 2


def server_of(cell: int) -> int | None:
    """Return the pid of the fork server of a cell, or None if one of the two has ended."""
    with contextlib.suppress(OSError):
        parent = Path(f"/proc/{cell}/stat").read_text().rpartition(")")[2].split()[1]
        if b"multiprocessing.forkserver" in Path(f"/proc/{parent}/cmdline").read_bytes():
            return int(parent)
    return None


def test_a_cell_that_never_starts_fails_in_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (job, *_) = jobs(tmp_path, "ok")
    launcher = Launcher(fake_cells.TARGET)
    starts: list[Job] = []

    def start(job: Job, *_: object) -> CellProcess:
        starts.append(job)
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(launcher, "start", start)
    summary = Runner(launcher, make_slots(1), Recorder()).run([job])
    (failed,) = summary.failed
    assert failed.message == "could not be started: [Errno 24] Too many open files"
    assert len(starts) == 1 + RETRIES["killed"]


@pytest.mark.process
def test_too_many_open_files_only_delay_a_cell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A fork server with torch needs about a second to end.
    monkeypatch.setattr(runner, "BACKOFF", 1.0)
    cells = [job for job in jobs(tmp_path, "gated", "ok") if job.seed == 0]
    taken: list[int] = []

    class Exhausting(Recorder):
        def update(self, snapshot: object) -> None:
            if not taken and not self.events and list_holders(tmp_path):
                (tmp_path / "runs" / "tiny" / "go").touch()
                with contextlib.suppress(OSError):
                    while True:
                        taken.append(os.open(os.devnull, os.O_RDONLY))

        def add_event(self, text: str) -> None:
            super().add_event(text)
            while "Too many open files" in text and taken:
                os.close(taken.pop())

    display = Exhausting()
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (100, limits[1]))
    try:
        summary = Runner(Launcher(fake_cells.TARGET), make_slots(1), display).run(cells)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert any("Too many open files" in text for text in display.events)
    assert summary.failed == [], display.events
    assert count_runs(tmp_path) == {"gated/0": 1, "ok/0": 1}


def test_an_unforeseen_error_lets_cells_write_their_checkpoints(tmp_path: Path) -> None:
    (hang, *_) = jobs(tmp_path, "hang")

    class Broken(Recorder):
        def update(self, snapshot: object) -> None:
            if (hang.folder / "child.pid").exists():
                raise RuntimeError("unforeseen")

    with pytest.raises(RuntimeError, match="unforeseen"):
        Runner(Launcher(fake_cells.TARGET), make_slots(1), Broken()).run([hang])
    (attempt,) = folder.list_attempts(hang.folder)
    assert "Preempted: stopped by SIGTERM" in folder.read_log_tail(attempt)
    assert failures(hang) == ["killed"]
    assert hang.state() == "interrupted"


def test_a_lock_that_could_not_be_removed_stops_no_retry(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The runner itself keeps the lock of a cell until it has recorded the cell's end."""
    (job, *_) = jobs(tmp_path, "killedonce")
    unlink = Path.unlink
    refused: list[Path] = []

    def refuse_once(path: Path, missing_ok: bool = False) -> None:
        if path.name == "lock" and not refused:
            refused.append(path)
            raise OSError(errno.EIO, "Input/output error")
        unlink(path, missing_ok)

    monkeypatch.setattr(Path, "unlink", refuse_once)
    begun = time.monotonic()

    class Impatient(Recorder):
        def update(self, snapshot: object) -> None:
            assert time.monotonic() - begun < TIMEOUT

    summary = Runner(Launcher(fake_cells.TARGET), make_slots(1), Impatient()).run([job])
    assert refused
    assert summary.failed == []


@pytest.mark.process
def test_the_other_seeds_of_a_variant_that_fails_at_once_are_skipped(tmp_path: Path) -> None:
    study = studies.study(tmp_path, make_body("crash", "killedonce", "ok"))
    cells = expand(study, tmp_path / "runs", seeds=(0, 1, 2, 3)).jobs
    summary, output = run(cells, at_once=1)
    assert {o.job.name for o in summary.failed} == {"tiny/crash/0", "tiny/crash/1"}
    assert output.count("skipped") == 1
    message = "skipped  tiny/crash  2 more seeds: 2 seeds failed in the same way"
    assert message in output
    assert {job.state() for job in cells if job.variant != "crash"} == {"done"}
    # The next run tries the skipped seeds.
    summary, _ = run([job for job in cells if job.state() == "missing"], at_once=1)
    assert {o.job.name for o in summary.failed} == {"tiny/crash/2", "tiny/crash/3"}
    # If a seed of the variant has a result, no seed is skipped, whichever seeds fail first.
    result = cells[0].folder.parent / "9-other" / "result.json"
    assert result.parent.parent.name == "crash"
    result.parent.mkdir()
    result.touch()
    summary, _ = run([job for job in cells if job.variant == "crash"], at_once=1)
    assert len(summary.failed) == 4


@pytest.mark.process
def test_a_study_ends_after_the_same_exception_in_two_variants(tmp_path: Path) -> None:
    study = studies.study(tmp_path, make_body("crashonce", "crashonce-b", "ok", "ok-b"))
    cells = expand(study, tmp_path / "runs", seeds=(0, 1)).jobs
    summary, output = run(cells, at_once=1)
    assert {o.job.name for o in summary.failed} == {"tiny/crashonce/0", "tiny/crashonce-b/0"}
    message = (
        "skipped  tiny  6 more cells: 2 cells ended with the same exception (RuntimeError: the"
        " first time only); repair it, and the same command continues"
    )
    assert message in output
    assert [job.state() for job in cells[2:]] == ["missing"] * 6


@pytest.mark.process
def test_a_study_without_a_result_ends_after_the_same_exception_in_two_seeds(
    tmp_path: Path,
) -> None:
    study = studies.study(tmp_path, make_body("crash", "diverged", "killed"))
    cells = expand(study, tmp_path / "runs", seeds=(0, 1, 2)).jobs
    cells.sort(key=lambda job: job.variant)
    summary, output = run(cells, at_once=1)
    assert {o.job.name for o in summary.failed} == {"tiny/crash/0", "tiny/crash/1"}
    assert "skipped  tiny  6 more cells: 2 cells ended with the same exception" in output
