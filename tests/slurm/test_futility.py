"""Rule `stop: futility` with jobs: what is submitted, cancelled and followed."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers import fake_cells, futility, slurm_cluster
from helpers.fake_squeue import Recorder, install_command, install_squeue, write_batch
from helpers.futility import finish, write_study
from helpers.runs import TIMEOUT, start_cli, wait_until

from lit_attn.ablate.hooks import review_nothing
from lit_attn.ablate.plan import Job, Matrix
from lit_attn.ablate.slurm.follow import Follower
from lit_attn.ablate.slurm.job import SlurmCell
from lit_attn.ablate.slurm.queue import NAME
from lit_attn.cells.folder import create_attempt
from lit_attn.cells.records import Exit, FailureClass

SLURM = ("--launcher", "slurm")
needs_cluster = pytest.mark.skipif(
    bool(slurm_cluster.missing()), reason=slurm_cluster.missing() or "SLURM runs here"
)
DULL = "cells: {base: {}, gated-dull: {optimizer.lr: 2}}"


def prepare_dull(folder: Path, ended_seeds: int) -> Matrix:
    """Return a study of ten seeds in which the first `ended_seeds` of the dull variant have run."""
    write_study(folder, DULL)
    (matrix,) = futility.expand(folder)
    for job in matrix.jobs:
        if job.cell.variant == "base" or job.cell.seed < ended_seeds:
            finish(job)
    matrix.write_plan()
    return matrix


def list_rows(matrix: Matrix, states: dict[str, str]) -> list[str]:
    """Return the rows of squeue for the cells named in `states`."""
    rows = []
    for index, job in enumerate(matrix.jobs):
        name = f"{job.cell.variant}/{job.cell.seed}"
        if name in states:
            rows.append(f"{index}|7_{index}|{states[name]}|{NAME}aaaa")
    return rows


def fail(job: Job, failure: FailureClass) -> None:
    attempt = create_attempt(job.folder)
    Exit(failure=failure, returncode=1, message="the end").write(attempt / "exit.json")


@pytest.mark.process
def test_jobs_of_an_ended_variant_are_dropped_and_running_ones_are_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cell at the time limit is queued again, and one ended when it found the decision."""
    matrix = prepare_dull(tmp_path, 5)
    by_seed = {job.cell.seed: job for job in matrix.jobs if job.cell.variant == "gated-dull"}
    fail(by_seed[6], "timed-out")
    fail(by_seed[8], "error")
    states = {
        "gated-dull/5": "PENDING",
        "gated-dull/6": "PENDING",
        "gated-dull/7": "COMPLETED",
        "gated-dull/8": "FAILED",
        "gated-dull/9": "RUNNING",
    }
    write_batch(matrix, "aaaa")
    install_squeue(tmp_path, monkeypatch, *list_rows(matrix, states))
    log = tmp_path / "cancelled.txt"
    install_command(tmp_path, monkeypatch, "scancel", f'echo "$@" >> {log}')
    events: list[str] = []
    ended: list[str] = []

    def observe(job: Job) -> str:
        ended.append(job.name)
        return f"tables   after {job.name}"

    follower = Follower([matrix], Recorder(events), observe=observe)
    follower.unfinished = [job for job in matrix.jobs if job.state() != "done"]
    follower.poll()
    follower.poll()
    # The job that failed for good says so; the running one goes on.
    assert [job.name for job in follower.unfinished] == ["tiny/gated-dull/9"]
    assert [outcome.job.name for outcome in follower.summary.failed] == ["tiny/gated-dull/8"]
    indices = [matrix.jobs.index(by_seed[seed]) for seed in (5, 6)]
    assert log.read_text().split() == [f"7_{index}" for index in indices]
    assert sum("stopped for futility after" in event for event in events) == 1
    finish(by_seed[9])
    follower.poll()
    assert follower.unfinished == []
    assert ended == ["tiny/gated-dull/8", "tiny/gated-dull/9"]
    assert events[-1] == "tables   after tiny/gated-dull/9"


@pytest.mark.process
def test_a_rerun_trains_the_cells_that_it_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Neither the job nor its follower asks whether the variant has ended."""
    matrix = prepare_dull(tmp_path, 5)
    write_batch(matrix, "aaaa")
    install_squeue(tmp_path, monkeypatch, *list_rows(matrix, {"gated-dull/9": "PENDING"}))
    follower = Follower([matrix], Recorder([]), review_nothing)
    last = matrix.jobs[-1]
    follower.unfinished = [last]
    follower.poll()
    assert follower.unfinished == [last]
    last.cell.write(last.folder / "config.yaml")
    SlurmCell(last.folder, fake_cells.TARGET, False, 1.0)()
    assert "not run" in capsys.readouterr().out
    # submitit sets the handler of SIGUSR2 in a job; without it, the cell would start here.
    with pytest.raises(AssertionError):
        SlurmCell(last.folder, fake_cells.TARGET, False, 1.0, is_rerun=True)()


@pytest.fixture(scope="module")
def cluster() -> Iterator[dict[str, str]]:
    with slurm_cluster.cluster() as environment:
        yield environment


def count_jobs(folder: Path, cluster: dict[str, str], state: str) -> int:
    """Return the number of jobs of a test in a state."""
    batches = (folder / "runs").glob("*/.slurm/*/batch.json")
    names = {NAME + batch.parent.name for batch in batches}
    command = ["squeue", "-h", "--array", "--states=all", "--format=%T|%j"]
    finished = subprocess.run(command, env=cluster, capture_output=True, text=True, check=True)
    rows = [line.split("|") for line in finished.stdout.splitlines()]
    return sum(name in names and row_state == state for row_state, name in rows)


def read_runs(folder: Path, study: str) -> list[str]:
    """Return the cells that have run, once for each start."""
    return (folder / "runs" / study / "ran.txt").read_text().split()


@needs_cluster
@pytest.mark.slow
@pytest.mark.process
def test_waiting_jobs_of_an_ended_variant_are_cancelled_and_running_ones_finish(
    tmp_path: Path, cluster: dict[str, str]
) -> None:
    """Seeds 3 and 4 wait in their jobs while the result of seed 3 ends the variant."""
    matrix = prepare_dull(tmp_path, 3)
    dull = [job for job in matrix.jobs if job.cell.variant == "gated-dull"]
    with start_cli(tmp_path, *SLURM, "--seeds", "7", environment=cluster) as process:
        wait_until(lambda: len(list(matrix.folder.glob("gated-dull/*/progress.json"))) == 2)
        assert count_jobs(tmp_path, cluster, "PENDING") == 2
        finish(dull[3])
        # SLURM lists cancelled jobs of an array that have not started as one job.
        wait_until(lambda: count_jobs(tmp_path, cluster, "PENDING") == 0)
        assert count_jobs(tmp_path, cluster, "CANCELLED") > 0
        (matrix.folder / "go").touch()
        output, _ = process.communicate(timeout=TIMEOUT)
        assert process.returncode == 0, output
    assert "ended    tiny/gated-dull  stopped for futility after 4 of 10 seeds" in output
    assert sorted(read_runs(tmp_path, "tiny")) == ["gated-dull/3", "gated-dull/4"]
    assert (dull[4].state(), dull[5].state(), dull[6].state()) == ("done", "missing", "missing")
