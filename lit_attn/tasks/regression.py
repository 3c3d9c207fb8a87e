"""Regression: numbers predicted from an image.

Shapes: images (B, C, H, W); predictions and targets (B, K) float, in the units of the targets.
"""

from typing import Any

from torch import Tensor
from torch.nn import functional as F
from torchmetrics import MeanAbsoluteError, MeanSquaredError, MetricCollection, R2Score

from lit_attn.tasks.base import TaskModule


class Regression(TaskModule):
    """Mean squared error; mean absolute error and R² (mean over the K numbers) of each split."""

    def build_metrics(self, split: str) -> MetricCollection:
        return MetricCollection(
            {"mae": MeanAbsoluteError(), "r2": R2Score(), "loss": MeanSquaredError()},
            compute_groups=False,
        )

    def loss(self, batch: Any) -> Tensor:
        images, targets = batch
        return F.mse_loss(self.network(images), targets)

    def evaluate(self, batch: Any) -> tuple[Tensor, ...]:
        """Return predictions and targets."""
        images, targets = batch
        return self.network(images).float(), targets

    def predictions(self, batch: Any, evaluated: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Return predictions and targets, (B,) for one number and (B, K) for several."""
        # torchmetrics flattens the values with `view`, which needs contiguous memory.
        return tuple(values.squeeze(1).contiguous() for values in evaluated)
