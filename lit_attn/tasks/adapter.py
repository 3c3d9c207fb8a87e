"""Adapter that trains a LightningModule of a user as a task of this package.

The module computes the loss and logs numbers. The adapter averages these numbers over a split and
over all ranks, and does everything else as any other task.
"""

import inspect
import math
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torchmetrics import MeanMetric, Metric, MetricCollection

from lit_attn.config.optimizers import Optimizer
from lit_attn.config.schedules import Rate
from lit_attn.config.tasks import ModuleTaskConfig
from lit_attn.data.module import DataModule
from lit_attn.schema.base import OwnClass
from lit_attn.schema.errors import ConfigError
from lit_attn.schema.plugins import explain_failure
from lit_attn.tasks.base import TaskModule


def load_class(config: OwnClass) -> type[L.LightningModule]:
    """Return the class; ConfigError if it is no LightningModule that can be built and trained."""
    module_class = config.load()
    target = config.target
    for name in ("training_step", "validation_step"):
        if getattr(module_class, name) is getattr(L.LightningModule, name):
            raise ConfigError(f"{target} does not define {name}")
    if module_class.configure_optimizers is not L.LightningModule.configure_optimizers:
        raise ConfigError(
            f"{target} defines configure_optimizers, but `optimizer` and `schedule` of the "
            "experiment train it; remove the method"
        )
    try:
        inspect.signature(module_class).bind(None, **config.arguments)
    except TypeError as error:
        raise ConfigError(f"arguments: {target}: {error}") from error
    return module_class


class Adapter(TaskModule):
    """Task whose `network` is the user's LightningModule, with the network inside.

    All parameters of the module are trained and averaged. Of its hooks only `training_step`,
    `validation_step` and `forward` are called.
    """

    network: L.LightningModule
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

    def build_metrics(self, split: str) -> MetricCollection:
        return MetricCollection({name: LoggedMean(name) for name in self.measures})

    def loss(self, batch: Any) -> Tensor:
        """Return the loss of `training_step`, which may return a dictionary with it."""
        returned: Any = self.network.training_step(batch, self.trainer.fit_loop.batch_idx)
        if isinstance(returned, dict):
            return returned["loss"]
        return returned

    def evaluate(self, batch: Any) -> tuple[Any, ...]:
        """Return the logged numbers, the size of the batch, and what `validation_step` returns."""
        self.logged.clear()
        returned = self.network.validation_step(batch, 0)
        missing = sorted(set(self.measures) - self.logged.keys())
        if missing:
            raise ConfigError(f"task: validation_step does not log '{missing[0]}' of `measures`")
        for name in self.measures:
            if isinstance(self.logged[name], Metric):
                raise ConfigError(
                    f"task: '{name}' is a metric; log a number, or add the metric to `metrics`"
                )
        values = batch.values() if isinstance(batch, dict) else batch
        # Every tensor of a batch has the samples as its first axis.
        samples = next(len(value) for value in values if isinstance(value, Tensor))
        return dict(self.logged), samples, returned

    def predictions(self, batch: Any, evaluated: tuple[Any, ...]) -> tuple[Tensor, ...]:
        """Return the predictions and targets that `validation_step` has returned."""
        *_, returned = evaluated
        if not isinstance(returned, tuple):
            raise ConfigError("metrics: validation_step has to return predictions and targets")
        return returned


class LoggedMean(MeanMetric):
    """Mean over samples of the number that a module logs as `name`, in float64."""

    def __init__(self, name: str) -> None:
        # Not "disable", which ignores the weights.
        super().__init__(nan_strategy=math.nan)
        self.name = name
        self.set_dtype(torch.float64)

    def update(self, logged: Any, samples: Any = None, _: Any = None) -> None:
        """Add the number of a batch of so many samples."""
        super().update(float(logged[self.name]), samples)
