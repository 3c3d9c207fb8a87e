"""Classification of images and of sequences.

Shapes: images (B, C, H, W) float; tokens and their mask (B, n), or (B, 2, n) for pairs; logits
(B, classes); targets (B,) class indices or (B, classes) probabilities.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchmetrics import Metric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassCalibrationError

from lit_attn.config.data.text import IGNORED
from lit_attn.config.optimizers import Optimizer
from lit_attn.config.schedules import Rate
from lit_attn.data.module import DataModule
from lit_attn.tasks.base import TaskModule


class Classification(TaskModule):
    """Classification of images: accuracy, top-5 accuracy, calibration error and loss.

    Batches are images and targets. All metrics but the loss are fractions.
    """

    def __init__(
        self,
        network: nn.Module,
        data: DataModule,
        loss: Callable[[Tensor, Tensor], Tensor],
        optimizer: Optimizer,
        rate: Rate,
    ) -> None:
        self.num_classes = data.signature.classes
        self.loss_function = loss
        super().__init__(network, data, optimizer, rate)

    def build_metrics(self, split: str) -> MetricCollection:
        top5 = min(5, self.num_classes)
        return MetricCollection(
            {
                "accuracy": MulticlassAccuracy(self.num_classes, average="micro"),
                "top5": MulticlassAccuracy(self.num_classes, average="micro", top_k=top5),
                "calibration": Calibration(self.num_classes, n_bins=15),
                "loss": CrossEntropy(),
            },
            compute_groups=False,
        )

    def loss(self, batch: Any) -> Tensor:
        *inputs, targets = batch
        return self.loss_function(self.network(*inputs), targets)

    def evaluate(self, batch: Any) -> tuple[Tensor, Tensor]:
        """Return logits and labels."""
        *inputs, targets = batch
        return self.network(*inputs).float(), targets

    def unit_values(self, *arguments: Tensor) -> Tensor:
        logits, targets = arguments
        losses = F.cross_entropy(logits, targets, reduction="none")
        correct = (logits.argmax(1) == targets).float()
        return torch.stack([losses, torch.ones_like(losses), correct], dim=1)

    def predictions(self, batch: Any, evaluated: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        logits, labels = evaluated
        return logits.softmax(1), labels


class SequenceClassification(Classification):
    """Classification of sequences: batches are tokens, mask and labels; rows may have no label."""

    def evaluate(self, batch: Any) -> tuple[Tensor, Tensor]:
        logits, labels = super().evaluate(batch)
        labelled = labels != IGNORED
        return logits[labelled], labels[labelled]


class Calibration(MulticlassCalibrationError):
    """Expected calibration error, from logits (B, classes) and class indices (B,).

    The softmax is taken here because torchmetrics takes logits between 0 and 1 for probabilities.
    """

    def update(self, logits: Tensor, targets: Tensor) -> None:
        super().update(logits.softmax(1), targets)


class CrossEntropy(Metric):
    """Mean cross-entropy over samples, from logits (B, classes) and class indices (B,)."""

    total: Tensor
    samples: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("total", torch.tensor(0.0, dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("samples", torch.tensor(0), dist_reduce_fx="sum")

    def update(self, logits: Tensor, targets: Tensor) -> None:
        self.total += F.cross_entropy(logits, targets, reduction="sum").double()
        self.samples += len(targets)

    def compute(self) -> Tensor:
        return self.total / self.samples
