"""The process of a cell: effects of the cell's own code, and processes that it leaves behind."""

import os
import signal
from pathlib import Path

import pytest
from helpers import studies
from helpers.runs import (
    TIMEOUT,
    count_runs,
    is_alive,
    jobs,
    limit_memory,
    list_holders,
    make_body,
    run,
    start_cli,
    wait_until,
)

from lit_attn.cells import folder, lock
from lit_attn.cells.ranks import OOM_SCORE

pytestmark = pytest.mark.usefixtures("retry_at_once")


def processes_below(path: Path) -> list[int]:
    """Return the live processes whose environment mentions `path`."""
    pids = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            is_ours = str(path).encode() in (process / "environ").read_bytes()
        except OSError:
            continue
        if is_ours and int(process.name) != os.getpid() and is_alive(int(process.name)):
            pids.append(int(process.name))
    return pids


@pytest.mark.slow
@pytest.mark.parametrize("end", ["ok", "crash", "killed", "stuck"])
def test_no_process_outlives_its_cell(end: str, tmp_path: Path) -> None:
    """A process in a separate session ends too, however the cell ends."""
    studies.write(tmp_path, make_body(f"daemon-{end}"))
    environment = os.environ | {"TEST_FOLDER": str(tmp_path)}
    stall = ("--stall", "0.1") if end == "stuck" else ()
    with start_cli(
        tmp_path, "--seeds", "0,", *stall, environment=environment, has_own_server=True
    ) as process:
        assert process.wait(TIMEOUT) == (0 if end == "ok" else 1)
        assert list((tmp_path / "runs").glob("*/*/*/child.pid"))
        wait_until(lambda: not processes_below(tmp_path))


@pytest.mark.slow
def test_kill_9_of_the_runner_leaves_no_process_in_its_own_session(tmp_path: Path) -> None:
    studies.write(tmp_path, make_body("daemon-stuck"))
    environment = os.environ | {"TEST_FOLDER": str(tmp_path)}
    with start_cli(
        tmp_path, "--seeds", "0,", environment=environment, has_own_server=True
    ) as process:
        wait_until(lambda: list((tmp_path / "runs").glob("*/*/*/progress.json")))
        os.kill(process.pid, signal.SIGKILL)
        wait_until(lambda: not processes_below(tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("variant", "failure", "message"),
    [
        ("parricide", "killed", "ended by SIGKILL"),
        ("exit", "error", "exit code 0 without a result"),
        ("silent", "error", "exit code 0 without a result"),
    ],
)
def test_a_cell_that_ends_its_processes_fails_alone(
    variant: str, failure: str, message: str, tmp_path: Path
) -> None:
    """Another cell, forked from the same server, has a result after its first attempt."""
    cells = jobs(tmp_path, variant, "brief")
    summary, _ = run(cells)
    assert {outcome.job.variant for outcome in summary.failed} == {variant}
    for outcome in summary.failed:
        assert outcome.failure == failure
        assert outcome.message.startswith(message)
    assert count_runs(tmp_path)["brief/0"] == count_runs(tmp_path)["brief/1"] == 1


def test_a_cell_may_change_its_working_directory(tmp_path: Path) -> None:
    """Relative paths of the runner keep their meaning."""
    studies.write(tmp_path, make_body("elsewhere", "brief"))
    with start_cli(tmp_path, "--seeds", "0,") as process:
        output, _ = process.communicate(timeout=TIMEOUT)
    assert process.returncode == 0, output
    assert len(list(tmp_path.glob("runs/tiny/*/0-*/result.json"))) == 2


def test_a_rank_is_the_first_victim_of_the_out_of_memory_killer(tmp_path: Path) -> None:
    """The process that holds the cell's lock, the fork server and the runner keep their score."""
    studies.write(tmp_path, make_body("hang"))

    def score(pid: int) -> int:
        return int(Path(f"/proc/{pid}/oom_score_adj").read_text())

    with start_cli(tmp_path, "--seeds", "0,") as process:
        wait_until(lambda: list((tmp_path / "runs").glob("*/*/*/child.pid")))
        (first,) = list_holders(tmp_path)
        (rank,) = map(int, Path(f"/proc/{first}/task/{first}/children").read_text().split())
        assert score(rank) == OOM_SCORE
        assert score(first) == score(process.pid) == score(os.getpid())
        process.terminate()
        process.wait(TIMEOUT)


@pytest.mark.slow
def test_the_out_of_memory_killer_ends_the_leaking_cell_alone(tmp_path: Path) -> None:
    """The limit is that of a real control group, in which the kernel chooses the victim."""
    studies.write(tmp_path, make_body("leak", "gated", "brief"))
    with (
        limit_memory(2**30) as group,
        start_cli(tmp_path, "--seeds", "0,", "--jobs", "2", group=group) as process,
    ):
        wait_until(lambda: list((tmp_path / "runs").glob("*/leak/*/attempts/1/exit.json")))
        (tmp_path / "runs" / "tiny" / "go").touch()
        output, _ = process.communicate(timeout=TIMEOUT)
    assert process.returncode == 1, output
    results = {path.parts[-3] for path in (tmp_path / "runs").glob("*/*/*/result.json")}
    assert results == {"gated", "brief"}
    runs = count_runs(tmp_path)
    assert runs["gated/0"] == runs["brief/0"] == 1
    assert "ended by SIGKILL" in output


def test_a_dead_holder_on_another_machine_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The runner watches the holder's heartbeat; the cell does not watch it a second time."""
    monkeypatch.setattr(lock, "HEARTBEAT", 0.2)
    monkeypatch.setattr(lock, "STALE_AFTER", 1.0)
    (job, *_) = jobs(tmp_path, "ok")
    job.folder.mkdir(parents=True)
    holder = lock.LockHolder(host="elsewhere", boot="b", pid=1, started="1")
    (job.folder / "lock").write_text(holder.model_dump_json())
    assert job.state() == "running"
    summary, _ = run([job])
    assert summary.failed == []
    assert job.state() == "done"


def test_linked_attempts_are_one_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (job, *_) = jobs(tmp_path, "ok")
    job.folder.mkdir(parents=True)
    (tmp_path / "elsewhere").mkdir()
    (job.folder / "attempts").symlink_to(tmp_path / "elsewhere")
    summary, _ = run([job])
    (outcome,) = summary.failed
    text = f"OSError: [Errno 40] is a symbolic link; delete it: '{job.folder}/attempts'"
    assert outcome.message == text
    # A server that an earlier test started writes to the standard error of that test.
    assert "Traceback" not in capfd.readouterr().err
    assert not list((tmp_path / "elsewhere").iterdir())


def test_an_unusable_lock_is_the_reason_of_the_failure(tmp_path: Path) -> None:
    (job, *_) = jobs(tmp_path, "ok")
    job.folder.mkdir(parents=True)
    os.mkfifo(job.folder / "lock")
    summary, _ = run([job])
    (outcome,) = summary.failed
    assert outcome.message == f"{job.folder}/lock: is not a regular file. Delete it."
    assert "is not a regular file" in folder.read_log_tail(folder.list_attempts(job.folder)[0])
