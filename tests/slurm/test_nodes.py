"""Training of one cell on several nodes of a real SLURM, and by torchrun."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from helpers import slurm_cluster, studies
from helpers.runs import TIMEOUT, count_runs, make_body, start_cli, wait_until

from lit_attn.ablate.job import Job
from lit_attn.ablate.plan import expand
from lit_attn.cells import folder
from lit_attn.cells.records import Result
from lit_attn.cells.rows import read_metrics
from lit_attn.config.study import read_studies

needs_slurm = pytest.mark.skipif(bool(slurm_cluster.missing()), reason=slurm_cluster.missing())
pytestmark = [pytest.mark.slow, pytest.mark.process]
# The lost node must be noticed in less time than SLURM's default of 300 s.
SETTINGS = "SlurmdTimeout=20\nJobRequeue=0\n"


def write_cell(path: Path, epochs: int, strategy: str) -> Job:
    """Write a study with one cell of two ranks on two nodes, and return the cell."""
    training = f"  epochs: {epochs}\n  accelerator: cpu\n  devices: 2\n  checkpoint_every: 0.005"
    training += f"\n  strategy: {strategy}"
    experiment = studies.EXPERIMENT.replace("  epochs: 2", training)
    studies.write(path, "baseline: a\ncells: {a: {}}\nslurm: {nodes: 2, time: 1:00:00}", experiment)
    (job, *_) = expand(read_studies(path / "ablations.yaml")["tiny"], path / "runs").jobs
    return job


def copy_cell(job: Job, place: Path) -> Path:
    """Write the configuration of a cell to another folder."""
    place.mkdir()
    job.cell.write(place / "config.yaml")
    return place


def read_logs(path: Path) -> str:
    files = [*path.glob("runs/*/.slurm/*/*_log.*"), *path.glob("runs/*/*/*/attempts/*/log*")]
    return "\n".join(f"{file.name}:\n{file.read_text()}" for file in files)


def untimed(place: Path) -> list[tuple[object, ...]]:
    rows = read_metrics(place / "metrics.csv")
    return [tuple(row) for row in rows if row.name != "evaluation/seconds"]


def train(place: Path, *command: str) -> None:
    """Train a cell on this machine with a command before the name of its folder."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, "-m", "lit_attn.train", str(place)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def processes_of(node: str) -> list[int]:
    """Return the daemon of a node and all processes of the steps on it."""
    pids = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            command = (path / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            variables = (path / "environ").read_bytes().split(b"\0")
            parent = int((path / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
        if command.strip().endswith(f"-N {node}"):
            pids.append(int(path.name))
        elif f"SLURMD_NODENAME={node}".encode() in variables:
            pids += [parent, int(path.name)]
    return pids


@pytest.fixture(scope="module")
def cluster() -> Iterator[dict[str, str]]:
    with slurm_cluster.cluster(SETTINGS, nodes=3) as environment:
        yield environment


@needs_slurm
def test_the_time_limit_and_a_failed_rank_are_as_on_one_node(
    tmp_path: Path, cluster: dict[str, str]
) -> None:
    """SLURM warns the batch script alone; the runner passes the warning on to the ranks."""
    body = "set: {training.devices: 2}\n" + make_body("hangonce", "rankcrash")
    studies.write(tmp_path, body + "\nslurm: {nodes: 2, time: 1:00:00}")
    command = ("--launcher", "slurm", "--seeds", "0,")
    with start_cli(tmp_path, *command, environment=cluster) as process:
        wait_until(lambda: list((tmp_path / "runs").glob("*/hangonce/*/child.pid")))
        jobs = ["squeue", "--noheader", "--array", "--states=RUNNING", "--format=%i"]
        running = subprocess.run(jobs, env=cluster, capture_output=True, text=True, check=True)
        (hanging,) = [job for job in running.stdout.split() if job.endswith("_0")]
        warn = ["scancel", "--batch", "--signal=USR2", hanging]
        subprocess.run(warn, env=cluster, check=True)
        output, _ = process.communicate(timeout=TIMEOUT)
    assert process.returncode == 1, output
    assert "done     tiny/hangonce/0" in output, output + read_logs(tmp_path)
    assert count_runs(tmp_path)["hangonce/0"] == 2
    (stopped,) = (tmp_path / "runs").glob("*/hangonce/*/attempts/1")
    end = folder.read_exit(stopped)
    assert end is not None
    assert (end.failure, end.message) == ("timed-out", "the time limit of its job was reached")
    (crashed,) = (tmp_path / "runs").glob("*/rankcrash/*/attempts/1")
    end = folder.read_exit(crashed)
    assert end is not None
    assert (end.failure, end.rank) == ("error", 1), read_logs(tmp_path)
    cause, _, node = end.message.rpartition(" on ")
    assert cause == "[rank1]: ValueError: this rank alone (rank 1"
    assert node in ("node1)", "node2)")


@needs_slurm
@pytest.mark.timeout(1200)
def test_two_nodes_give_the_metrics_of_one_and_a_lost_node_is_replaced(
    tmp_path: Path, cluster: dict[str, str]
) -> None:
    """The daemon of a node and its rank are killed in the middle of a training with FSDP.

    The next run of the job is on the third node. Other tests compare FSDP on one node with one
    process.
    """
    job = write_cell(tmp_path, epochs=5, strategy="fsdp")
    one = copy_cell(job, tmp_path / "one-node")
    train(one, sys.executable)
    process = slurm_cluster.start_study(tmp_path, cluster, "--seeds", "0,")
    wait_until(lambda: list(job.folder.glob("checkpoints/step-*")) or process.poll() is not None)
    assert process.poll() is None, process.communicate()[0] + read_logs(tmp_path)
    for pid in processes_of("node1"):
        os.kill(pid, signal.SIGKILL)
    output, _ = process.communicate(timeout=900)
    logs = read_logs(tmp_path)
    assert process.returncode == 0, output + logs
    result = Result.model_validate_json((job.folder / "result.json").read_bytes())
    assert (result.devices, result.nodes, result.strategy) == (2, 2, "fsdp")
    assert result.attempts == 2
    assert untimed(job.folder) == untimed(one)
    first, second = folder.list_attempts(job.folder)
    ended = folder.read_exit(first)
    assert ended is not None
    assert ended.failure == "killed", ended
    assert ended.message.startswith("node node1 is lost: "), ended
    for attempt in (first, second):
        assert sorted(path.name for path in attempt.glob("log*")) == ["log.rank1.txt", "log.txt"]
        assert not list(attempt.glob("node*")), "a file of a heartbeat is left"
    # The runner in the job ends after the result.
    wait_until(lambda: not (job.folder / "lock").exists())


def test_torchrun_gives_the_metrics_of_one_command(tmp_path: Path) -> None:
    """Two torchruns meet as those of two machines do."""
    job = write_cell(tmp_path, epochs=1, strategy="ddp")
    one = copy_cell(job, tmp_path / "one")
    train(one, sys.executable)
    two = copy_cell(job, tmp_path / "two")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1"]
    torchrun += ["--master-addr=127.0.0.1", f"--master-port={slurm_cluster.free_port()}"]
    with ThreadPoolExecutor(2) as machines:
        ends = [machines.submit(train, two, *torchrun, f"--node-rank={node}") for node in range(2)]
        for end in ends:
            end.result()
    assert untimed(two) == untimed(one)
    assert len(list(two.glob("result*"))) == len(list(two.glob("metrics*"))) == 1
    assert not (two / "lock").exists()
