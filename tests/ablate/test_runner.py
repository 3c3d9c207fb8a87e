"""The runner on real processes: what fails, what is left alone, what is run again, what is left."""

import io
import os
import signal
from pathlib import Path

import pytest
from helpers import fake_cells, studies
from helpers.runs import TIMEOUT, alive, cli, jobs, names, ran, run, running, until

from lit_attn.ablate import runner
from lit_attn.ablate.display import Lines, Snapshot
from lit_attn.ablate.launch import Launcher
from lit_attn.ablate.machine import Device
from lit_attn.ablate.plan import expand
from lit_attn.ablate.runner import Runner
from lit_attn.ablate.slots import Slots, make_slots
from lit_attn.cells import folder, lock
from lit_attn.cells.lock import hold_lock, read_holder
from lit_attn.cells.worker import BUSY


@pytest.fixture(autouse=True)
def _retry_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "BACKOFF", 0.01)


def test_no_cell_ends_another(tmp_path: Path) -> None:
    cells = jobs(tmp_path, "ok", "crash", "diverged", "killed", "silent", "ok-2")
    summary, said = run(cells)
    ends = {(o.job.cell.variant, o.job.cell.seed): o.failure for o in summary.outcomes}
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
    crash = next(job for job in cells if job.cell.variant == "crash")
    assert (
        "FAILED   tiny/crash/0  error: RuntimeError: the reactor is on fire\n"
        f"         run alone: python -m lit_attn.train {crash.folder}"
    ) in said
    attempt = crash.folder / "attempts" / "1"
    ended = folder.read_exit(attempt)
    assert ended is not None
    assert (ended.failure, ended.returncode) == ("error", 1)
    assert "Traceback" in (attempt / "log.txt").read_text()
    assert read_holder(crash.folder) is None


def test_again_runs_only_what_is_missing(tmp_path: Path) -> None:
    cells = jobs(tmp_path, "ok", "crashonce")
    first, _ = run(cells)
    assert len(first.failed) == 2
    second, _ = run(cells)
    assert second.failed == []
    once = {"ok/0": 1, "ok/1": 1, "crashonce/0": 2, "crashonce/1": 2}
    assert ran(tmp_path) == once
    assert [path.name for path in folder.list_attempts(cells[1].folder)] == ["1", "2"]
    # A third time there is nothing to do, and a new variant runs alone.
    run(jobs(tmp_path, "ok", "crashonce", "ok-new"))
    assert ran(tmp_path) == {**once, "ok-new/0": 1, "ok-new/1": 1}


@pytest.mark.parametrize(("memory", "together"), [(100, 4), (2, 1)])
def test_cells_share_a_device_by_what_they_were_seen_to_need(
    memory: int, together: int, tmp_path: Path
) -> None:
    """Cells that hold one byte each, on one core: none of them starts before the first has told."""
    cells = expand(studies.study(tmp_path, names("gated")), tmp_path / "runs", seeds=(0, 1, 2, 3))
    started: list[int] = []

    class Opening(Lines):
        """Opens the gate once as many are running as should be."""

        def update(self, snapshot: Snapshot) -> None:
            started.append(len(snapshot.running))
            if snapshot.done or len(snapshot.running) == together:
                (tmp_path / "runs" / "tiny" / "go").touch()

    slots = Slots([Device(None, memory)], limit=4)
    summary = Runner(Launcher(fake_cells.TARGET), slots, Opening(io.StringIO())).run(cells.jobs)
    assert summary.failed == []
    assert started[0] == 1
    assert max(started) == together


def test_a_cell_that_was_crowded_out_of_memory_is_run_again_alone(tmp_path: Path) -> None:
    cells = jobs(tmp_path, "gated", "crowded")[:2]
    slots = Slots([Device(None, 1000)], limit=2)
    for job in cells:
        slots.learn(job.cell, 1)

    class Opening(Lines):
        def say(self, text: str) -> None:
            super().say(text)
            if text.startswith("retry"):
                (tmp_path / "runs" / "tiny" / "go").touch()

    said = io.StringIO()
    summary = Runner(Launcher(fake_cells.TARGET), slots, Opening(said)).run(cells)
    assert summary.failed == []
    assert "retry    tiny/crowded/0  in 0 s, after out-of-memory: MemoryError" in said.getvalue()
    assert ran(tmp_path) == {"gated/0": 1, "crowded/0": 2}


def test_a_result_of_another_cell_is_no_result(tmp_path: Path) -> None:
    mine, *_ = jobs(tmp_path, "ok")
    wrong = fake_cells.result(mine.cell).model_copy(update={"identity": "0000000000"})
    wrong.write(mine.folder / "result.json")
    assert mine.state() == "unreadable"
    (mine.folder / "result.json").write_text('{"torn')
    assert mine.state() == "unreadable"
    run([mine])
    assert mine.state() == "done"


def test_states(tmp_path: Path) -> None:
    job = jobs(tmp_path, "ok")[0]
    assert job.state() == "missing"
    folder.create_attempt(job.folder)
    assert job.state() == "interrupted"
    with hold_lock(job.folder):
        assert job.state() == "running"


def test_a_cell_that_cannot_be_written_fails_alone(tmp_path: Path) -> None:
    cells = jobs(tmp_path, "ok", "ok-2")
    cells[0].folder.parent.mkdir(parents=True)
    cells[0].folder.write_text("a file in the way")
    summary, _ = run(cells)
    assert [(o.job.name, o.failure) for o in summary.failed] == [("tiny/ok/0", "error")]
    assert len(summary.outcomes) == 4


def test_nothing_that_a_cell_started_outlives_it(tmp_path: Path) -> None:
    cells = jobs(tmp_path, "orphan")
    summary, _ = run(cells)
    assert summary.failed == []
    for cell in cells:
        child = int((cell.folder / "child.pid").read_text())
        until(lambda child=child: not alive(child))


def test_threads_are_shared_out(tmp_path: Path) -> None:
    """In processes of their own: an OpenMP library reads the number once."""
    studies.write(tmp_path, names("ok"))
    environment = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"}
    with cli(tmp_path, "--jobs", "1", environment=environment) as process:
        assert process.wait(TIMEOUT) == 0
    log = next((tmp_path / "runs" / "tiny" / "ok").glob("0-*/attempts/1/log.txt"))
    assert log.read_text() == f"threads {len(os.sched_getaffinity(0))}\n"


def hanging(path: Path) -> list[int]:
    """The children that hanging cells have started."""
    files = (path / "runs").glob("*/hang/*/child.pid")
    return [int(file.read_text()) for file in files if file.read_text()]


def test_one_interrupt_drains(tmp_path: Path) -> None:
    studies.write(tmp_path, names("gated", "ok"))
    with cli(tmp_path, "--jobs", "1") as process:
        until(lambda: running(tmp_path))
        # As a terminal does it: to the whole foreground group.
        os.killpg(process.pid, signal.SIGINT)
        assert process.stdout is not None
        until(lambda: "finishing 1 running cells" in process.stdout.readline())
        (tmp_path / "runs" / "tiny" / "go").touch()
        assert process.wait(TIMEOUT) == 130
    assert ran(tmp_path) == {"gated/0": 1}
    assert len(list((tmp_path / "runs").glob("*/*/*/result.json"))) == 1
    with cli(tmp_path, "--jobs", "2") as process:
        assert process.wait(TIMEOUT) == 0
    assert set(ran(tmp_path).values()) == {1}


@pytest.mark.parametrize("stubborn", [False, True])
def test_a_second_interrupt_stops_and_a_third_kills(tmp_path: Path, stubborn: bool) -> None:
    studies.write(tmp_path, names("hang", "ok"))
    (tmp_path / "runs" / "tiny").mkdir(parents=True)
    if stubborn:
        (tmp_path / "runs" / "tiny" / "stubborn").touch()
    with cli(tmp_path, "--jobs", "1") as process:
        until(lambda: hanging(tmp_path))
        pids = [*running(tmp_path), *hanging(tmp_path)]
        assert process.stdout is not None
        for answer in ("finishing", "stopping", *(["stopping"] if stubborn else [])):
            process.send_signal(signal.SIGINT)
            until(lambda word=answer: word in process.stdout.readline())
        assert process.wait(TIMEOUT) == 130
    assert not any(alive(pid) for pid in pids)
    ended = folder.read_exit(next((tmp_path / "runs" / "tiny" / "hang").glob("0-*/attempts/1")))
    assert ended is not None
    assert ended.failure == "killed"
    assert ended.message == ("ended by SIGKILL" if stubborn else "stopped by SIGTERM")


def test_sigterm_stops_at_once(tmp_path: Path) -> None:
    studies.write(tmp_path, names("hang"))
    with cli(tmp_path, "--jobs", "2") as process:
        until(lambda: len(hanging(tmp_path)) == 2)
        pids = [*running(tmp_path), *hanging(tmp_path)]
        process.terminate()
        output, _ = process.communicate(timeout=TIMEOUT)
        assert process.returncode == 143
    assert "stopped  tiny/hang/0" in output
    # Nor do the counts call it so.
    assert "0 done, 0 running, 0 waiting" in output
    assert "failed" not in output
    assert "FAILED" not in output
    assert not any(alive(pid) for pid in pids)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_to_the_whole_group_lets_cells_save(
    tmp_path: Path, number: signal.Signals
) -> None:
    """As `timeout` and a closed terminal do it: the server that cells are forked from stays."""
    studies.write(tmp_path, names("hang"))
    with cli(tmp_path, "--jobs", "1") as process:
        until(lambda: hanging(tmp_path))
        os.killpg(process.pid, number)
        assert process.wait(TIMEOUT) == 128 + number
    ended = folder.read_exit(next((tmp_path / "runs" / "tiny" / "hang").glob("0-*/attempts/1")))
    assert ended is not None
    assert ended.message == "stopped by SIGTERM"


def test_a_killed_runner_takes_its_cells_with_it(tmp_path: Path) -> None:
    studies.write(tmp_path, names("gated"))
    with cli(tmp_path, "--jobs", "2") as process:
        until(lambda: len(ran(tmp_path)) == 2)
        pids = running(tmp_path)
        process.kill()
        until(lambda: not any(alive(pid) for pid in pids))
    (tmp_path / "runs" / "tiny" / "go").touch()
    assert {job.state() for job in jobs(tmp_path, "gated")} == {"interrupted"}
    with cli(tmp_path) as process:
        assert process.wait(TIMEOUT) == 0
    assert ran(tmp_path) == {"gated/0": 2, "gated/1": 2}


def test_a_killed_cell_is_run_again(tmp_path: Path) -> None:
    studies.write(tmp_path, names("gated"))
    with cli(tmp_path, "--jobs", "1") as process:
        until(lambda: ran(tmp_path))
        os.kill(running(tmp_path)[0], signal.SIGKILL)
        (tmp_path / "runs" / "tiny" / "go").touch()
        assert process.wait(TIMEOUT) == 0
    assert ran(tmp_path) == {"gated/0": 2, "gated/1": 1}


def test_two_runners_share_one_matrix(tmp_path: Path) -> None:
    """Each cell runs once; both end when everything is done."""
    studies.write(tmp_path, names("gated", "ok", "ok-2", "ok-3"))
    with cli(tmp_path, "--jobs", "2") as first, cli(tmp_path, "--jobs", "2") as second:
        until(lambda: len(running(tmp_path)) == 2)
        (tmp_path / "runs" / "tiny" / "go").touch()
        assert (first.wait(TIMEOUT), second.wait(TIMEOUT)) == (0, 0)
    assert len(ran(tmp_path)) == 8
    assert set(ran(tmp_path).values()) == {1}


def test_two_runners_find_a_failure_once(tmp_path: Path) -> None:
    """What has failed for the one is not run again by the other, and counts for both."""
    studies.write(tmp_path, names("gated", "diverged", "crash", "ok"))
    with cli(tmp_path, "--jobs", "1") as first:
        until(lambda: running(tmp_path))
        with cli(tmp_path, "--jobs", "1") as second:
            until(lambda: ran(tmp_path)["ok/0"])
            (tmp_path / "runs" / "tiny" / "go").touch()
            assert second.wait(TIMEOUT) == 1
            output = first.communicate(timeout=TIMEOUT)[0]
            assert first.returncode == 1
    assert set(ran(tmp_path).values()) == {1}
    assert "FAILED   tiny/diverged/1  diverged: " in output
    # Where the user says so, and to whom alone.
    with cli(tmp_path, "--retry") as again:
        assert again.wait(TIMEOUT) == 1
    assert ran(tmp_path)["diverged/0"] == ran(tmp_path)["crash/1"] == 2


def test_a_cell_is_held_until_its_failure_is_recorded(tmp_path: Path) -> None:
    """Else another runner would find it cut off without a word, and run it once more."""
    job = jobs(tmp_path, "crash")[0]
    job.cell.write(job.folder / "config.yaml")
    slot = make_slots(1).take(job.cell)
    assert slot is not None
    cell = Launcher(fake_cells.TARGET).start(job, slot, 0)
    assert cell.end() == 1
    assert job.state() == "running"
    lock.release_lock(job.folder)
    assert job.state() == "interrupted"
    run([job])
    assert job.state() == "error"
    assert ran(tmp_path) == {"crash/0": 2}


def test_a_failure_recorded_while_a_cell_starts_is_seen(tmp_path: Path) -> None:
    """Between a runner's look at a cell and the cell's lock another runner may have had it."""
    job = jobs(tmp_path, "crash")[0]
    run([job])
    slot = make_slots(1).take(job.cell)
    assert slot is not None
    launcher = Launcher(fake_cells.TARGET)
    assert launcher.start(job, slot, 0).end() == BUSY
    assert ran(tmp_path) == {"crash/0": 1}
    lock.release_lock(job.folder)
    assert launcher.start(job, slot, 1).end() == 1
    assert ran(tmp_path) == {"crash/0": 2}
