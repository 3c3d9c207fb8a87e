"""Cells that are trained in this process, and the comparison of their weights."""

from collections.abc import Mapping
from pathlib import Path

import torch

from helpers.training_cells import folder_of
from lit_attn.config.cell import Cell
from lit_attn.train import run_cell


def train_cell(cell: Cell, root: Path) -> Path:
    """Train a cell in its folder below `root`, and return the folder."""
    folder = folder_of(cell, root)
    run_cell(folder)
    return folder


def read_weights(folder: Path) -> dict[str, torch.Tensor]:
    """Return the weights of a finished cell by name."""
    return torch.load(folder / "checkpoints" / "weights.pt", weights_only=True)


def assert_same_weights(ours: Path, theirs: Path) -> None:
    """Assert that two finished cells have the same weights, bit by bit."""
    weights, expected = read_weights(ours), read_weights(theirs)
    assert weights.keys() == expected.keys()
    for name, weight in weights.items():
        assert torch.equal(weight, expected[name]), name


def assert_same(ours: Path, theirs: Path) -> None:
    """Assert that two finished cells have the same weights and metrics, byte by byte."""
    assert_same_weights(ours, theirs)
    assert (ours / "metrics.csv").read_bytes() == (theirs / "metrics.csv").read_bytes()


def assert_close_weights(
    ours: Mapping[str, torch.Tensor], theirs: Mapping[str, torch.Tensor]
) -> None:
    """Compare the entries that the gradients determine, up to the rounding of float32."""
    assert ours.keys() == theirs.keys()
    for name, weight in ours.items():
        torch.testing.assert_close(
            _select_determined(name, weight),
            _select_determined(name, theirs[name]),
            rtol=1e-4,
            atol=1e-5,
        )


def _select_determined(name: str, weight: torch.Tensor) -> torch.Tensor:
    """Return the entries of a weight that the gradients determine.

    The softmax cancels the bias of the keys. Its gradient is rounding error alone, of which Adam
    makes whole steps.
    """
    if name.endswith("qkv.bias"):
        queries, _, values = weight.chunk(3)
        return torch.cat([queries, values])
    return weight
