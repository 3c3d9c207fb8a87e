"""Models from elsewhere, own modules and other tasks: sharded, or refused before anything runs."""

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import sharded_kinds
from helpers.commands import run_python
from helpers.paths import ROOT
from helpers.training_cells import digits_cell

from lit_attn.cells.rows import read_metrics
from lit_attn.config.cell import Cell

TOLERANCE = 1e-9


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_sharded_ranks_train_every_kind_of_model(tmp_path: Path) -> None:
    """Weights and averages are those of one process in float64; metrics are float32 in parts."""
    done = run_python(ROOT / "tests", "-m", "helpers.sharded_kinds", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    for kind in sharded_kinds.KINDS:
        alone, sharded = (tmp_path / kind / name for name in ("alone", "sharded"))
        names = sorted(path.name for path in (alone / "checkpoints").iterdir())
        assert names == sorted(path.name for path in (sharded / "checkpoints").iterdir())
        for name in names:
            expected = torch.load(alone / "checkpoints" / name, weights_only=True)
            weights = torch.load(sharded / "checkpoints" / name, weights_only=True)
            assert weights.keys() == expected.keys()
            for key, weight in weights.items():
                difference = (weight.double() - expected[key].double()).abs()
                assert difference.numel() == 0 or difference.max() < TOLERANCE, (kind, name, key)
        rows = read_metrics(sharded / "metrics.csv")
        expected_rows = read_metrics(alone / "metrics.csv")
        for row, expected_row in zip(rows, expected_rows, strict=True):
            assert row[:3] == expected_row[:3]
            assert row.value == pytest.approx(expected_row.value, rel=1e-4, abs=1e-6), (kind, row)


def make_cell(network: str, **optimizer: Any) -> Cell:
    """Return a cell that trains a network of `helpers.block_networks` with FSDP."""
    training = {"strategy": "fsdp", "devices": 2}
    fields = sharded_kinds.write_fields(digits_cell())
    fields["experiment"]["training"] |= training
    model = {"kind": "module", "import": f"helpers.block_networks:{network}"}
    fields["experiment"]["model"] = model
    if optimizer:
        fields["experiment"]["optimizer"] = optimizer
    return Cell.model_validate(fields)


@pytest.mark.parametrize("network", ["Blocks", "ReadsShapes"])
def test_a_network_that_reads_weights_in_their_blocks_is_accepted(network: str) -> None:
    make_cell(network)


def test_a_weight_that_is_read_outside_its_block_is_named_in_one_line() -> None:
    with pytest.raises(ValueError, match=r"training\.strategy: fsdp") as caught:
        make_cell("Penalised")
    assert (
        "the model reads 'encoder.layers.0.linear1.weight' outside the forward pass of the block "
        "'encoder.layers.0', where a device has only a part of the weight"
    ) in str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize("task", ["Regularised", "Multiplied"])
def test_a_loss_that_reads_a_weight_of_a_block_ends_the_cell_in_one_line(
    task: str, tmp_path: Path
) -> None:
    """The check before the first cell sees the network alone, and no loss of a user."""
    fields = sharded_kinds.own_module(tmp_path)
    fields["experiment"]["training"] |= {"strategy": "fsdp", "devices": 2}
    fields["experiment"]["task"]["import"] = f"helpers.block_networks:{task}"
    Cell.model_validate(fields).write(tmp_path / "config.yaml")
    done = run_python(ROOT / "tests", "-m", "lit_attn.train", str(tmp_path))
    assert done.returncode == 2, done.stdout + done.stderr
    assert "training.strategy: fsdp: code outside the network's forward pass reads" in done.stderr
    assert "Traceback" not in done.stderr


def test_an_optimizer_that_takes_no_shards_is_refused() -> None:
    with pytest.raises(ValueError, match="'adafactor' does not take sharded parameters"):
        make_cell("Blocks", kind="adafactor", lr=0.01)
    digits_cell(optimizer={"kind": "adafactor", "lr": 0.01}, training={"strategy": "fsdp"})
