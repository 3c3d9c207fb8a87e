"""Budgets of a study as jobs of a real SLURM: the smaller one continues from the largest."""

import subprocess
from pathlib import Path

import pytest
from helpers import slurm_cluster, studies
from helpers.finished_cells import read_weights
from helpers.runs import wait_until
from helpers.training_cells import result_of

from lit_attn.ablate.plan import Job, expand
from lit_attn.cells.branches import find_branch
from lit_attn.cells.records import MetricRow, read_metrics
from lit_attn.config.study import read_studies
from lit_attn.train import run_cell

pytestmark = [
    pytest.mark.slow,
    pytest.mark.process,
    pytest.mark.skipif(bool(slurm_cluster.missing()), reason=slurm_cluster.missing()),
]

EXPERIMENT = studies.EXPERIMENT.replace(
    "{kind: cosine, warmup: 1}", "{kind: trapezoid, warmup: 1, warmdown: 1}"
).replace("epochs: 2", "epochs: 4\n  accelerator: cpu\n  checkpoint_every: 0.2")
STUDY = """
baseline: a
cells: {a: {}}
budgets: [1, 8]
metric: {name: test/accuracy, selection: last}
"""
TIMED = "evaluation/seconds"


def expand_pair(folder: Path) -> tuple[Job, Job]:
    """Return the cell with the largest budget, which is the trunk, and the other one."""
    sources = read_studies(studies.write(folder, STUDY, EXPERIMENT))
    trunk, short = (expand(sources[f"tiny-budget-{n}"], folder / "runs").jobs[0] for n in (8, 1))
    return trunk, short


def read_rows(folder: Path) -> list[MetricRow]:
    """Return the metrics of a cell without measured times."""
    return [row for row in read_metrics(folder / "metrics.csv") if row.name != TIMED]


def speak(environment: dict[str, str], *command: str) -> str:
    """Return what a command of SLURM prints."""
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, check=True
    ).stdout


def test_the_job_of_a_smaller_budget_waits_and_continues_from_a_preempted_trunk(
    tmp_path: Path,
) -> None:
    """The trunk is queued again after it has kept its branch; no metric changes by this."""
    trunk, short = expand_pair(tmp_path)
    identity = short.cell.fingerprint
    with slurm_cluster.cluster() as environment:
        process = slurm_cluster.start_study(tmp_path, environment, "--seeds", "0,")
        wait_until(lambda: find_branch(trunk.folder, identity) or process.poll() is not None)
        listed = speak(environment, "squeue", "-h", "--array", "--format=%i|%T|%r").split()
        rows = [line.split("|") for line in listed]
        running = next(job for job, state, _ in rows if state == "RUNNING")
        speak(environment, "scontrol", "requeue", running)
        output, _ = process.communicate(timeout=500)
        logs = "".join(log.read_text() for log in tmp_path.glob("runs/*/.slurm/*/*_log.*"))
        assert process.returncode == 0, output + logs
    states = sorted(row[1:] for row in rows)
    assert states == [["PENDING", "Dependency"], ["RUNNING", "None"]]
    result = result_of(short.folder)
    trunk_result = result_of(trunk.folder)
    assert trunk_result.attempts == 2, logs
    assert result.branched_from is not None
    assert tmp_path / "runs" / result.branched_from.cell == trunk.folder
    assert find_branch(trunk.folder, identity) is None
    for job in (trunk, short):
        scratch = tmp_path / "scratch" / job.cell.study
        job.cell.write(scratch / "config.yaml")
        run_cell(scratch)
        assert read_rows(job.folder) == read_rows(scratch)
        theirs = read_weights(scratch)
        for name, weight in read_weights(job.folder).items():
            assert weight.equal(theirs[name]), name
