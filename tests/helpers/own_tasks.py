"""LightningModules of a user, and cells that train them."""

import sys
import types
from typing import Any

import lightning as L
import torch
from torch.nn import functional as F

from helpers.training_cells import digits_cell
from lit_attn.config.cell import Cell


class Plain(L.LightningModule):
    """Classification with the cross-entropy."""

    def __init__(self, network: torch.nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.network(images)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        images, labels = batch
        return F.cross_entropy(self(images), labels)

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        images, labels = batch
        logits = self(images).float()
        self.log("loss", F.cross_entropy(logits, labels))
        self.log("error", (logits.argmax(1) != labels).float().mean())
        return logits.argmax(1), labels


def own_cell(cls: type[L.LightningModule], monkeypatch: Any, **changes: Any) -> Cell:
    """Return a cell of the digits whose task is `cls`."""
    module = types.ModuleType("mine")
    setattr(module, cls.__name__, cls)
    monkeypatch.setitem(sys.modules, "mine", module)
    training = {"epochs": 2, **changes.pop("training", {})}
    cell = digits_cell(training=training, data={"augment": ["normalize"]}, **changes)
    fields = cell.model_dump(mode="json")
    measures = ["loss", "error"]
    fields["experiment"]["task"] = {
        "kind": "module",
        "import": f"mine:{cls.__name__}",
        "measures": measures,
    }
    fields["metric"] = {"name": "test/error", "goal": "min"}
    return Cell.model_validate(fields)
