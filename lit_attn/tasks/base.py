"""Base class of the tasks: training and evaluation steps, recording, and resuming."""

import contextlib
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection

from lit_attn.cells.failure import Diverged
from lit_attn.data.log import LOG
from lit_attn.data.module import DataModule
from lit_attn.models.sharding import (
    gathered_weights,
    is_sharded,
    require_complete,
    reshard,
    shard,
)
from lit_attn.optim.averaging import WeightAverage, decay_of_mean
from lit_attn.optim.base import Optimizer
from lit_attn.optim.schedules import Rate
from lit_attn.schema.base import require_methods
from lit_attn.tasks.exact_metrics import clear_states, compute, update, use_float64
from lit_attn.tasks.late_losses import LateLosses
from lit_attn.tasks.optimizing import OptimizedModule
from lit_attn.tasks.pictures import Pictures
from lit_attn.tasks.running_mean import RunningMean
from lit_attn.tasks.step_graph import StepGraph
from lit_attn.tasks.tf32 import products_in_tf32

if TYPE_CHECKING:
    from timm.utils import ModelEmaV3


class TaskModule(OptimizedModule, ABC):
    """Module that trains `network` and evaluates it on the splits of `data`.

    A subclass defines `build_metrics`, `loss` and `evaluate`. `__init__` builds the metrics, which
    are recorded as `<split>/<name>`, for example `test/loss`, and for averaged weights as
    `<split>/averaged-<name>`. Evaluation is in float32 unless `evaluates_as_training`.
    """

    training_values: tuple[str, ...] = ()
    """Names of the values of training samples that `loss` records with `record_training`."""

    evaluates_as_training = False
    """True if evaluation has the precision of training, False if it is in float32."""

    monitored = ""
    """Metric that decides on early stopping, with its split."""

    network_methods: tuple[str, ...] = ()
    """Methods of the network, beside `forward`, that this task calls (for sharded networks)."""

    evaluates_in_step = False
    """True if every evaluation batch calls the network equally often.

    The devices then evaluate a sharded network block by block. If False, they gather its weights
    for each evaluation.
    """

    step_graph: StepGraph | None = None
    """Recorded training steps; None if Lightning's loop makes the steps."""

    evaluated_at = -1
    """Step after which the splits were last evaluated."""

    write_rows: Callable[[dict[str, float], int, int], None] | None = None
    """Writer of the cell's records, which gets values, step and epoch; None without records."""

    has_sample_pictures = False
    """True if the network's output for images is a prediction that can stand below each image."""

    has_callbacks = False
    """True if callbacks of a user may read the metrics in `trainer.callback_metrics`."""

    _first_loss: Tensor | None = None

    def __init__(
        self, network: nn.Module, data: DataModule, optimizer: Optimizer, rate: Rate
    ) -> None:
        super().__init__(network, optimizer, rate)
        self.data = data
        self.splits = data.splits
        # Metrics of every split, for the trained weights and then for the averaged weights.
        self.metrics: list[Metric | MetricCollection] = []
        self.added: list[MetricCollection] = []
        self.undefined_metrics: set[str] = set()
        self.added_metrics = MetricCollection({})
        self._extend_metrics()
        self.train_means = {name: RunningMean() for name in ("loss", *self.training_values)}
        self.registered_means = nn.ModuleList(self.train_means.values())
        # Numbers that the last training step of a user's module has logged, by name.
        self.logged_in_step: dict[str, Any] = {}
        self.average: ModelEmaV3 | None = None
        self.unaveraged_epochs: int | None = None
        self.late_losses = LateLosses()
        # Open while the weights of a sharded network are gathered for an evaluation.
        self.gathered = contextlib.ExitStack()

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        require_methods(cls, "task module")

    @abstractmethod
    def build_metrics(self, split: str) -> Metric | MetricCollection:
        """Return the metrics of a split; `compute` returns scalars by name, one of them `loss`."""

    @abstractmethod
    def evaluate(self, batch: Any) -> tuple[Tensor, ...]:
        """Return the arguments of the metrics' `update` for one evaluation batch."""

    def record_training(self, name: str, values: Tensor) -> None:
        values = values.detach()
        if self.step_graph is None or not self.step_graph.takes(name, values):
            self.train_means[name].add(values)

    def unit_values(self, *arguments: Tensor) -> Tensor | None:
        """Return loss (nats, a sum), targets and correct predictions (NaN if not counted), (B, 3).

        `arguments` are those of the metrics' `update`. Rows without a target have zeros. A task
        that does not override this returns None: it records no values of single samples.
        """
        return None

    def chance_levels(self, split: str) -> dict[str, float]:
        """Return, by metric, the value that a network reaches at best without using its input.

        An accuracy up to it, and a loss from it on, are no better than chance.
        """
        return {}

    def metric_names(self, split: str) -> list[str]:
        """Return the names of the task's own metrics; override it without a MetricCollection."""
        metrics = self.metrics[self.splits.index(split)]
        assert isinstance(metrics, MetricCollection)
        return [str(name) for name in metrics]

    def predictions(self, batch: Any, evaluated: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Return the added metrics' arguments (the task's Outputs) from the result `evaluated`."""
        return evaluated

    def add_metrics(self, metrics: dict[str, Metric]) -> None:
        """Measure further metrics on every split; called before `average_weights`."""
        self.added_metrics = MetricCollection(dict(metrics), compute_groups=False)
        self.metrics.clear()
        self.added.clear()
        self._extend_metrics()

    def inputs(self, batch: Any) -> tuple[Any, ...]:
        """Return the network's inputs of an evaluation batch."""
        *inputs, _ = batch
        return tuple(inputs)

    def draw_pictures(self, most: int, has_averaged: bool) -> Pictures | None:
        """Return at most `most` pictures of predictions, or None if the task draws none.

        The averaged weights predict if `has_averaged`, and otherwise the trained ones.
        """
        return None

    def average_weights(self, chosen: WeightAverage, steps: int) -> None:
        """Keep and evaluate an average of the weights in a training of `steps`."""
        if chosen.epochs is not None:
            self.unaveraged_epochs = max(0, steps // self.data.steps_per_epoch - chosen.epochs)
        self.average = chosen.build(self.network)
        self._extend_metrics()

    def list_compiled(self) -> list[nn.Module]:
        """Return the modules that are compiled if blocks are not compiled alone."""
        return [self.network]

    def configure_model(self) -> None:
        """Shard the network and its average if the strategy has a mesh of devices for that."""
        if self.device_mesh is None or is_sharded(self.network):
            return
        mesh = self.device_mesh["data_parallel"]
        shard(self.network, mesh, self.network_methods)
        if self.average is not None:
            shard(self.average.module, mesh, self.network_methods)
            # One operation for all tensors does not take sharded and other tensors together.
            self.average.foreach = False

    @property
    def makes_steps(self) -> bool:
        return self.step_graph is not None

    @property
    def first_loss(self) -> float | None:
        """Loss of the first training batch of this process; None after an old checkpoint."""
        return None if self._first_loss is None else self._first_loss.item()

    def training_step(self, batch: Any, batch_index: int) -> Tensor:
        """Return the loss; raise Diverged if it, or on one GPU an earlier one, is not finite.

        Raises ConfigError if it reads a sharded weight outside the network.
        """
        if self.step_graph is not None:
            loss = self.step_graph.step(self, batch)
        else:
            loss = self.loss(batch)
        require_complete(loss)
        self.late_losses.check(self.global_step, loss)
        if self.global_step == 0 and batch_index == 0:
            # A copy, because a CUDA graph writes to its outputs again. Reading makes a GPU wait.
            self._first_loss = loss.detach().clone()
        self.record_training("loss", loss)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_index: int) -> None:
        is_step_end = (batch_index + 1) % self.trainer.accumulate_grad_batches == 0
        if self.average is None or not is_step_end:
            return
        if self.unaveraged_epochs is not None:
            self.average.decay = decay_of_mean(
                self.global_step, self.data.steps_per_epoch, self.unaveraged_epochs
            )
        self.average.update(self.network)

    def on_train_epoch_end(self) -> None:
        """Record the means of the epoch; to record each step would cost more than a step."""
        self.late_losses.require_finite(waits=True)
        values = {"train/lr": self.rate(self.global_step - 1)}
        for name, mean in self.train_means.items():
            if mean.update_called:
                values[f"train/{name}"] = mean.compute().item()
                mean.reset()
        self._record(values)

    def on_validation_start(self) -> None:
        self.late_losses.require_finite(waits=True)
        if self.evaluates_in_step:
            return
        for network in self._list_networks():
            self.gathered.enter_context(gathered_weights(network))

    def on_validation_end(self) -> None:
        self.gathered.close()
        for network in self._list_networks():
            reshard(network)

    def _list_networks(self) -> list[nn.Module]:
        """Return the networks that are evaluated."""
        if self.average is None:
            return [self.network]
        return [self.network, self.average.module]

    def validation_step(
        self, batch: Any, batch_index: int, dataloader_idx: int = 0
    ) -> dict[str, Tensor | None]:
        """Update the metrics of split `splits[dataloader_idx]` with one batch.

        Returns the values of `unit_values` by the prefix of the weights: "" or "averaged-". A batch
        of padding changes no metric. A process that has nothing else computes it once, because the
        states of its metrics need the shapes and types of those on other processes. The processes
        of a sharded network that is evaluated in step compute every batch of padding.
        """
        assert self.trainer.val_dataloaders is not None
        is_padding = not self.trainer.val_dataloaders[dataloader_idx].count_samples(batch_index)
        if is_padding and batch_index > 0:
            if self.evaluates_in_step and is_sharded(self.network):
                self._evaluate_padding(batch)
            return {}
        with self.evaluation_context():
            units = {"": self._update(dataloader_idx, batch)}
            if self.average is not None:
                with self.averaged_network(self.average):
                    units["averaged-"] = self._update(len(self.splits) + dataloader_idx, batch)
        if is_padding:
            for index in range(dataloader_idx, len(self.metrics), len(self.splits)):
                clear_states(self.metrics[index])
                clear_states(self.added[index])
            return {}
        return units

    @contextlib.contextmanager
    def averaged_network(self, average: "ModelEmaV3") -> Iterator[None]:
        """Evaluate the averaged weights in this context."""
        trained = self.network
        self.network = average.module
        try:
            yield
        finally:
            self.network = trained

    @contextlib.contextmanager
    def evaluation_context(self) -> Iterator[None]:
        """Compute in float32 in this context, or in the precision of the training."""
        with contextlib.ExitStack() as stack:
            if not self.evaluates_as_training:
                stack.enter_context(torch.autocast(self.device.type, enabled=False))
                stack.enter_context(products_in_tf32(False))
            yield

    def on_validation_epoch_end(self) -> None:
        """Record the metrics of all splits, also NaN; raise Diverged if a loss is not finite."""
        prefixes = [f"{split}/" for split in self.splits]
        if self.average is not None:
            prefixes += [f"{split}/averaged-" for split in self.splits]
        monitored = math.nan
        for index, prefix in enumerate(prefixes):
            values = self._compute_metrics(index, prefix)
            loss = values[f"{prefix}loss"]
            if not math.isfinite(loss):
                raise Diverged(f"{prefix}loss is {loss} after step {self.global_step}")
            self._record(values)
            monitored = values.get(self.monitored, monitored)
        if self.monitored:
            # NaN is no improvement, and neither is infinity. Without a value, Lightning would
            # compare the value of an earlier evaluation again.
            number = monitored if math.isfinite(monitored) else math.nan
            self.log(self.monitored, number, logger=False, sync_dist=True)
        self.evaluated_at = self.global_step

    def _compute_metrics(self, index: int, prefix: str) -> dict[str, float]:
        """Return the values of the metrics with number `index`, and reset these metrics.

        `prefix` is the beginning of their names: the split, and "averaged-" for averaged weights.
        """
        values = {}
        for metrics in (self.metrics[index], self.added[index]):
            computed, reasons = compute(metrics)
            for name, value in computed.items():
                # A metric of several numbers to predict may have a value for each of them.
                values[f"{prefix}{name}"] = value.double().mean().item()
            self._warn_of_undefined({f"{prefix}{name}": reasons[name] for name in reasons})
        values |= self.values_of_training(prefix, values)
        self.metrics[index].reset()
        self.added[index].reset()
        return values

    def values_of_training(self, prefix: str, values: Mapping[str, float]) -> dict[str, float]:
        """Return metrics that depend on earlier evaluations, by full name; the default has none.

        `values` are those of this evaluation, by full name: `prefix` (the split, and "averaged-"
        for averaged weights) and the name of the metric. A task that remembers evaluations keeps
        them in its checkpoints (`on_save_checkpoint`).
        """
        return {}

    def _warn_of_undefined(self, reasons: dict[str, str]) -> None:
        """Say once for each metric why it is not defined on a split."""
        for name, reason in reasons.items():
            if name not in self.undefined_metrics:
                self.undefined_metrics.add(name)
                LOG.warning("%s is not defined, and NaN is recorded: %s", name, reason)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add the first loss, and the running means of all devices, which Lightning lacks."""
        self.late_losses.require_finite(waits=True)
        checkpoint["first_loss"] = self.first_loss
        for name, mean in self.train_means.items():
            if mean.update_called:
                with mean.sync_context():
                    checkpoint[f"train_{name}"] = {
                        "mean_value": mean.mean_value.cpu(),
                        "weight": mean.weight.cpu(),
                    }

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Restore the first loss, and the running means on the first device; others start at 0."""
        first_loss = checkpoint.get("first_loss")
        self._first_loss = None if first_loss is None else torch.tensor(first_loss)
        for name, mean in self.train_means.items():
            for entry, value in checkpoint.get(f"train_{name}", {}).items():
                restored = value if self.trainer.is_global_zero else torch.zeros_like(value)
                setattr(mean, entry, restored.to(self.device))
                mean.mark_updated()

    def _record(self, values: dict[str, float]) -> None:
        """Write values of the current step to the records and to all loggers at once."""
        # `self.log` writes after the hooks that save a checkpoint, so a cell stopped there would
        # lose the row. `current_epoch` is one too large after the last step.
        steps = int(self.trainer.num_training_batches) // self.trainer.accumulate_grad_batches
        epoch = (self.global_step - 1) // steps
        if self.write_rows is not None:
            self.write_rows(values, self.global_step, epoch)
        for logger in self.loggers:
            logger.log_metrics({"epoch": epoch, **values}, step=self.global_step)
        if not self.has_callbacks:
            return
        for name, value in values.items():
            if name != self.monitored:
                self.log(name, value, logger=False, sync_dist=True)

    def _extend_metrics(self) -> None:
        """Append the metrics of all splits, for the trained or the averaged weights."""
        self.metrics.extend(self.build_metrics(split) for split in self.splits)
        self.added.extend(self.added_metrics.clone() for _ in self.splits)
        # Lightning moves registered metrics to the device of this module.
        self.registered_metrics = nn.ModuleList([*self.metrics, *self.added])
        for metric in (*self.metrics, *self.added):
            use_float64(metric)

    def _evaluate_padding(self, batch: Any) -> None:
        """Call the networks as often as `validation_step` does, and change no metric."""
        with self.evaluation_context():
            self._predict(batch)
            if self.average is not None:
                with self.averaged_network(self.average):
                    self._predict(batch)

    def _predict(self, batch: Any) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Return the arguments of the task's metrics and those of the added metrics, if any."""
        evaluated = self.evaluate(batch)
        predictions = self.predictions(batch, evaluated) if self.added_metrics else ()
        return evaluated, predictions

    def _update(self, index: int, batch: Any) -> Tensor | None:
        """Update the metrics with number `index` and return the `unit_values` of the batch."""
        evaluated, predictions = self._predict(batch)
        update(self.metrics[index], evaluated)
        # A rank can have a batch of padding alone, which not every metric accepts.
        if predictions and predictions[0].numel():
            update(self.added[index], predictions)
        return self.unit_values(*evaluated)
