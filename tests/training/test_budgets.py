"""Cells with smaller budgets continue from the stable phase of the largest one, bit by bit."""

import shutil
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import lightning as L
import numpy as np
import pytest
import torch
import yaml
from helpers import sharded_cells, studies
from helpers.commands import run_python
from helpers.finished_cells import assert_close_weights, read_weights
from helpers.stopping import stop_at
from helpers.training_cells import digits_cell, result_of

from lit_attn.ablate.plan import expand
from lit_attn.cells.branches import branch_folder, find_branch
from lit_attn.cells.failure import Preempted
from lit_attn.cells.records import MetricRow, read_metrics
from lit_attn.config.study import read_studies
from lit_attn.optim.schedules import Trapezoid
from lit_attn.train import run_cell

SHORT, LONG = 2, 3  # Epochs of the budgets; an epoch has four steps.
STABLE = 6  # Steps of the short training before its decay of two steps.
RECORDS = ("metrics.csv", "diagnostics.csv")
# Dropout draws other random numbers on another number of devices.
EXACT = {"dropout": 0.0, "drop_path": 0.0}


STUDY = """
baseline: v
cells: {v: {}}
budgets: [2, 3]
metric: {name: test/accuracy, selection: best-validation}
"""


def write_pair(
    runs: Path, model: dict[str, Any] | None = None, **training: Any
) -> tuple[Path, Path]:
    """Write a trunk and its sibling with the smaller budget, and return their folders.

    `model` and `training` override the experiment's sections.
    """
    runs.mkdir(exist_ok=True)
    diagnostics = {"kinds": ["residual"], "samples": 2}
    cell = digits_cell(
        model=model or {},
        schedule={"kind": "trapezoid", "warmup": 0.5, "warmdown": 0.5},
        training={"epochs": 1, "diagnostics": diagnostics, **training},
    )
    experiment = yaml.safe_dump(cell.experiment.model_dump(mode="json"))
    sources = read_studies(studies.write(runs, STUDY, experiment))
    folders = []
    for epochs in (LONG, SHORT):
        job = expand(sources[f"tiny-budget-{epochs}"], runs).jobs[0]
        assert job.cell.experiment.training.epochs == epochs
        job.cell.write(job.folder / "config.yaml")
        folders.append(job.folder)
    return folders[0], folders[1]


def identity_of(folder: Path) -> str:
    return folder.name.rpartition("-")[2]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of runs with a trained trunk, its branch, and the short cell from scratch."""
    runs = tmp_path_factory.mktemp("budgets")
    trunk, short = write_pair(runs)
    run_cell(short)
    assert result_of(short).branched_from is None
    shutil.move(short, runs / "scratch")
    write_pair(runs)
    run_cell(trunk)
    return runs


@pytest.fixture
def runs(trained: Path, tmp_path: Path) -> Path:
    """A copy of the folder of runs."""
    return Path(shutil.copytree(trained, tmp_path / "runs"))


def assert_same(one: Path, two: Path) -> None:
    """Assert that two cells have the same weights and records, byte by byte."""
    theirs = read_weights(two)
    assert all(torch.equal(weight, theirs[name]) for name, weight in read_weights(one).items())
    for name in RECORDS:
        assert (one / name).read_text() == (two / name).read_text(), name
    # The best epoch of the validation split may be a shared one.
    units = [np.load(folder / "units.npz") for folder in (one, two)]
    for name in units[1]:
        assert np.array_equal(units[0][name], units[1][name]), name


def read_shared(folder: Path) -> list[MetricRow]:
    """Return the metrics of the stable steps of the short training."""
    return [row for row in read_metrics(folder / "metrics.csv") if row.step <= STABLE]


def test_two_budgets_are_equal_until_the_decay_of_the_shorter(trained: Path) -> None:
    """Learning rates and losses, and so the order of the data, are those of the longer training."""
    trunk, _ = write_pair(trained)
    schedule = Trapezoid(kind="trapezoid", warmup=0.5, warmdown=0.5)
    assert schedule.stable_steps(4, SHORT) == STABLE
    rates = [schedule.rate(1e-3, 4, epochs) for epochs in (SHORT, LONG)]
    equal = [step for step in range(4 * SHORT) if rates[0](step) == rates[1](step)]
    assert equal == list(range(STABLE + 1))
    long, short = (read_shared(folder) for folder in (trunk, trained / "scratch"))
    assert long == short
    assert {row.name for row in long} >= {"train/loss", "train/lr", "test/loss"}


def test_a_cell_from_a_branch_equals_a_cell_from_scratch(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trunk, short = write_pair(runs)
    run_cell(short)
    assert f"continuing from step {STABLE} of {trunk}" in capsys.readouterr().out
    assert_same(short, runs / "scratch")
    result, scratch = result_of(short), result_of(runs / "scratch")
    branch = result.branched_from
    assert branch is not None
    assert (runs / branch.cell, branch.steps) == (trunk, STABLE)
    assert (result.steps, result.metrics["test/loss"]) == (8, scratch.metrics["test/loss"])
    # The seconds of the shared steps are those of the trunk, which counts them.
    assert 0 < branch.seconds <= result_of(trunk).wall_time
    assert result.step_time.count <= result.steps - STABLE
    # The only sibling has a result.
    assert find_branch(trunk, identity_of(short)) is None


@pytest.mark.process
def test_a_killed_sibling_continues_from_its_own_checkpoint(
    runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trunk, short = write_pair(runs)
    with monkeypatch.context() as patch:
        stop_at(patch, STABLE + 1)
        with pytest.raises(Preempted, match=f"saved at step {STABLE + 1}"):
            run_cell(short)
    assert find_branch(trunk, identity_of(short)) is not None
    run_cell(short)
    assert_same(short, runs / "scratch")
    branch = result_of(short).branched_from
    assert branch is not None
    assert branch.steps == STABLE


@pytest.mark.process
@pytest.mark.parametrize("damage", ["torn", "absent"])
def test_a_cell_without_a_readable_branch_trains_from_scratch(
    damage: str, runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trunk, short = write_pair(runs)
    branch = branch_folder(trunk, STABLE, identity_of(short))
    if damage == "torn":
        (checkpoint,) = branch.glob("*.ckpt")
        checkpoint.write_bytes(checkpoint.read_bytes()[:1000])
    else:
        shutil.rmtree(branch)
    run_cell(short)
    assert "training from the first step" in capsys.readouterr().out
    assert_same(short, runs / "scratch")
    assert result_of(short).branched_from is None


def test_a_branch_stays_where_the_memory_is_too_small_to_read_it(
    runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trunk, short = write_pair(runs)
    error = RuntimeError("DefaultCPUAllocator: can't allocate memory")
    monkeypatch.setattr("torch.load", Mock(side_effect=error))
    with pytest.raises(RuntimeError, match="can't allocate memory"):
        run_cell(short)
    assert find_branch(trunk, identity_of(short)) is not None


@pytest.mark.process
def test_a_trunk_killed_while_it_writes_a_branch_writes_it_again(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also a kill after the branch keeps it, although the trunk continues from before it."""
    trunk, short = write_pair(tmp_path)
    save = L.Trainer.save_checkpoint

    def die(self: L.Trainer, path: Any, *arguments: Any, **options: Any) -> None:
        save(self, path, *arguments, **options)
        if "branch-" in str(path):
            raise OSError("a kill at a bad moment")

    with monkeypatch.context() as patch:
        patch.setattr(L.Trainer, "save_checkpoint", die)
        with pytest.raises(OSError, match="a kill at a bad moment"):
            run_cell(trunk)
    assert find_branch(trunk, identity_of(short)) is None
    with monkeypatch.context() as patch:
        stop_at(patch, STABLE + 1)
        with pytest.raises(Preempted):
            run_cell(trunk)
    kept = find_branch(trunk, identity_of(short))
    assert kept is not None
    assert sorted(path.name for path in kept.iterdir()) == [
        "clock.csv",
        "diagnostics.csv",
        "metrics.csv",
        f"step-00000000{STABLE}.ckpt",
        "units.npz",
    ]
    run_cell(trunk)
    assert find_branch(trunk, identity_of(short)) == kept
    assert_same(trunk, write_pair(trained)[0])
    run_cell(short)
    assert_same(short, trained / "scratch")


@pytest.mark.process
def test_a_trunk_keeps_no_branch_for_a_finished_sibling(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trunk, short = write_pair(tmp_path)
    shutil.copy(trained / "scratch" / "result.json", short / "result.json")
    monkeypatch.setattr(L.Trainer, "save_checkpoint", lambda *_: pytest.fail("keeps a branch"))
    run_cell(trunk)
    assert find_branch(trunk, identity_of(short)) is None


@pytest.mark.process
@pytest.mark.timeout(900)
@pytest.mark.parametrize("strategy", [None, "fsdp"])
def test_a_sharded_trunk_keeps_a_branch_for_every_strategy(
    strategy: str | None, tmp_path: Path
) -> None:
    """Two devices train the trunk with FSDP; one device, or two with FSDP, continue from it."""
    two = {"devices": 2, "strategy": "fsdp"}
    trunk, short = write_pair(tmp_path / "runs", EXACT, **two)
    train_apart(trunk)
    kept = find_branch(trunk, identity_of(short))
    assert kept is not None
    # Neither devices nor their strategy belong to the identity.
    write_pair(tmp_path / "runs", EXACT, **(two if strategy else {}))
    train_apart(short)
    result = result_of(short)
    assert result.branched_from is not None
    assert (result.branched_from.steps, result.strategy) == (STABLE, strategy)
    scratch = write_pair(tmp_path / "alone", EXACT)[1]
    run_cell(scratch)
    assert_close_weights(read_weights(short), read_weights(scratch))
    rows, others = (read_metrics(folder / "metrics.csv") for folder in (short, scratch))
    assert [row[:3] for row in rows] == [row[:3] for row in others]
    last, other = result.metrics["test/loss"], result_of(scratch).metrics["test/loss"]
    assert last == pytest.approx(other, rel=1e-4)


def train_apart(folder: Path) -> None:
    """Train the cell in `folder`, with as many processes as it has devices."""
    done = run_python(folder, sharded_cells.__file__, str(folder), "never")
    assert done.returncode == 0, done.stdout + done.stderr
