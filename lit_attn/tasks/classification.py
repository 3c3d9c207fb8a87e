"""Classification of images, sequences, tokens and rows, and regression from images and rows.

Shapes: images (B, C, H, W) float; tokens and their mask (B, n), or (B, 2, n) for pairs; logits
(B, classes); targets (B,) class indices or (B, classes) probabilities.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torchmetrics import MeanAbsoluteError, MeanMetric, MeanSquaredError, MetricCollection
from torchmetrics import classification as metrics

from lit_attn.data.text.ids import IGNORED
from lit_attn.tasks.base import TaskModule
from lit_attn.tasks.exact_metrics import ClassMean
from lit_attn.tasks.square_metrics import R2Score


class Classification(TaskModule):
    """Classification of images or rows: accuracy, top-5 accuracy, calibration error and loss.

    Batches are the inputs of the network and targets. All metrics but the loss are fractions. The
    training accuracy is that of the batches that train, with dropout and augmentation, if their
    targets are classes.
    """

    training_values = ("accuracy",)

    evaluates_in_step = True
    has_sample_pictures = True
    loss_function: Callable[[Tensor, Tensor], Tensor]
    """Mean loss of logits and targets, which the configuration sets."""

    def build_metrics(self, split: str) -> MetricCollection:
        classes = self.data.signature.classes
        return MetricCollection(
            {
                "accuracy": metrics.MulticlassAccuracy(classes, average="micro"),
                "top5": metrics.MulticlassAccuracy(classes, average="micro", top_k=min(5, classes)),
                "calibration": Calibration(classes, n_bins=15),
                "loss": CrossEntropy(),
            },
            compute_groups=False,
        )

    def chance_levels(self, split: str) -> dict[str, float]:
        """Return the share of the most frequent class plus two standard errors."""
        if split not in self.data.largest_class:
            return {}
        share, count = self.data.largest_class[split]
        return {"accuracy": min(1.0, share + 2 * math.sqrt(share * (1 - share) / count))}

    def loss(self, batch: Any) -> Tensor:
        *inputs, targets = batch
        logits = self.network(*inputs)
        self._count_correct(logits, targets)
        return self.loss_function(logits, targets)

    def _count_correct(self, logits: Tensor, targets: Tensor) -> None:
        """Add the correct predictions (N,) of logits (N, classes) to the training accuracy.

        Every sample has a label: only evaluation pads its batches with rows without one.
        """
        if targets.ndim == 1:  # MixUp and CutMix have probabilities (N, classes) as targets.
            self.record_training("accuracy", (logits.argmax(1) == targets).float())

    def evaluate(self, batch: Any) -> tuple[Tensor, Tensor]:
        """Return logits and labels."""
        *inputs, targets = batch
        return self.network(*inputs).float(), targets

    def unit_values(self, *arguments: Tensor) -> Tensor:
        logits, targets = arguments
        losses = F.cross_entropy(logits, targets, reduction="none")
        is_target = targets != IGNORED
        is_correct = logits.argmax(1) == targets
        sums = [_sum_per_sample(values) for values in (losses, is_target, is_correct)]
        return torch.stack(sums, dim=1)

    def predictions(self, batch: Any, evaluated: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Return probabilities (N, classes) and the N labels, without those that are IGNORED."""
        logits, labels = evaluated
        is_counted = labels != IGNORED
        return logits.movedim(1, -1)[is_counted].softmax(-1), labels[is_counted]


def _sum_per_sample(values: Tensor) -> Tensor:
    """Return the sums (B,) of values (B, ...) over all axes but the first."""
    return values.float().unsqueeze(-1).flatten(1).sum(1)


class SequenceClassification(Classification):
    """Classification of sequences: batches are tokens, mask and labels; rows may have no label."""

    def evaluate(self, batch: Any) -> tuple[Tensor, Tensor]:
        logits, labels = super().evaluate(batch)
        labelled = labels != IGNORED
        return logits[labelled], labels[labelled]


class TokenClassification(Classification):
    """Classification of tokens; batches are those of `TaggedTokens`.

    Logits are (B, classes, n) and classes (B, n) for the metrics, IGNORED for tokens without one.
    """

    def build_metrics(self, split: str) -> MetricCollection:
        size = self.data.signature.classes
        per_class = metrics.MulticlassF1Score(size, average="none", ignore_index=IGNORED)
        return MetricCollection(
            {
                "accuracy": metrics.MulticlassAccuracy(size, average="micro", ignore_index=IGNORED),
                "f1": ClassMean(per_class, size, IGNORED),
                "loss": CrossEntropy(),
            },
            compute_groups=False,
        )

    def loss(self, batch: Any) -> Tensor:
        """Return the mean over the tokens of the step, up to the mean over micro-batches."""
        tokens, present, classes, mean_count = batch
        is_counted = classes != IGNORED
        logits = self.network(tokens, present)[is_counted]
        targets = classes[is_counted]
        self._count_correct(logits, targets)
        return self.loss_function(logits, targets) * is_counted.sum() / mean_count.sum()

    def evaluate(self, batch: Any) -> tuple[Tensor, Tensor]:
        """Return logits and classes."""
        logits, classes = super().evaluate(batch)
        return logits.transpose(1, 2), classes


class Regression(TaskModule):
    """Regression from images and rows: errors, and R² (mean over the K numbers).

    Predictions and targets are (B, K) float, in the units of the targets.
    """

    evaluates_in_step = True
    has_sample_pictures = True

    def build_metrics(self, split: str) -> MetricCollection:
        return MetricCollection(
            {
                "mae": MeanAbsoluteError(),
                "rmse": MeanSquaredError(squared=False),
                "r2": R2Score(),
                "loss": MeanSquaredError(),
            },
            compute_groups=False,
        )

    def loss(self, batch: Any) -> Tensor:
        *inputs, targets = batch
        return F.mse_loss(self.network(*inputs), targets)

    def evaluate(self, batch: Any) -> tuple[Tensor, ...]:
        """Return predictions and targets."""
        *inputs, targets = batch
        return self.network(*inputs).float(), targets

    def predictions(self, batch: Any, evaluated: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Return predictions and targets, (B,) for one number and (B, K) for several."""
        # torchmetrics flattens the values with `view`, which needs contiguous memory.
        return tuple(values.squeeze(1).contiguous() for values in evaluated)


class Calibration(metrics.MulticlassCalibrationError):
    """Expected calibration error, from logits (B, classes) and class indices (B,).

    The softmax is taken here because torchmetrics takes logits between 0 and 1 for probabilities.
    """

    def update(self, logits: Tensor, targets: Tensor) -> None:
        super().update(logits.softmax(1), targets)


class CrossEntropy(MeanMetric):
    """Mean cross-entropy over targets, from logits (B, classes, ...) and class indices (B, ...)."""

    def __init__(self) -> None:
        super().__init__()
        self.set_dtype(torch.float64)

    def update(self, logits: Any, targets: Any = None) -> None:
        self.mean_value += F.cross_entropy(logits, targets, reduction="sum")
        self.weight += (targets != IGNORED).sum()
