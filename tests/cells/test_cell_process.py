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

from lit_attn.cells import folder
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
def test_no_process_outlives_its_cell(tmp_path: Path) -> None:
    """A process in a separate session ends too, however the cell ends."""
    names = [f"daemon-{end}" for end in ("ok", "crash", "killed", "stuck")]
    studies.write(tmp_path, make_body(*names))
    environment = os.environ | {"TEST_FOLDER": str(tmp_path)}
    options = ("--seeds", "0,", "--stall", "0.1")
    with start_cli(tmp_path, *options, environment=environment, has_own_server=True) as process:
        assert process.wait(TIMEOUT) == 1
        children = {path.parts[-3] for path in (tmp_path / "runs").glob("*/*/*/child.pid")}
        assert children == set(names)
        results = [path.parts[-3] for path in (tmp_path / "runs").glob("*/*/*/result.json")]
        assert results == ["daemon-ok"]
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
def test_a_cell_that_ends_its_processes_fails_alone(tmp_path: Path) -> None:
    """Another cell, forked from the same server, has a result after its first attempt."""
    expected = {
        "parricide": ("killed", "ended by SIGKILL"),
        "exit": ("error", "exit code 0 without a result"),
        "silent": ("error", "exit code 0 without a result"),
    }
    summary, _ = run(jobs(tmp_path, *expected, "brief"))
    assert {outcome.job.variant for outcome in summary.failed} == set(expected)
    assert len(summary.failed) == 2 * len(expected)
    for outcome in summary.failed:
        failure, message = expected[outcome.job.variant]
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
