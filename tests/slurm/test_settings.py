"""Cells as jobs of a real SLURM whose settings differ from the defaults.

One cluster has all settings; each test needs some of them. Without the option of a job that a test
names, this cluster would lose the job or never start it.
"""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers import fake_cells, slurm_cluster, studies
from helpers.commands import run_python
from helpers.runs import TIMEOUT, count_runs, make_body, start_cli, wait_until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.process,
    pytest.mark.skipif(bool(slurm_cluster.missing()), reason=slurm_cluster.missing()),
]
SETTINGS = """\
JobRequeue=0
MaxArraySize=2
DefMemPerCPU=100
MaxMemPerNode=2000
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
"""
URGENT = "PartitionName=urgent Nodes=ALL PriorityTier=10 State=UP\n"
SLURM = ("--launcher", "slurm")


@pytest.fixture(scope="module")
def cluster() -> Iterator[dict[str, str]]:
    with slurm_cluster.cluster(SETTINGS, partitions=URGENT) as environment:
        yield environment


def run(cluster: dict[str, str], *command: str) -> str:
    done = subprocess.run(
        command, env=cluster, check=True, capture_output=True, text=True, timeout=TIMEOUT
    )
    return done.stdout


def call(path: Path, cluster: dict[str, str], *arguments: str) -> tuple[int, str]:
    with start_cli(path, *SLURM, *arguments, environment=cluster) as process:
        output, _ = process.communicate(timeout=2 * TIMEOUT)
        return process.returncode, output


def test_jobs_start_from_inside_an_allocation_without_their_users_environment(
    tmp_path: Path, cluster: dict[str, str]
) -> None:
    """The allocation's memory per CPU contradicts the memory of the jobs.

    SBATCH_EXPORT=NONE leaves a job the variables of `setup` alone, without which its Python finds
    no module of these tests. Arrays have two jobs at most.
    """
    paths = ":".join(sys.path)
    options = "{comment: test, exclude: '', nice: 10}"
    setup = f"setup: ['export PYTHONPATH={paths}']"
    resources = f"slurm: {{mem: 200M, time: 1:00:00, {setup}, sbatch: {options}}}"
    studies.write(tmp_path, make_body("ok", "ok-2") + "\n" + resources)
    allocation = ["salloc", "--quiet", "--ntasks=1", "--mem-per-cpu=50"]
    command = [sys.executable, fake_cells.__file__, "ablations.yaml", *SLURM, "--jobs", "1"]
    done = subprocess.run(
        [*allocation, *command],
        cwd=tmp_path,
        env=cluster | {"PYTHONPATH": paths, "SBATCH_EXPORT": "NONE"},
        capture_output=True,
        text=True,
        timeout=2 * TIMEOUT,
        check=False,
    )
    logs = "".join(path.read_text() for path in tmp_path.glob("runs/*/.slurm/*/*_log.err"))
    assert done.returncode == 0, done.stdout + done.stderr + logs
    assert "4 jobs submitted" in done.stdout
    assert len(count_runs(tmp_path)) == 4
    scripts = [path.read_text() for path in tmp_path.glob("runs/*/.slurm/*/*_submission.sh")]
    assert len(scripts) == 2
    for script in scripts:
        assert "#SBATCH --comment=test\n" in script
        assert "#SBATCH --array=0-1%1\n" in script
    # With --jobs 1, the second array waits for the first one.
    assert sorted("--dependency=afterany:" in script for script in scripts) == [False, True]


def test_a_preempted_job_is_queued_again_although_the_cluster_requeues_none(
    tmp_path: Path, cluster: dict[str, str]
) -> None:
    studies.write(tmp_path, make_body("hangonce") + "\nslurm: {mem: 200M}")
    with start_cli(tmp_path, *SLURM, "--seeds", "0,", environment=cluster) as process:
        wait_until(lambda: list((tmp_path / "runs").glob("*/*/*/child.pid")))
        run(cluster, "sbatch", "--partition=urgent", "--ntasks=2", "--wrap=true")
        output, _ = process.communicate(timeout=TIMEOUT)
        assert process.returncode == 0, output
    assert count_runs(tmp_path) == {"hangonce/0": 2}


def test_a_job_beyond_a_limit_is_refused_and_a_waiting_job_says_for_what(
    tmp_path: Path, cluster: dict[str, str]
) -> None:
    run(cluster, "scontrol", "update", "PartitionName=main", "MaxTime=60")
    studies.write(tmp_path, make_body("ok"))
    code, output = call(tmp_path, cluster)
    limit = "slurm.time: 1-0 exceeds the limit 1:00:00 of the partition 'main'"
    assert (code, output.splitlines()[-1]) == (
        2,
        f"tiny: {limit}; write slurm: {{time: 1:00:00}} or less",
    )
    studies.write(tmp_path, make_body("ok") + "\nslurm: {sbatch: {exlude: node7}, time: 60}")
    code, output = call(tmp_path, cluster)
    refusal = "sbatch: unrecognized option '--exlude=node7'"
    assert (code, output.splitlines()[-1]) == (2, f"--launcher slurm: {refusal}")
    assert run(cluster, "squeue", "--noheader", "--user=root", "--format=%j") == ""

    run(cluster, "scontrol", "update", "NodeName=node0", "State=DRAIN", "Reason=test")
    studies.write(tmp_path, make_body("ok") + "\nslurm: {time: 60}")
    with start_cli(tmp_path, *SLURM, environment=cluster) as process:
        assert process.stdout is not None
        lines = iter(process.stdout.readline, "")
        waiting = next(line for line in lines if line.startswith("waiting"))
        assert waiting.startswith("waiting  2 jobs in SLURM's queue: ")
        changed = {"SLURM_CONF": cluster["SLURM_CONF"], "PATH": cluster["PATH"]}
        status = run_python(tmp_path, "-m", "lit_attn", "status", **changed).stdout
        assert "waiting  2 jobs in SLURM's queue: " in status
        run(cluster, "scontrol", "update", "NodeName=node0", "State=RESUME")
        assert process.wait(TIMEOUT) == 0
    run(cluster, "scontrol", "update", "PartitionName=main", "MaxTime=INFINITE")
