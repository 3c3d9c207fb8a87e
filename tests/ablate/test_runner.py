"""The runner on real processes: failures, retries, signals, locks and shared devices."""

import errno
import io
import os
import signal
import socket
import time
from pathlib import Path
from typing import ClassVar

import pytest
from helpers import fake_cells, studies
from helpers.runs import (
    TIMEOUT,
    count_runs,
    is_alive,
    jobs,
    list_holders,
    make_body,
    run,
    run_cli,
    start_cli,
    wait_until,
)

from lit_attn.ablate import runner
from lit_attn.ablate.display import Display, Snapshot
from lit_attn.ablate.job import Job
from lit_attn.ablate.launch import Launcher
from lit_attn.ablate.runner import Runner
from lit_attn.ablate.slots import Slots, make_slots
from lit_attn.cells import folder, lock
from lit_attn.cells.lock import BUSY, read_holder
from lit_attn.config.cell import Cell

pytestmark = pytest.mark.usefixtures("retry_at_once")


def test_a_failing_cell_does_not_affect_other_cells(tmp_path: Path) -> None:
    cells = jobs(tmp_path, "ok", "crash", "diverged", "killed", "silent", "ok-2")
    summary, output = run(cells)
    ends = {(o.job.variant, o.job.seed): o.failure for o in summary.outcomes}
    assert ends == {
        (variant, seed): failure
        for seed in (0, 1)
        for variant, failure in {
            "ok": None,
            "crash": "error",
            "diverged": "diverged",
            "killed": "killed",
            "silent": "error",
            "ok-2": None,
        }.items()
    }
    assert {job.state() for job in cells} == {"done", "error", "diverged", "killed"}
    crash = next(job for job in cells if job.variant == "crash")
    assert (
        "FAILED   tiny/crash/0  error: RuntimeError: the reactor is on fire\n"
        f"         run alone: lit-attn train {crash.folder}"
    ) in output
    attempt = crash.folder / "attempts" / "1"
    ended = folder.read_exit(attempt)
    assert ended is not None
    assert (ended.failure, ended.returncode) == ("error", 1)
    assert "Traceback" in (attempt / "log.txt").read_text()
    assert read_holder(crash.folder) is None


def test_a_second_run_only_runs_cells_without_result(tmp_path: Path) -> None:
    cells = jobs(tmp_path, "ok", "crashonce")
    first, _ = run(cells)
    assert len(first.failed) == 2
    second, _ = run(cells)
    assert second.failed == []
    once = {"ok/0": 1, "ok/1": 1, "crashonce/0": 2, "crashonce/1": 2}
    assert count_runs(tmp_path) == once
    assert [path.name for path in folder.list_attempts(cells[1].folder)] == ["1", "2"]
    # A third time there is nothing to do, and a new variant runs alone.
    run(jobs(tmp_path, "ok", "crashonce", "ok-new"))
    assert count_runs(tmp_path) == {**once, "ok-new/0": 1, "ok-new/1": 1}


def test_a_cell_that_runs_out_of_memory_names_what_helps(tmp_path: Path) -> None:
    cells = jobs(tmp_path, "memory", "ok")[:2]
    slots = Slots([None, None], limit=3)
    summary = Runner(Launcher(fake_cells.TARGET), slots, Display(io.StringIO())).run(cells)
    (failed,) = summary.failed
    assert (failed.failure, failed.message) == ("out-of-memory", "MemoryError")
    for name in ("--jobs", "data.batch_size", "training.recompute"):
        assert name in failed.describe().splitlines()[0]
    assert count_runs(tmp_path) == {"memory/0": 1, "ok/0": 1}


def test_a_result_with_another_identity_does_not_count(tmp_path: Path) -> None:
    mine, *_ = jobs(tmp_path, "ok")
    wrong = fake_cells.result(mine.cell).model_copy(update={"identity": "0000000000"})
    wrong.write(mine.folder / "result.json")
    assert mine.state() == "unreadable"
    (mine.folder / "result.json").write_text('{"torn')
    assert mine.state() == "unreadable"
    run([mine])
    assert mine.state() == "done"


def test_an_unwritable_cell_folder_only_affects_its_cell(tmp_path: Path) -> None:
    cells = jobs(tmp_path, "ok", "ok-2")
    cells[0].folder.parent.mkdir(parents=True)
    cells[0].folder.write_text("a file in the way")
    summary, _ = run(cells)
    assert [(o.job.name, o.failure) for o in summary.failed] == [("tiny/ok/0", "error")]
    assert len(summary.outcomes) == 4


def test_children_of_a_cell_end_with_it(tmp_path: Path) -> None:
    cells = jobs(tmp_path, "orphan")
    summary, _ = run(cells)
    assert summary.failed == []
    for cell in cells:
        child = int((cell.folder / "child.pid").read_text())
        wait_until(lambda child=child: not is_alive(child))


def test_cells_share_the_cores_as_threads(tmp_path: Path) -> None:
    """The cells need new processes, because an OpenMP library reads the number once."""
    studies.write(tmp_path, make_body("ok"))
    environment = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"}
    with start_cli(tmp_path, "--jobs", "1", environment=environment) as process:
        assert process.wait(TIMEOUT) == 0
    log = next((tmp_path / "runs" / "tiny" / "ok").glob("0-*/attempts/1/log.txt"))
    assert log.read_text() == f"threads {len(os.sched_getaffinity(0))}\n"


def hanging(path: Path) -> list[int]:
    """Return the pids of the children of hanging cells."""
    files = (path / "runs").glob("*/hang/*/child.pid")
    return [int(file.read_text()) for file in files if file.read_text()]


@pytest.mark.slow
def test_an_interrupt_lets_running_cells_finish(tmp_path: Path) -> None:
    studies.write(tmp_path, make_body("gated", "ok"))
    with start_cli(tmp_path, "--jobs", "1") as process:
        wait_until(lambda: list_holders(tmp_path))
        # A terminal sends the signal to its foreground group.
        os.killpg(process.pid, signal.SIGINT)
        assert process.stdout is not None
        # The runner may not know yet that its cell has started.
        wait_until(lambda: ", starting no more;" in process.stdout.readline())
        (tmp_path / "runs" / "tiny" / "go").touch()
        assert process.wait(TIMEOUT) == 130
    assert count_runs(tmp_path) == {"gated/0": 1}
    assert len(list((tmp_path / "runs").glob("*/*/*/result.json"))) == 1
    with start_cli(tmp_path, "--jobs", "2") as process:
        assert process.wait(TIMEOUT) == 0
    assert set(count_runs(tmp_path).values()) == {1}


@pytest.mark.slow
@pytest.mark.parametrize("stubborn", [False, True])
def test_a_second_interrupt_stops_cells_and_a_third_kills_them(
    tmp_path: Path, stubborn: bool
) -> None:
    studies.write(tmp_path, make_body("hang", "ok"))
    (tmp_path / "runs" / "tiny").mkdir(parents=True)
    if stubborn:
        (tmp_path / "runs" / "tiny" / "stubborn").touch()
    with start_cli(tmp_path, "--jobs", "1") as process:
        wait_until(lambda: hanging(tmp_path))
        pids = [*list_holders(tmp_path), *hanging(tmp_path)]
        assert process.stdout is not None
        for answer in ("finishing", "stopping", *(["stopping"] if stubborn else [])):
            time.sleep(runner.REPEAT)
            process.send_signal(signal.SIGINT)
            wait_until(lambda word=answer: word in process.stdout.readline())
        assert process.wait(TIMEOUT) == 130
    assert not any(is_alive(pid) for pid in pids)
    ended = folder.read_exit(next((tmp_path / "runs" / "tiny" / "hang").glob("0-*/attempts/1")))
    assert ended is not None
    assert (ended.failure, ended.is_stopped) == ("killed", True)
    assert ended.message == ("ended by SIGKILL" if stubborn else "stopped by SIGTERM")
    # A stop by the user is no failure of the cell, in no table.
    assert jobs(tmp_path, "hang", "ok")[0].state() == "interrupted"


@pytest.mark.parametrize(("seconds", "urgency"), [(1e9, 1), (0.0, 2)])
def test_interrupts_in_quick_succession_count_as_one(
    seconds: float, urgency: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "REPEAT", seconds)
    (job, *_) = jobs(tmp_path, "gated")
    go = tmp_path / "runs" / "tiny" / "go"
    is_interrupted = False

    class Interrupting(Display):
        def update(self, snapshot: Snapshot) -> None:
            nonlocal is_interrupted
            if not is_interrupted and list_holders(tmp_path):
                is_interrupted = True
                os.kill(os.getpid(), signal.SIGINT)
                os.kill(os.getpid(), signal.SIGINT)
                go.touch()

    interrupted = Runner(Launcher(fake_cells.TARGET), make_slots(1), Interrupting(io.StringIO()))
    interrupted.run([job])
    assert interrupted.urgency == urgency


def test_sigterm_stops_cells(tmp_path: Path) -> None:
    studies.write(tmp_path, make_body("hang"))
    with start_cli(tmp_path, "--jobs", "2") as process:
        wait_until(lambda: len(hanging(tmp_path)) == 2)
        pids = [*list_holders(tmp_path), *hanging(tmp_path)]
        process.terminate()
        output, _ = process.communicate(timeout=TIMEOUT)
        assert process.returncode == 143
    assert "stopped  tiny/hang/0" in output
    # Stopped cells do not count as failed.
    assert "0 done, 0 running, 0 waiting" in output
    assert "failed" not in output
    assert "FAILED" not in output
    assert not any(is_alive(pid) for pid in pids)


@pytest.mark.slow
@pytest.mark.skipif(
    signal.getsignal(signal.SIGHUP) is signal.SIG_IGN, reason="nohup ignores SIGHUP"
)
def test_a_signal_to_the_process_group_lets_cells_save(tmp_path: Path) -> None:
    """`timeout` and a closed terminal signal the group; the fork server must survive."""
    studies.write(tmp_path, make_body("hang"))
    with start_cli(tmp_path, "--jobs", "1") as process:
        wait_until(lambda: hanging(tmp_path))
        os.killpg(process.pid, signal.SIGHUP)
        assert process.wait(TIMEOUT) == 128 + signal.SIGHUP
    ended = folder.read_exit(next((tmp_path / "runs" / "tiny" / "hang").glob("0-*/attempts/1")))
    assert ended is not None
    assert ended.message == "stopped by SIGTERM"


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_during_the_reports_leaves_no_temporary_file(
    number: signal.Signals, tmp_path: Path
) -> None:
    studies.write(tmp_path, make_body("ok"))
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "pause").touch()
    with start_cli(tmp_path, "--seeds", "0,") as process:
        wait_until(lambda: list(tmp_path.glob("half-*")))
        process.send_signal(number)
        assert process.wait(TIMEOUT) == 128 + number
    assert not list(tmp_path.glob("half-*"))
    # The same command goes on with the reports.
    (tmp_path / "runs" / "pause").unlink()
    assert run_cli(tmp_path, "--seeds", "0,")[0] == 0
    assert count_runs(tmp_path) == {"ok/0": 1}


@pytest.mark.slow
def test_cells_end_with_a_killed_runner(tmp_path: Path) -> None:
    studies.write(tmp_path, make_body("gated"))
    with start_cli(tmp_path, "--jobs", "2") as process:
        wait_until(lambda: len(count_runs(tmp_path)) == 2)
        pids = list_holders(tmp_path)
        process.kill()
        wait_until(lambda: not any(is_alive(pid) for pid in pids))
    (tmp_path / "runs" / "tiny" / "go").touch()
    assert {job.state() for job in jobs(tmp_path, "gated")} == {"interrupted"}
    with start_cli(tmp_path) as process:
        assert process.wait(TIMEOUT) == 0
    assert count_runs(tmp_path) == {"gated/0": 2, "gated/1": 2}


def test_two_runners_run_each_cell_once(tmp_path: Path) -> None:
    """Both runners end when all cells are done."""
    studies.write(tmp_path, make_body("gated", "ok", "ok-2", "ok-3"))
    with start_cli(tmp_path, "--jobs", "2") as first, start_cli(tmp_path, "--jobs", "2") as second:
        wait_until(lambda: len(list_holders(tmp_path)) == 2)
        (tmp_path / "runs" / "tiny" / "go").touch()
        assert (first.wait(TIMEOUT), second.wait(TIMEOUT)) == (0, 0)
    assert len(count_runs(tmp_path)) == 8
    assert set(count_runs(tmp_path).values()) == {1}


@pytest.mark.slow
def test_a_failure_counts_for_both_runners(tmp_path: Path) -> None:
    """A runner does not repeat a cell that failed for another runner meanwhile."""
    studies.write(tmp_path, make_body("gated", "diverged", "crash", "ok"))
    with start_cli(tmp_path, "--jobs", "1") as first:
        wait_until(lambda: list_holders(tmp_path))
        with start_cli(tmp_path, "--jobs", "1") as second:
            wait_until(lambda: count_runs(tmp_path)["ok/0"])
            (tmp_path / "runs" / "tiny" / "go").touch()
            assert second.wait(TIMEOUT) == 1
            output = first.communicate(timeout=TIMEOUT)[0]
            assert first.returncode == 1
    assert set(count_runs(tmp_path).values()) == {1}
    assert "FAILED   tiny/diverged/1  diverged: " in output
    with start_cli(tmp_path) as again:
        assert again.wait(TIMEOUT) == 1
    # Diverged cells are not repeated.
    assert (count_runs(tmp_path)["diverged/0"], count_runs(tmp_path)["crash/1"]) == (1, 2)


def test_a_cell_is_locked_until_its_failure_is_recorded(tmp_path: Path) -> None:
    """Without the lock, another runner would take the cell for interrupted and run it again."""
    job = jobs(tmp_path, "crash")[0]
    job.write_config()
    slot = make_slots(1).reserve(job)
    assert slot is not None
    cell = Launcher(fake_cells.TARGET).start(job, slot, 0)
    assert cell.end() == 1
    assert job.state() == "running"
    lock.release_lock(job.folder)
    assert job.state() == "interrupted"
    run([job])
    assert job.state() == "error"
    assert count_runs(tmp_path) == {"crash/0": 2}


def test_a_cell_does_not_start_after_a_new_failure(tmp_path: Path) -> None:
    """Another runner may run a cell between the check of its state and its lock."""
    job = jobs(tmp_path, "crash")[0]
    run([job])
    slot = make_slots(1).reserve(job)
    assert slot is not None
    launcher = Launcher(fake_cells.TARGET)
    assert launcher.start(job, slot, 0).end() == BUSY
    assert count_runs(tmp_path) == {"crash/0": 1}
    lock.release_lock(job.folder)
    assert launcher.start(job, slot, 1).end() == 1
    assert count_runs(tmp_path) == {"crash/0": 2}


def test_a_cell_whose_folder_another_runner_cleans_is_started_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cell that begins removes unfinished files, also the config.yaml that a runner writes."""
    cells = jobs(tmp_path, "ok")[:1]
    write = Cell.write
    lost: list[Path] = []

    def lose(cell: Cell, path: Path) -> None:
        if not lost:
            lost.append(path)
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", str(path))
        write(cell, path)

    monkeypatch.setattr(Cell, "write", lose)
    summary, _ = run(cells)
    assert summary.failed == []
    assert count_runs(tmp_path) == {"ok/0": 1}


def hold_elsewhere(job: Job, **changes: object) -> None:
    """Write the lock of a process that this machine cannot look up, as in a copied folder."""
    holder = lock.LockHolder(**lock.current_process().model_dump())
    holder = holder.model_copy(update={"host": "elsewhere", "boot": "other", "pid": 7, **changes})
    job.folder.mkdir(parents=True)
    (job.folder / "lock").write_text(holder.model_dump_json())


def test_a_foreign_lock_that_a_run_waits_for_is_reported_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lock, "STALE_AFTER", 1.5)
    cells = jobs(tmp_path, "ok", "ok-2")
    hold_elsewhere(cells[1])
    summary, output = run(cells, at_once=1)
    assert summary.failed == []
    assert len(summary.outcomes) == len(cells)
    lines = [line for line in output.splitlines() if line.startswith("waiting")]
    place = cells[1].folder / "lock"
    assert len(lines) == 1
    assert f"{cells[1].name}  process 7 on elsewhere holds {place}" in lines[0]
    assert "If the folder was copied, or that process has ended, delete the file." in lines[0]


def test_a_cell_that_another_runner_trains_is_reported_without_advice(tmp_path: Path) -> None:
    cells = jobs(tmp_path, "ok")[:1]
    output = io.StringIO()

    class Releasing(Display):
        def add_event(self, text: str) -> None:
            super().add_event(text)
            if text.startswith("waiting"):
                (cells[0].folder / "lock").unlink()

    hold_elsewhere(cells[0], **lock.current_process().model_dump())
    Runner(Launcher(fake_cells.TARGET), make_slots(1), Releasing(output)).run(cells)
    text = f"waiting  tiny/ok/0  process {os.getpid()} on {socket.gethostname()} runs this cell  [0"
    assert text in output.getvalue()


def test_the_grace_and_the_limit_of_a_stopped_cell_are_those_of_the_runner() -> None:
    class Running:
        kill_at = None
        stops: ClassVar[list[tuple[float, str]]] = []

        def idle_seconds(self) -> float:
            return 0.0

        def stop(self, number: int, grace: float, overdue: str) -> None:
            self.stops.append((grace, overdue))

    stopping = Runner(Launcher(fake_cells.TARGET), make_slots(1), Display(io.StringIO()))
    stopping.running = {0: Running()}  # type: ignore[dict-item]
    stopping.urgency = runner.STOP
    stopping._enforce()
    stopping.grace = 90.0
    stopping.overdue = "the time limit"
    stopping._enforce()
    assert Running.stops == [(runner.GRACE, ""), (90.0, "the time limit")]
