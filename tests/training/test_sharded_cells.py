"""Cells with FSDP (processes on a CPU) compute the results of one device, and resume anywhere."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import sharded_cells
from helpers.commands import run_python
from helpers.finished_cells import assert_close_weights
from helpers.once import make_once
from helpers.training_cells import digits_cell, result_of, scenes_cell, text_cell

from lit_attn.cells.rows import read_metrics
from lit_attn.config.cell import Cell

pytestmark = [pytest.mark.process, pytest.mark.timeout(900)]

# Dropout draws other random numbers on another number of devices.
EXACT = {"dropout": 0.0, "drop_path": 0.0}
RECORDED = {
    "clip": 0.5,
    "average": {"decay": 0.9},
    "diagnostics": {"kinds": ["residual", "rank", "maps", "heads"], "first_epoch_every": 2},
}
TWO = {"devices": 2, "strategy": "fsdp"}
FOUR = {"devices": 4, "strategy": "fsdp"}


def train(folder: Path, cell: Cell, end: str = "never") -> int:
    """Train `cell` in `folder` until it has ended or met its `end`; return the exit code."""
    folder.mkdir(parents=True, exist_ok=True)
    cell.write(folder / "config.yaml")
    done = run_python(folder, sharded_cells.__file__, str(folder), end)
    if end == "never":
        assert done.returncode == 0, done.stdout + done.stderr
    return done.returncode


def images(**training: Any) -> Cell:
    """Return a cell of four steps with clipping, averaged weights and diagnostics."""
    return digits_cell(model=EXACT, training={"epochs": 1, **RECORDED, **training})


def text(**training: Any) -> Cell:
    """Return a cell of six steps with accumulated gradients, an average and composed heads."""
    return text_cell(
        data={"epoch_steps": 3},
        model={"dropout": 0.0, "depth": 1, "attention": "dcmha"},
        training={"epochs": 2, "average": {"epochs": 2}, **training},
    )


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a cell that one device has trained."""
    return make_once(tmp_path_factory, "alone", lambda folder: train(folder, images()))


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the same cell, trained on two devices with FSDP."""
    return make_once(tmp_path_factory, "sharded", lambda folder: train(folder, images(**TWO)))


def require_close(ours: Path, theirs: Path, loss_tolerance: float = 1e-4) -> None:
    """Compare metrics, values of samples and weights up to the rounding of float32.

    `loss_tolerance` is that of the mean training loss of an epoch.
    """
    rows = read_metrics(ours / "metrics.csv")
    others = read_metrics(theirs / "metrics.csv")
    assert [row[:3] for row in rows] == [row[:3] for row in others]
    assert rows
    for row, other in zip(rows, others, strict=True):
        tolerance = loss_tolerance if row.name == "train/loss" else 1e-4
        assert row.value == pytest.approx(other.value, rel=tolerance, abs=1e-5), row
    units = np.load(ours / "units.npz")
    other_units = np.load(theirs / "units.npz")
    for name in units:
        assert units[name] == pytest.approx(other_units[name], rel=1e-3, abs=1e-4)
    for path in (ours / "checkpoints").glob("*.pt"):
        weights = torch.load(path, weights_only=True)
        other_weights = torch.load(theirs / "checkpoints" / path.name, weights_only=True)
        assert_close_weights(weights, other_weights)


def test_a_sharded_cell_computes_the_result_of_one_device(alone: Path, sharded: Path) -> None:
    assert result_of(alone).identity == result_of(sharded).identity
    result = result_of(sharded)
    assert (result.devices, result.nodes, result.strategy) == (2, 1, "fsdp")
    assert (result_of(alone).strategy, result.recompute) == (None, "none")
    require_close(sharded, alone)
    assert sorted(path.name for path in (sharded / "checkpoints").iterdir()) == [
        "averaged.pt",
        "weights.pt",
    ]
    lines, other_lines = ((f / "diagnostics.csv").read_text().split() for f in (sharded, alone))
    assert [line.rpartition(",")[0] for line in lines] == [
        line.rpartition(",")[0] for line in other_lines
    ]
    assert len(lines) > 1


def test_a_cell_resumes_with_other_strategies_and_numbers_of_devices(tmp_path: Path) -> None:
    """One file of a checkpoint serves sharded and other trainings on 1, 2 and 4 devices.

    The file is that of a training without shards, so DDP continues from it as one device does.
    """
    alone = tmp_path / "alone"
    resumed = tmp_path / "resumed"
    train(alone, text())
    assert train(resumed, text(**TWO, recompute="blocks"), "stop:2") == 143
    assert train(resumed, text(), "stop:3") == 143
    train(resumed, text(**FOUR))
    # Each process adds one loss to the mean of an epoch, so a step on more devices weighs more.
    require_close(resumed, alone, loss_tolerance=2e-2)


def test_a_rank_killed_during_a_checkpoint_loses_nothing(sharded: Path, tmp_path: Path) -> None:
    """Checkpoints before every step, the first included, change no bit of the results."""
    cell = images(**TWO, checkpoint_every=1e-6)
    assert train(tmp_path, cell, "gathering") != 0
    assert [path.name for path in tmp_path.glob("checkpoints/*")] == ["step-000000000.ckpt"]
    assert train(tmp_path, cell, "writing") != 0
    assert [path.name for path in tmp_path.glob("checkpoints/*")] == ["step-000000000.ckpt"]
    train(tmp_path, cell)
    assert (tmp_path / "diagnostics.csv").read_bytes() == (sharded / "diagnostics.csv").read_bytes()
    for name in ("weights.pt", "averaged.pt"):
        weights = torch.load(tmp_path / "checkpoints" / name, weights_only=True)
        expected = torch.load(sharded / "checkpoints" / name, weights_only=True)
        assert all(torch.equal(weight, expected[key]) for key, weight in weights.items())


def test_devices_may_evaluate_a_sharded_segmenter_unequally_often(tmp_path: Path) -> None:
    """The number of windows depends on the image; rank 0 alone draws pictures."""
    model = {"drop_path": 0.0, "decoder_dropout": 0.0}
    for name, training in (("alone", {}), ("sharded", TWO)):
        options = {**training, "epochs": 1, "evaluate_every": 1, "average": {"decay": 0.9}}
        train(tmp_path / name, scenes_cell(tmp_path / "scenes", model=model, training=options))
    require_close(tmp_path / "sharded", tmp_path / "alone")
    pictures = {path.name for path in (tmp_path / "alone" / "pictures").iterdir()}
    assert {path.name for path in (tmp_path / "sharded" / "pictures").iterdir()} == pictures


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_mixed_precision_is_that_of_one_device(precision: str, tmp_path: Path) -> None:
    """FSDP keeps float32 weights; fp16 has a loss scale, which all ranks must change together."""
    losses = []
    for name, training in (("alone", {}), ("sharded", TWO)):
        options = {**training, "epochs": 2, "precision": precision, "clip": 0.5}
        model = {"dropout": 0.0, "depth": 1}
        cell = text_cell(data={"epoch_steps": 2}, model=model, training=options)
        train(tmp_path / name, cell)
        losses.append(result_of(tmp_path / name).metrics["test/loss"])
    assert losses[1] == pytest.approx(losses[0], rel=2e-2)
