"""Regression: numbers predicted from an image.

Shapes: images (B, C, H, W); predictions and targets (B, K) float, in the units of the targets.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torchmetrics import Metric

from lit_attn.tasks.base import TaskModule


class Regression(TaskModule):
    """Mean squared error; mean absolute error and R² of each split."""

    def build_metrics(self, split: str) -> "Errors":
        return Errors(self.data.signature.outputs)

    def metric_names(self, split: str) -> list[str]:
        return ["mae", "r2", "loss"]

    def loss(self, batch: Any) -> Tensor:
        images, targets = batch
        return F.mse_loss(self.network(images), targets)

    def evaluate(self, batch: Any) -> tuple[Tensor, Tensor]:
        """Return predictions and targets."""
        images, targets = batch
        return self.network(images).float(), targets

    def predictions(self, batch: Any, evaluated: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Return predictions and targets, (B,) for one number and (B, K) for several."""
        return tuple(values.squeeze(1) for values in evaluated)


class Errors(Metric):
    """Mean absolute and squared error over samples and outputs, and the mean R² of the outputs.

    R² is 1 - (squared error) / (variance of the targets of the split); it is left out if an output
    has no variance.
    """

    samples: Tensor
    absolute: Tensor
    squared: Tensor
    total: Tensor
    total_squared: Tensor

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.add_state("samples", torch.tensor(0), dist_reduce_fx="sum")
        for name in ("absolute", "squared", "total", "total_squared"):
            zeros = torch.zeros(outputs, dtype=torch.float64)
            self.add_state(name, zeros, dist_reduce_fx="sum")

    def update(self, predictions: Tensor, targets: Tensor) -> None:
        """Add predictions (B, K) and targets (B, K)."""
        targets = targets.double()
        errors = predictions.double() - targets
        self.samples += len(targets)
        self.absolute += errors.abs().sum(0)
        self.squared += errors.square().sum(0)
        self.total += targets.sum(0)
        self.total_squared += targets.square().sum(0)

    def compute(self) -> dict[str, Tensor]:
        values = {
            "mae": self.absolute.mean() / self.samples,
            "loss": self.squared.mean() / self.samples,
        }
        variation = self.total_squared - self.total.square() / self.samples
        if (variation > 1e-12 * self.total_squared).all():
            values["r2"] = 1 - (self.squared / variation).mean()
        return values
