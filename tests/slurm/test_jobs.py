"""Cells as jobs of a real SLURM on one node: submission, following, requeueing, cancelling."""

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers import slurm_cluster, studies
from helpers.runs import TIMEOUT, count_runs, list_holders, make_body, start_cli, wait_until

from lit_attn.ablate.slurm.queue import NAME
from lit_attn.cells import folder

pytestmark = [
    pytest.mark.slow,
    pytest.mark.process,
    pytest.mark.skipif(bool(slurm_cluster.missing()), reason=slurm_cluster.missing()),
]
SLURM = ("--launcher", "slurm")


@pytest.fixture(scope="module")
def cluster() -> Iterator[dict[str, str]]:
    # Without the option of the jobs, this cluster would queue none of them again.
    with slurm_cluster.cluster("JobRequeue=0\n") as environment:
        yield environment


def call(path: Path, cluster: dict[str, str], *arguments: str) -> tuple[int, str]:
    with start_cli(path, *SLURM, *arguments, environment=cluster) as process:
        output, _ = process.communicate(timeout=2 * TIMEOUT)
        return process.returncode, output


def queue(path: Path, cluster: dict[str, str], *states: str) -> list[str]:
    """Return the ids of the jobs of this test in one of `states`."""
    job_names = {
        NAME + batch.parent.name for batch in (path / "runs").glob("*/.slurm/*/batch.json")
    }
    output = subprocess.run(
        ["squeue", "-h", "--array", "--states=all", "--format=%i|%T|%j"],
        env=cluster,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    rows = [line.split("|") for line in output.splitlines()]
    return [job for job, state, name in rows if name in job_names and state in states]


def run_command(cluster: dict[str, str], *command: str) -> None:
    subprocess.run(command, env=cluster, check=True, timeout=TIMEOUT)


def messages(path: Path) -> list[str]:
    """Return the recorded messages of all attempts."""
    attempts = sorted((path / "runs").glob("*/*/*/attempts/*"))
    ends = [folder.read_exit(attempt) for attempt in attempts]
    return [end.message for end in ends if end is not None]


def test_missing_cells_are_submitted_and_followed_to_their_ends(
    tmp_path: Path, cluster: dict[str, str]
) -> None:
    studies.write(tmp_path, make_body("ok", "crash"))
    code, output = call(tmp_path, cluster, "--seeds", "0,")
    assert code == 1
    assert "2 jobs submitted, 0 already submitted" in output
    assert "FAILED   tiny/crash/0  error: RuntimeError: the reactor is on fire" in output
    assert "the table of tiny" in output
    assert "1 job submitted" in call(tmp_path, cluster, "--seeds", "0,")[1]
    assert count_runs(tmp_path) == {"ok/0": 1, "crash/0": 2}
    # A local run continues in the same folders.
    with start_cli(tmp_path, "--seeds", "0,", environment=cluster) as process:
        assert process.wait(TIMEOUT) == 1
    assert count_runs(tmp_path)["ok/0"] == 1


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_jobs_survive_the_terminal_and_are_followed_again(
    tmp_path: Path, cluster: dict[str, str], number: signal.Signals
) -> None:
    studies.write(tmp_path, make_body("gated"))
    options = (*SLURM, "--seeds", "0,")
    with start_cli(tmp_path, *options, environment=cluster) as process:
        wait_until(lambda: len(queue(tmp_path, cluster, "RUNNING")) == 1)
        assert process.stdout is not None
        os.kill(process.pid, number)
        output = process.stdout.read()
        process.wait(TIMEOUT)
    assert ("not stopped: 1 job" in output) == (number != signal.SIGKILL)
    with start_cli(tmp_path, *options, environment=cluster) as process:
        assert process.stdout is not None
        wait_until(lambda: "0 jobs submitted, 1 already submitted" in process.stdout.readline())
        (tmp_path / "runs" / "tiny" / "go").touch()
        assert process.wait(TIMEOUT) == 0
    assert count_runs(tmp_path) == {"gated/0": 1}


@pytest.mark.parametrize(
    ("how", "why"),
    [
        (("scontrol", "requeue"), "stopped by SIGTERM"),
        (("scancel", "--signal=USR2"), "the time limit of its job was reached"),
    ],
    ids=["preempted", "out of time"],
)
def test_a_preempted_or_timed_out_job_saves_and_is_requeued(
    tmp_path: Path, cluster: dict[str, str], how: tuple[str, ...], why: str
) -> None:
    studies.write(tmp_path, make_body("hangonce"))
    with start_cli(tmp_path, *SLURM, "--seeds", "0,", environment=cluster) as process:
        wait_until(lambda: list((tmp_path / "runs").glob("*/*/*/child.pid")))
        run_command(cluster, *how, *queue(tmp_path, cluster, "RUNNING"))
        output, _ = process.communicate(timeout=TIMEOUT)
        assert process.returncode == 0, output
    assert "FAILED" not in output
    assert count_runs(tmp_path) == {"hangonce/0": 2}
    assert messages(tmp_path) == [why]
    assert len(list((tmp_path / "runs").glob("*/.slurm/*/batch.json"))) == 1


def test_cancelled_jobs_save_and_continue_after_a_new_submission(
    tmp_path: Path, cluster: dict[str, str]
) -> None:
    studies.write(tmp_path, make_body("hangonce"))
    with start_cli(tmp_path, *SLURM, environment=cluster) as process:
        wait_until(lambda: len(list((tmp_path / "runs").glob("*/*/*/child.pid"))) == 2)
        assert call(tmp_path, cluster, "--cancel") == (0, "2 jobs cancelled\n")
        output, _ = process.communicate(timeout=TIMEOUT)
        assert process.returncode == 1
    assert output.count("FAILED   tiny/hangonce") == 2
    assert messages(tmp_path) == ["stopped by SIGTERM"] * 2
    assert call(tmp_path, cluster)[0] == 0
    assert call(tmp_path, cluster, "--cancel") == (0, "0 jobs cancelled\n")


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def test_a_job_that_ends_without_a_record_gets_the_state_of_slurm(
    tmp_path: Path, cluster: dict[str, str]
) -> None:
    """The runner in the job is killed, or its shell lines fail."""
    studies.write(tmp_path, make_body("gated"))
    with start_cli(tmp_path, *SLURM, "--seeds", "0,", environment=cluster) as process:
        wait_until(lambda: count_runs(tmp_path))
        os.kill(parent(parent(list_holders(tmp_path)[0])), signal.SIGKILL)
        output, _ = process.communicate(timeout=TIMEOUT)
    assert "FAILED   tiny/gated/0  killed: its job ended: " in output
    studies.write(tmp_path, make_body("gated") + "\nslurm: {setup: [no-such-command, exit 3]}")
    code, output = call(tmp_path, cluster, "--seeds", "1,")
    assert code == 1
    assert "error: its job ended before the cell began: FAILED; " in output
    assert "no-such-command" in output


def test_a_submission_that_slurm_refuses_is_one_error_line(
    tmp_path: Path, cluster: dict[str, str]
) -> None:
    studies.write(tmp_path, make_body("ok") + "\nslurm: {partition: nowhere}")
    code, output = call(tmp_path, cluster)
    assert code == 2
    refused = "sbatch: error: Batch job submission failed: Invalid partition name specified"
    assert output.splitlines()[-1] == f"--launcher slurm: {refused}"
    assert call(tmp_path, cluster | {"SBATCH_PARTITION": "main"})[0] == 0


def test_resources_reach_the_job(tmp_path: Path, cluster: dict[str, str]) -> None:
    studies.write(tmp_path, make_body("ok") + "\nslurm: {cpus: 2, mem: 500M, time: 1:30:00}")
    assert call(tmp_path, cluster, "--seeds", "0,")[0] == 0
    (script,) = (tmp_path / "runs").glob("*/.slurm/*/*_submission.sh")
    for line in ("--cpus-per-task=2", "--mem=500M", "--time=90"):
        assert f"#SBATCH {line}\n" in script.read_text()
    (log,) = (tmp_path / "runs").glob("*/*/*/attempts/1/log.txt")
    assert log.read_text() == f"threads {os.environ.get('OMP_NUM_THREADS', 2)}\n"
