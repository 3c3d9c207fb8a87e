"""Adapter that trains a LightningModule of a user as a task of this package.

The module computes the loss and logs numbers. The adapter averages these numbers over a split and
over all ranks, and does everything else as any other task.
"""

from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torchmetrics import Metric

from lit_attn.config.optimizers import Optimizer
from lit_attn.config.schedules import Rate
from lit_attn.config.tasks import ModuleTaskConfig
from lit_attn.data.module import DataModule
from lit_attn.schema.base import load
from lit_attn.schema.errors import ConfigError
from lit_attn.tasks.base import TaskModule


def load_class(target: str) -> type[L.LightningModule]:
    """Return the class `target`; ConfigError if it is no LightningModule that can be trained."""
    module_class = load(target)
    if not (isinstance(module_class, type) and issubclass(module_class, L.LightningModule)):
        raise ConfigError(f"{target} is not a subclass of lightning.LightningModule")
    for name in ("training_step", "validation_step"):
        if getattr(module_class, name) is getattr(L.LightningModule, name):
            raise ConfigError(f"{target} does not define {name}")
    is_changed = module_class.configure_optimizers is not L.LightningModule.configure_optimizers
    if is_changed and not issubclass(module_class, TaskModule):
        raise ConfigError(
            f"{target} defines configure_optimizers, but `optimizer` and `schedule` of the "
            "experiment train it; remove the method"
        )
    return module_class


def build(
    config: ModuleTaskConfig, network: nn.Module, data: DataModule, optimizer: Optimizer, rate: Rate
) -> TaskModule:
    """Return the task for the class that `config` names.

    A subclass of TaskModule is called with (network, data, optimizer, rate) and the arguments, any
    other LightningModule with the network and the arguments.
    """
    module_class: Any = load_class(config.target)
    if issubclass(module_class, TaskModule):
        task: TaskModule = module_class(network, data, optimizer, rate, **config.arguments)
        return task
    module = module_class(network, **config.arguments)
    return Adapter(module, data, optimizer, rate, config.measures)


class Adapter(TaskModule):
    """Task whose `network` is the user's LightningModule, with the network inside.

    All parameters of the module are trained and averaged. Of its hooks only `training_step`,
    `validation_step` and `forward` are called.
    """

    network: L.LightningModule

    def __init__(
        self,
        module: L.LightningModule,
        data: DataModule,
        optimizer: Optimizer,
        rate: Rate,
        measures: tuple[str, ...],
    ) -> None:
        self.measures = measures
        super().__init__(module, data, optimizer, rate)
        logged: dict[str, Any] = {}

        # Functions and not methods: the average of the weights is a deep copy of the module, which
        # has to log to the same dictionary.
        def log(name: str, value: Any, *_: Any, **__: Any) -> None:
            logged[name] = value

        def log_dict(values: Any, *_: Any, **__: Any) -> None:
            logged.update(values)

        vars(module).update(log=log, log_dict=log_dict)
        self.logged = logged

    def build_metrics(self, split: str) -> "LoggedNumbers":
        return LoggedNumbers(self.measures)

    def metric_names(self, split: str) -> list[str]:
        return list(self.measures)

    def loss(self, batch: Any) -> Tensor:
        """Return the loss of `training_step`, which may return a dictionary with it."""
        returned: Any = self.network.training_step(batch, self.trainer.fit_loop.batch_idx)
        loss: Tensor = returned["loss"] if isinstance(returned, dict) else returned
        return loss

    def evaluate(self, batch: Any) -> tuple[Any, ...]:
        """Return the logged numbers, the size of the batch, and what `validation_step` returns."""
        self.logged.clear()
        returned = self.network.validation_step(batch, 0)
        for name in self.measures:
            if name not in self.logged:
                raise ConfigError(f"task: validation_step does not log '{name}' of `measures`")
            if isinstance(self.logged[name], Metric):
                raise ConfigError(
                    f"task: '{name}' is a metric; log a number, or add the metric to `metrics`"
                )
        numbers = [float(self.logged[name]) for name in self.measures]
        values = batch.values() if isinstance(batch, dict) else batch
        samples = next(len(value) for value in values if isinstance(value, Tensor))
        return numbers, samples, returned

    def predictions(self, batch: Any, evaluated: tuple[Any, ...]) -> tuple[Tensor, ...]:
        """Return the predictions and targets that `validation_step` has returned."""
        *_, returned = evaluated
        if not isinstance(returned, tuple):
            raise ConfigError("metrics: validation_step has to return predictions and targets")
        return returned


class LoggedNumbers(Metric):
    """Means over samples of the numbers that a module logs, by name."""

    totals: Tensor
    samples: Tensor

    def __init__(self, names: tuple[str, ...]) -> None:
        super().__init__()
        self.names = names
        zeros = torch.zeros(len(names), dtype=torch.float64)
        self.add_state("totals", zeros, dist_reduce_fx="sum")
        self.add_state("samples", torch.tensor(0), dist_reduce_fx="sum")

    def update(self, numbers: list[float], samples: int, _: Any) -> None:
        """Add the means of a batch of `samples`."""
        self.totals += samples * self.totals.new_tensor(numbers)
        self.samples += samples

    def compute(self) -> dict[str, Tensor]:
        return dict(zip(self.names, self.totals / self.samples, strict=True))
