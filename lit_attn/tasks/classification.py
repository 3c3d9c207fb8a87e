"""Image classification as a LightningModule.

Shapes: images (B, C, H, W) float; targets (B,) class indices or (B, classes) probabilities.
"""

from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchmetrics import MeanMetric, Metric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassCalibrationError

from lit_attn.config.training import Optimizer
from lit_attn.errors import Diverged
from lit_attn.tasks.optim import build_optimizer
from lit_attn.tasks.schedule import Rate


class Classification(L.LightningModule):
    """Cross-entropy training; top-1, top-5, calibration error and loss of every evaluation split.

    `splits` names the evaluation loaders in their order ("val", "test"); metrics are logged as
    `<split>/accuracy` and so on, as fractions.
    """

    def __init__(
        self,
        network: nn.Module,
        num_classes: int,
        splits: list[str],
        optimizer: Optimizer,
        rate: Rate,
        label_smoothing: float = 0.0,
        compiled: bool = False,
    ) -> None:
        super().__init__()
        self.network = network
        self.splits = splits
        self.optimizer = optimizer
        self.rate = rate
        self.label_smoothing = label_smoothing
        if compiled:
            network.compile()
        self.metrics = nn.ModuleList(_metrics(num_classes) for _ in splits)
        self.train_loss = MeanMetric()

    def forward(self, images: Tensor) -> Tensor:
        """Logits (B, classes)."""
        logits: Tensor = self.network(images)
        return logits

    def training_step(self, batch: tuple[Tensor, Tensor], batch_index: int) -> Tensor:
        """The smoothed cross-entropy; Diverged, before any update, where it is not finite."""
        images, targets = batch
        loss = F.cross_entropy(self(images), targets, label_smoothing=self.label_smoothing)
        if not torch.isfinite(loss):
            raise Diverged(f"loss is {loss.item()} at step {self.global_step}")
        self.train_loss.update(loss.detach())
        return loss

    def on_train_epoch_end(self) -> None:
        """Record the epoch's mean loss; at every step it would cost more than a small step."""
        rate = self.rate(self.global_step - 1)
        self._record({"train/loss": self.train_loss.compute().item(), "train/lr": rate})
        self.train_loss.reset()

    def validation_step(
        self, batch: tuple[Tensor, Tensor], batch_index: int, dataloader_idx: int = 0
    ) -> None:
        """Count one batch of split `splits[dataloader_idx]`."""
        images, targets = batch
        logits = self(images).float()
        self._split_metrics(dataloader_idx).update(logits, targets)

    def on_validation_epoch_end(self) -> None:
        """Record every split's metrics."""
        for index, split in enumerate(self.splits):
            metrics = self._split_metrics(index)
            self._record({f"{split}/{name}": v.item() for name, v in metrics.compute().items()})
            metrics.reset()

    def _record(self, values: dict[str, float]) -> None:
        # Not through `self.log`: that writes after the hooks in which a checkpoint is saved, so a
        # cell stopped there would lose the row.
        for logger in self.loggers:
            logger.log_metrics({"epoch": self.current_epoch, **values}, step=self.global_step)

    def _split_metrics(self, index: int) -> MetricCollection:
        metrics = self.metrics[index]
        assert isinstance(metrics, MetricCollection)
        return metrics

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """The optimiser; its rate is set at every step from a pure function of the step."""
        return build_optimizer(self.optimizer, self.network)

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Set this step's learning rate."""
        for group in optimizer.param_groups:
            group["lr"] = self.rate(self.global_step)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Keep the running mean of the training loss: a metric is not in the state by itself."""
        checkpoint["train_loss"] = {
            name: getattr(self.train_loss, name).cpu() for name in ("mean_value", "weight")
        }

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Take the running mean up again."""
        for name, value in checkpoint["train_loss"].items():
            setattr(self.train_loss, name, value.to(self.device))
        self.train_loss._update_count = 1


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


def _metrics(num_classes: int) -> MetricCollection:
    return MetricCollection(
        {
            "accuracy": MulticlassAccuracy(num_classes, average="micro"),
            "top5": MulticlassAccuracy(num_classes, average="micro", top_k=min(5, num_classes)),
            "calibration": MulticlassCalibrationError(num_classes, n_bins=15),
            "loss": CrossEntropy(),
        },
        compute_groups=False,
    )
