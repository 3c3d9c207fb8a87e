"""Jobs that wait in the queue of a real SLURM while their code and their study change."""

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers import slurm_cluster, studies
from helpers.paths import ROOT
from helpers.runs import TIMEOUT, wait_until

from lit_attn.ablate.status import describe, read_cells, read_plans
from lit_attn.cells.folder import read_result
from lit_attn.cells.records import Plan, Result

pytestmark = [
    pytest.mark.slow,
    pytest.mark.process,
    pytest.mark.skipif(bool(slurm_cluster.missing()), reason=slurm_cluster.missing()),
]
SCHEDULE = """\
import os

import factors
from lit_attn.optim.schedules import Schedule

if "SLURM_JOB_ID" in os.environ:
    with open("imported.txt", "a") as file:
        file.write(f"{factors.FACTOR}\\n")


class Scaled(Schedule, kind="scaled"):
    def rate_at(self, step: int, peak: float, steps_per_epoch: int, epochs: int) -> float:
        return peak * factors.FACTOR
"""


@pytest.fixture
def cluster() -> Iterator[dict[str, str]]:
    # SLURM forgets a job two seconds after its end.
    with slurm_cluster.cluster("MinJobAge=2\n") as environment:
        yield environment


def write_study(folder: Path, body: str, schedule: str = "{kind: cosine, warmup: 1}") -> None:
    experiment = studies.EXPERIMENT.replace("  epochs: 2", "  epochs: 2\n  accelerator: cpu")
    assert "{kind: cosine, warmup: 1}" in experiment
    studies.write(folder, body, experiment.replace("{kind: cosine, warmup: 1}", schedule))


def start(folder: Path, cluster: dict[str, str], *options: str) -> "subprocess.Popen[str]":
    """Start the command line, with the package of the folder `checkout` if it exists."""
    checkout = folder / "checkout"
    package = str(checkout) if checkout.exists() else None
    return slurm_cluster.start_study(folder, cluster, *options, package=package)


def list_jobs(cluster: dict[str, str], states: str = "PENDING") -> list[str]:
    command = ["squeue", "-h", "--array", f"--states={states}", "--format=%i"]
    done = subprocess.run(command, env=cluster, capture_output=True, text=True, check=True)
    return done.stdout.split()


def set_node(cluster: dict[str, str], state: str) -> None:
    node = ["NodeName=node0", f"State={state}", "Reason=test"]
    subprocess.run(["scontrol", "update", *node], env=cluster, check=True)


def read_results(folder: Path) -> list[Result]:
    place = folder / "runs" / "tiny"
    plan = Plan.model_validate_json((place / "plan.json").read_bytes())
    results = [read_result(place / cell.path, cell.identity) for cell in plan.cells]
    return [result for result in results if result is not None]


def test_a_waiting_job_runs_the_code_of_its_submission(
    tmp_path: Path, cluster: dict[str, str]
) -> None:
    """The package, a plug-in and its neighbour change while jobs of two snapshots wait.

    Both jobs run, and the next submission runs the new code and removes both snapshots.
    """
    shutil.copytree(ROOT / "lit_attn", tmp_path / "checkout" / "lit_attn")
    write_study(tmp_path, "parts: [scaled.py]\nbaseline: a\ncells: {a: {}}", "scaled")
    (tmp_path / "scaled.py").write_text(SCHEDULE)

    def list_snapshots() -> set[str]:
        # A submission that is terminated may leave a temporary folder.
        return {path.name for path in tmp_path.glob("runs/.code/[!t]*") if path.is_dir()}

    def list_factors() -> set[str]:
        path = tmp_path / "imported.txt"
        return set(path.read_text().split()) if path.exists() else set()

    set_node(cluster, "DRAIN")
    for seed, count in ((0, 1), (1, 2)):
        (tmp_path / "factors.py").write_text(f"FACTOR = 0.{seed + 1}\n")
        with start(tmp_path, cluster, "--seeds", f"{seed},") as process:
            wait_until(lambda count=count: len(list_jobs(cluster)) == count)
            process.terminate()
            process.communicate(timeout=TIMEOUT)
        assert len(list_snapshots()) == seed + 1
    waiting = list_snapshots()
    records = [path.read_text() for path in tmp_path.glob("runs/tiny/.slurm/*/snapshot.txt")]
    assert set(records) == {f"{name}\ntest" for name in waiting}
    train = tmp_path / "checkout" / "lit_attn" / "train.py"
    train.write_text("raise RuntimeError('a half-finished change')\n")
    (tmp_path / "scaled.py").write_text("raise RuntimeError('another change')\n")
    set_node(cluster, "RESUME")
    wait_until(lambda: not list_jobs(cluster, "all"))
    logs = "".join(path.read_text() for path in tmp_path.glob("runs/*/.slurm/*/*_log.err"))
    assert list_factors() == {"0.1", "0.2"}, logs
    shutil.copy2(ROOT / "lit_attn" / "train.py", train)
    (tmp_path / "scaled.py").write_text(SCHEDULE)
    (tmp_path / "factors.py").write_text("FACTOR = 0.3\n")
    with start(tmp_path, cluster, "--seeds", "3") as process:
        output, _ = process.communicate(timeout=2 * TIMEOUT)
    assert process.returncode == 0, output
    assert list_factors() == {"0.1", "0.2", "0.3"}
    results = read_results(tmp_path)
    assert len(results) == 3
    assert len({result.code for result in results}) == 1
    assert len(list_snapshots()) == 1
    assert not list_snapshots() & waiting


def test_a_model_that_cannot_be_built_is_not_submitted(
    tmp_path: Path, cluster: dict[str, str]
) -> None:
    """Only a process with PyTorch sees that even the narrowest FFN has too many parameters."""
    experiment = studies.EXPERIMENT.replace("width: 32", "width: 1")
    studies.write(tmp_path, "baseline: a\ncells: {a: {}, b: {attention: mgk}}", experiment)
    with start(tmp_path, cluster) as process:
        output, _ = process.communicate(timeout=2 * TIMEOUT)
    assert process.returncode == 2
    # On a busy machine lines between these two show how far the check is.
    announced, *_, mistake = output.splitlines()
    assert announced == "checking the models and data of 2 variants"
    assert mistake.startswith("ablations.yaml:8: tiny: variant 'b': match: parameters: ")
    assert list_jobs(cluster, "all") == []
    assert not (tmp_path / "runs" / "tiny").exists()


def test_jobs_of_a_removed_variant_are_cancelled_alone(
    tmp_path: Path, cluster: dict[str, str]
) -> None:
    body = "baseline: a\ncells: {a: {}, b: {optimizer.lr: 1e-2}, c: {optimizer.lr: 1e-1}}"
    write_study(tmp_path, body)
    set_node(cluster, "DRAIN")
    with start(tmp_path, cluster) as process:
        wait_until(lambda: len(list_jobs(cluster)) == 6 or process.poll() is not None)
        process.terminate()
        process.communicate(timeout=TIMEOUT)
    # One variant has gone, and one has another learning rate.
    write_study(tmp_path, "baseline: a\ncells: {a: {}, b: {optimizer.lr: 2e-2}}")
    with start(tmp_path, cluster, "--cancel-removed") as process:
        assert process.communicate(timeout=TIMEOUT)[0] == "4 jobs cancelled\n"
    assert len(list_jobs(cluster)) == 2
    (plan,) = read_plans(tmp_path / "runs")
    assert sorted({cell.variant for cell in plan[0].cells}) == ["a", "b"]
    assert describe(plan[0], read_cells(*plan)).endswith("\n  4 cells: 4 missing\n")
    with start(tmp_path, cluster, "--cancel-removed", "--seeds", "1") as process:
        assert process.communicate(timeout=TIMEOUT)[0] == "0 jobs cancelled\n"
    with start(tmp_path, cluster, "--cancel") as process:
        assert process.communicate(timeout=TIMEOUT)[0] == "2 jobs cancelled\n"
