"""Measures of an own LightningModule: means over the samples of a split, and over nothing else."""

import sys
import types
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from helpers.finished_cells import train_cell
from helpers.training_cells import cell_of, result_of
from torch.nn import functional as F

from lit_attn.config.cell import Cell
from lit_attn.tasks.adapter import call_step

SAMPLES = 33  # One more than four batches of eight.


class Texts(L.LightningModule):
    """Classification of texts, whose loss leaves out the rows of padding."""

    def __init__(self, network: torch.nn.Module) -> None:
        super().__init__()
        self.network = network

    def loss(self, batch: Any) -> torch.Tensor:
        tokens, present, labels = batch
        return F.cross_entropy(self.network(tokens, present).float(), labels)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.loss(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("loss", self.loss(batch))


def text_task(folder: Path, task: Any) -> Cell:
    """Return a cell that trains a task on texts of two classes."""
    for split in ("train", "val", "test"):
        lines = []
        for number in range(SAMPLES):
            text = "ab" * (1 + number % 3) if number % 2 else "cd" * (1 + number % 4)
            lines.append(f"{int(number % 5 == 0)}\t{text}\n")
        (folder / f"{split}.tsv").write_text("".join(lines))
    experiment = {
        "task": task,
        "data": {
            "kind": "labelled-text",
            "name": "t",
            "folder": str(folder),
            "context": 8,
            "batch_size": 16,
            "eval_batch_size": 8,
        },
        "model": {
            "kind": "sequence-classifier",
            "dim": 16,
            "depth": 1,
            "heads": 2,
            "ffn": {"width": 16},
        },
        "optimizer": {"kind": "adamw", "lr": 1e-2},
        "training": {"epochs": 1, "accelerator": "cpu"},
    }
    return cell_of(experiment, metric={"name": "test/loss", "goal": "min"})


@pytest.mark.process
def test_rows_that_fill_the_last_batch_count_as_no_samples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The task of the package and an own one with the same loss measure the same number."""
    module = types.ModuleType("mine")
    monkeypatch.setattr(module, "Texts", Texts, raising=False)
    monkeypatch.setitem(sys.modules, "mine", module)
    losses = []
    for name in ("sequence-classification", "own"):
        task = {"kind": "module", "import": "mine:Texts"} if name == "own" else name
        folder = tmp_path / name
        folder.mkdir()
        cell = text_task(tmp_path, task)
        losses.append(result_of(train_cell(cell, folder)).metrics["test/loss"])
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)


def test_an_iterator_that_ends_in_a_step_is_not_the_end_of_the_split() -> None:
    """Lightning's loop takes StopIteration for the end of the data."""

    def validation_step(batch: Any, batch_idx: int) -> Any:
        return next(iter(()))

    with pytest.raises(RuntimeError, match="validation_step raised StopIteration"):
        call_step(validation_step, None, 0)
