"""Adapter that trains a LightningModule of a user as a task of this package.

The module computes the loss and logs numbers. The adapter averages these numbers over a split and
over all ranks, and does everything else as any other task.
"""

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import lightning as L
import torch
from torch import Tensor, nn
from torchmetrics import MeanMetric, Metric, MetricCollection

from lit_attn.data.module import DataModule
from lit_attn.optim.base import Optimizer
from lit_attn.optim.schedules import Rate
from lit_attn.schema.base import OwnClass
from lit_attn.schema.errors import ConfigError
from lit_attn.schema.plugins import explain_failure
from lit_attn.tasks.own_hooks import HookCaller, check_hooks, require_plain_state
from lit_attn.tasks.task import ModuleTaskConfig

STATE = "own_module"
"""Key of a checkpoint with what the module's on_save_checkpoint has stored."""

POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def load_class(config: OwnClass) -> type[L.LightningModule]:
    """Return the class; ConfigError if it is no LightningModule that can be built and trained."""
    module_class = config.load()
    target = config.target
    check_hooks(module_class, target)
    try:
        inspect.signature(module_class).bind(None, **config.arguments)
    except TypeError as error:
        raise ConfigError(f"arguments: {target}: {error}") from error
    return module_class


class Adapter(HookCaller):
    """Task whose `network` is the user's LightningModule, with the network inside.

    All parameters of the module are trained and averaged. The evaluation of one split is one
    validation epoch of the module. A number that it logs in on_validation_epoch_end replaces the
    mean of the numbers that validation_step logs under the same name.
    """

    network_methods = ("training_step", "validation_step")

    def __init__(
        self,
        config: ModuleTaskConfig,
        network: nn.Module,
        data: DataModule,
        optimizer: Optimizer,
        rate: Rate,
    ) -> None:
        try:
            module = load_class(config)(network, **config.arguments)
        except Exception as error:
            # A constructor of the user can raise any exception.
            raise ConfigError(f"task: {explain_failure(error, config.target)}") from error
        if not module.automatic_optimization:
            raise ConfigError(
                f"task: {config.target} sets automatic_optimization to False, but `optimizer` and "
                "`schedule` of the experiment train it; return the loss from training_step"
            )
        self.measures = config.measures
        super().__init__(module, data, optimizer, rate)
        logged: dict[str, Any] = {}

        def log(name: str, value: Any, *_: Any, **__: Any) -> None:
            logged[name] = value

        def log_dict(values: Any, *_: Any, **__: Any) -> None:
            logged.update(values)

        # Functions and not methods: the average of the weights is a deep copy of the module, which
        # has to log to the same dictionary.
        vars(module).update(log=log, log_dict=log_dict)
        self.logged = logged
        self.further_outputs: dict[str, Any] = {}
        self.place = EvaluationPlace()
        self.evaluations: list[StepEvaluation] = []
        self.split_totals: list[SplitTotal] = []

    def build_metrics(self, split: str) -> MetricCollection:
        # Groups would join two names that are equal in the first batch.
        means = {name: LoggedMean(name) for name in self.measures}
        return MetricCollection(dict(means), compute_groups=False)

    def loss(self, batch: Any) -> Tensor:
        """Return the loss of `training_step`, which may return a dictionary with it."""
        self.logged.clear()
        returned: Any = call_step(
            self.network.training_step, batch, self.trainer.fit_loop.batch_idx
        )
        self.logged_in_step = self._read_numbers()
        outputs = returned if isinstance(returned, dict) else {"loss": returned}
        loss = outputs.get("loss")
        if not isinstance(loss, Tensor):
            raise ConfigError(
                f"task: training_step returns {type(loss).__name__} instead of a loss; every step "
                "trains, so return a tensor"
            )
        self.further_outputs = {name: value for name, value in outputs.items() if name != "loss"}
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_index: int) -> None:
        # The module gets what its training_step has returned, with the loss of Lightning.
        self.network.on_train_batch_end({**self.further_outputs, **outputs}, batch, batch_index)
        super().on_train_batch_end(outputs, batch, batch_index)

    def on_train_epoch_end(self) -> None:
        """Call the module's hook, and write the numbers that it logs as `train/NAME`."""
        self.logged.clear()
        super().on_train_epoch_end()
        values = {f"train/{name}": float(value) for name, value in self._read_numbers().items()}
        if not values:
            return
        for logger in self.loggers:
            logger.log_metrics(values, step=self.global_step)

    def _read_numbers(self) -> dict[str, Any]:
        """Return a copy of the numbers that a hook of the training has logged, but for the loss.

        The cell records the loss itself. Raises ConfigError for a value that is not one number.
        """
        numbers = {name: value for name, value in self.logged.items() if name != "loss"}
        for name, value in numbers.items():
            is_number = isinstance(value, int | float)
            if not is_number and not (isinstance(value, Tensor) and value.numel() == 1):
                raise ConfigError(
                    f"task: self.log: '{name}' is of type {type(value).__name__}; in the training "
                    "log a number or a tensor with one element, for example metric.compute()"
                )
        return numbers

    def on_validation_batch_start(
        self, batch: Any, batch_index: int, dataloader_idx: int = 0
    ) -> None:
        """Begin a split before its first batch, then call the module's hook."""
        self.place = EvaluationPlace(batch_index, dataloader_idx)
        self.evaluations = []
        if batch_index == 0:
            self.split_totals = [SplitTotal() for _ in self.evaluated_modules()]
            for module in self.evaluated_modules():
                module.on_validation_epoch_start()
        if self._count_samples():
            for module in self.evaluated_modules():
                module.on_validation_batch_start(batch, batch_index, dataloader_idx)

    def evaluate(self, batch: Any) -> tuple[Any, ...]:
        """Return the logged numbers, the size of the batch, and what `validation_step` returns."""
        self.logged.clear()
        returned = call_step(
            self.network.validation_step, batch, self.place.batch_index, self.place.split
        )
        logged = self._read_logged()
        samples = self._count_samples()
        self.evaluations.append(StepEvaluation(logged, samples, returned))
        return logged, samples, returned

    def _count_samples(self) -> int:
        """Return the samples of the evaluated batch, without the rows that fill the last batch."""
        assert self.trainer.val_dataloaders is not None
        loader = self.trainer.val_dataloaders[self.place.split]
        count: int = loader.count_samples(self.place.batch_index)
        return count

    def predictions(self, batch: Any, evaluated: tuple[Any, ...]) -> tuple[Tensor, ...]:
        """Return the predictions and targets that `validation_step` has returned."""
        *_, returned = evaluated
        if not isinstance(returned, tuple):
            raise ConfigError("metrics: validation_step has to return predictions and targets")
        return returned

    def on_validation_batch_end(
        self, outputs: Any, batch: Any, batch_index: int, dataloader_idx: int = 0
    ) -> None:
        """Call the module's hook, then end a split after its last batch."""
        if self._count_samples():
            for module, step, total in zip(
                self.evaluated_modules(), self.evaluations, self.split_totals, strict=True
            ):
                total.add(step)
                module.on_validation_batch_end(step.returned, batch, batch_index, dataloader_idx)
        if batch_index + 1 == self.trainer.num_val_batches[dataloader_idx]:
            self._end_split()

    def _end_split(self) -> None:
        """Call `on_validation_epoch_end` and record the numbers that it logs."""
        for number, module in enumerate(self.evaluated_modules()):
            total = self.split_totals[number]
            self.logged.clear()
            with self.evaluation_context():
                module.on_validation_epoch_end()
            logged = self._read_logged()
            metrics = self.metrics[number * len(self.splits) + self.place.split]
            assert isinstance(metrics, MetricCollection)
            for name in self.measures:
                if name in logged:
                    # A process without samples has computed its number from nothing.
                    value = logged[name] if total.samples > 0 else 0.0
                    metrics[name].reset()
                    metrics[name].update({name: value}, total.samples)
                elif name in total.unlogged(self.measures):
                    raise ConfigError(
                        f"task: validation_step does not log '{name}' of `measures`, and neither "
                        "does on_validation_epoch_end"
                    )

    def _read_logged(self) -> dict[str, Any]:
        """Return a copy of the logged numbers; ConfigError if a measure is a metric."""
        for name in self.measures:
            if isinstance(self.logged.get(name), Metric):
                raise ConfigError(
                    f"task: '{name}' is a metric; log a number, or add the metric to `metrics`"
                )
        return dict(self.logged)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add what the module's hook writes into an empty dictionary.

        Raises ConfigError if it has other values than numbers, texts, tensors and containers of
        them: checkpoints are loaded without unpickling objects.
        """
        super().on_save_checkpoint(checkpoint)
        state: dict[str, Any] = {}
        self.network.on_save_checkpoint(state)
        require_plain_state(state, "task: on_save_checkpoint")
        checkpoint[STATE] = state

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Call the module's hook with the dictionary that its other hook has filled."""
        super().on_load_checkpoint(checkpoint)
        self.network.on_load_checkpoint(checkpoint.get(STATE, {}))


class EvaluationPlace(NamedTuple):
    """Number of an evaluation batch in its split, and number of the split."""

    batch_index: int = 0
    split: int = 0


class StepEvaluation(NamedTuple):
    """Logged numbers of one validation_step, samples of its batch, and what it has returned."""

    logged: dict[str, Any]
    samples: int
    returned: Any


@dataclass
class SplitTotal:
    """Samples of a split on this process, and the names that all its steps have logged."""

    samples: int = 0
    common_names: set[str] | None = None

    def add(self, step: StepEvaluation) -> None:
        """Count one step."""
        self.samples += step.samples
        names = set(step.logged)
        self.common_names = names if self.common_names is None else self.common_names & names

    def unlogged(self, measures: tuple[str, ...]) -> set[str]:
        """Return the measures that a step has not logged; none if there was no step."""
        return set() if self.common_names is None else set(measures) - self.common_names


def call_step(step: Callable[..., Any], batch: Any, batch_index: int, split: int = 0) -> Any:
    """Call training_step or validation_step with those of the arguments that it takes.

    Raises RuntimeError if it raises StopIteration, which Lightning would take for the end of data.
    """
    parameters = inspect.signature(step).parameters
    positional = [name for name, value in parameters.items() if value.kind in POSITIONAL]
    is_starred = any(value.kind is value.VAR_POSITIONAL for value in parameters.values())
    arguments = [batch]
    if len(positional) > 1 or is_starred:
        arguments.append(batch_index)
    named = {"dataloader_idx": split} if "dataloader_idx" in parameters else {}
    try:
        return step(*arguments, **named)
    except StopIteration as error:
        raise RuntimeError(f"{step.__name__} raised StopIteration") from error


class LoggedMean(MeanMetric):
    """Mean over samples of the number that a module logs as `name`, in float64."""

    def __init__(self, name: str) -> None:
        # Not "disable", which ignores the weights.
        super().__init__(nan_strategy=math.nan)
        self.name = name
        self.set_dtype(torch.float64)

    def update(self, logged: Any, samples: Any = None, _: Any = None) -> None:
        """Add the number of so many samples, if it is logged."""
        if self.name in logged:
            super().update(float(logged[self.name]), samples)
