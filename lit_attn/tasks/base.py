"""What every task's LightningModule shares: when it stops, what it records, how it goes on."""

import contextlib
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, NamedTuple

import lightning as L
import numpy as np
import torch
from numpy.typing import NDArray
from timm.utils import ModelEmaV3
from torch import Tensor, nn
from torchmetrics import MeanMetric, Metric, MetricCollection

from lit_attn.cells.failure import Diverged
from lit_attn.cells.records import Legend
from lit_attn.config.optimizers import Optimizer
from lit_attn.config.schedules import Rate


class Pictures(NamedTuple):
    """Pictures (h, w, 3) uint8, and how to read them."""

    drawn: list[NDArray[np.uint8]]
    legend: Legend


class Task(L.LightningModule, ABC):
    """Trains `network`; evaluates the splits that `splits` names in the order of their loaders.

    Metrics are recorded as `<split>/<name>`, for example `test/loss`, and with the average of the
    weights as `<split>/ema-<name>`. Evaluation is in float32 at every precision.
    """

    momentum: Rate | None = None
    """Momentum (Adam's beta1) of each step; None if the optimiser's own is kept."""

    evaluated_at = -1
    """The step after which the splits were last evaluated."""

    def __init__(
        self, network: nn.Module, splits: list[str], optimizer: Optimizer, rate: Rate
    ) -> None:
        super().__init__()
        self.network = network
        self.splits = splits
        self.optimizer = optimizer
        self.rate = rate
        self.metrics = nn.ModuleList(self.metrics_of(split) for split in splits)
        # Whether it is finite was asked already, and a GPU makes every asking wait.
        self.train_loss = MeanMetric(nan_strategy="disable")
        self.average: ModelEmaV3 | None = None

    @abstractmethod
    def metrics_of(self, split: str) -> Metric | MetricCollection:
        """What is measured on a split; `compute` gives a scalar for each name, one of them loss."""

    @abstractmethod
    def names_of(self, split: str) -> list[str]:
        """Every name that `metrics_of` of this split may give."""

    @abstractmethod
    def loss(self, batch: Any) -> Tensor:
        """What is minimised, of one batch: a scalar."""

    @abstractmethod
    def measured(self, batch: Any) -> tuple[Tensor, ...]:
        """What one evaluation batch means to the metrics' `update`."""

    def inputs(self, batch: Any) -> tuple[Any, ...]:
        """What the network takes of an evaluation batch."""
        *inputs, _ = batch
        return tuple(inputs)

    def pictures(self, data: Any, device: torch.device, averaged: bool) -> Pictures | None:
        """A few pictures of what the network, of trained or averaged weights, makes of `data`."""
        return None

    def average_weights(self, decay: float) -> None:
        """Keep an exponential moving average of the weights, one update a step; evaluate it too."""
        # Lightning puts all modules into evaluation and back, and warns of those already there.
        self.average = ModelEmaV3(self.network, decay).requires_grad_(False).train()
        self.metrics.extend(self.metrics_of(split) for split in self.splits)

    @contextlib.contextmanager
    def with_average(self) -> Iterator[None]:
        """Let `network` be the average of the weights for a while."""
        assert self.average is not None
        trained, self.network = self.network, self.average.module
        try:
            yield
        finally:
            self.network = trained

    def compile_network(self) -> None:
        """torch.compile what `loss` and `measured` call."""
        self.network.compile()

    def training_step(self, batch: Any, batch_index: int) -> Tensor:
        """The loss; Diverged, before any update, where it is not finite."""
        loss = self.loss(batch)
        if not torch.isfinite(loss):
            raise Diverged(f"loss is {loss.item()} at step {self.global_step}")
        self.train_loss.update(loss.detach())
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_index: int) -> None:
        """Average the weights after a step."""
        if self.average and (batch_index + 1) % self.trainer.accumulate_grad_batches == 0:
            self.average.update(self.network)

    def on_train_epoch_end(self) -> None:
        """Record the epoch's mean loss; at every step it would cost more than a small step."""
        rate = self.rate(self.global_step - 1)
        self._record({"train/loss": self.train_loss.compute().item(), "train/lr": rate})
        self.train_loss.reset()

    def validation_step(self, batch: Any, batch_index: int, dataloader_idx: int = 0) -> None:
        """Count one batch of split `splits[dataloader_idx]`."""
        with torch.autocast(self.device.type, enabled=False):
            self._metrics(dataloader_idx).update(*self.measured(batch))
            if self.average is not None:
                with self.with_average():
                    averaged = self.measured(batch)
                self._metrics(len(self.splits) + dataloader_idx).update(*averaged)

    def on_validation_epoch_end(self) -> None:
        """Record every split's metrics; Diverged where a loss is not finite."""
        averaged = [f"{split}/ema-" for split in self.splits] if self.average else []
        for index, prefix in enumerate([f"{split}/" for split in self.splits] + averaged):
            metrics = self._metrics(index)
            values = {f"{prefix}{name}": v.item() for name, v in metrics.compute().items()}
            metrics.reset()
            if not math.isfinite(loss := values[f"{prefix}loss"]):
                raise Diverged(f"{prefix}loss is {loss} after step {self.global_step}")
            self._record(values)
        self.evaluated_at = self.global_step

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """The optimiser; its rate is set at every step from a pure function of the step."""
        # A fused optimiser takes the loss scale out by itself, after gradients would be clipped.
        scaled = self.trainer.precision == "16-mixed" and self.trainer.gradient_clip_val is not None
        return self.optimizer.build(self.network, fused=not scaled)

    def configure_gradient_clipping(
        self,
        optimizer: torch.optim.Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Scale the gradients to a norm of at most the value, over all parameters as one vector.

        Lightning's own refuses every fused optimiser in mixed precision, in bf16 for nothing.
        """
        if gradient_clip_val is not None:
            nn.utils.clip_grad_norm_(self.parameters(), gradient_clip_val)

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Set this step's learning rate and, if the schedule cycles it, the momentum."""
        for group in optimizer.param_groups:
            group["lr"] = self.rate(self.global_step)
            if self.momentum is not None:
                momentum = self.momentum(self.global_step)
                if "betas" in group:
                    group["betas"] = (momentum, group["betas"][1])
                else:
                    group["momentum"] = momentum

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Keep the running mean of the training loss: a metric is not in the state by itself.

        It is the mean over all devices, whichever writes it.
        """
        with self.train_loss.sync_context():
            checkpoint["train_loss"] = {
                name: getattr(self.train_loss, name).cpu() for name in ("mean_value", "weight")
            }

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Take the running mean up again: the first device all of it, the others nothing."""
        for name, value in checkpoint["train_loss"].items():
            mine = value if self.trainer.is_global_zero else torch.zeros_like(value)
            setattr(self.train_loss, name, mine.to(self.device))
        self.train_loss._update_count = 1

    def _record(self, values: dict[str, float]) -> None:
        # Not through `self.log`: that writes after the hooks in which a checkpoint is saved, so a
        # cell stopped there would lose the row.
        # Not `current_epoch` either: after the last step that is one more.
        steps = int(self.trainer.num_training_batches) // self.trainer.accumulate_grad_batches
        epoch = (self.global_step - 1) // steps
        for logger in self.loggers:
            logger.log_metrics({"epoch": epoch, **values}, step=self.global_step)

    def _metrics(self, index: int) -> Metric | MetricCollection:
        metrics = self.metrics[index]
        assert isinstance(metrics, Metric | MetricCollection)
        return metrics
