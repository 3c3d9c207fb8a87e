"""Adapter that trains a LightningModule of a user as a task of this package.

The module computes the loss and logs values. The adapter averages these values over a split and
over all ranks, and does everything else as any other task.
"""

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection

from lit_attn.config.optimizers import Optimizer
from lit_attn.config.schedules import Rate
from lit_attn.config.tasks import ModuleTaskConfig
from lit_attn.data.module import DataModule
from lit_attn.schema.base import load
from lit_attn.schema.errors import ConfigError
from lit_attn.tasks.base import TaskModule


def require_steps(target: str) -> None:
    """Raise ConfigError if the class `target` is no LightningModule that the adapter can train."""
    module_class = load(target)
    if not (isinstance(module_class, type) and issubclass(module_class, L.LightningModule)):
        raise ConfigError(f"{target} is not a subclass of lightning.LightningModule")
    if issubclass(module_class, TaskModule):
        return
    for name in ("training_step", "validation_step"):
        if getattr(module_class, name) is getattr(L.LightningModule, name):
            raise ConfigError(f"{target} does not define {name}")
    if module_class.configure_optimizers is not L.LightningModule.configure_optimizers:
        raise ConfigError(
            f"{target} defines configure_optimizers, which is not called: `optimizer` and "
            "`schedule` of the experiment train it. Remove the method"
        )


def build(
    config: ModuleTaskConfig, network: nn.Module, data: DataModule, optimizer: Optimizer, rate: Rate
) -> TaskModule:
    """Return the task for the class that `config` names.

    A subclass of TaskModule is called with (network, data, optimizer, rate) and the arguments, any
    other LightningModule with the network and the arguments.
    """
    require_steps(config.target)
    module_class = load(config.target)
    if issubclass(module_class, TaskModule):
        task: TaskModule = module_class(network, data, optimizer, rate, **config.arguments)
        return task
    return Adapter(
        module_class(network, **config.arguments), data, optimizer, rate, config.measures
    )


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
        if not module.automatic_optimization:
            raise ConfigError("task: automatic_optimization has to be True")
        self.measures = measures
        self.logged: dict[str, Any] = {}
        super().__init__(module, data, optimizer, rate)
        logged = self.logged

        # Functions and not methods: the average of the weights is a deep copy of the module, which
        # has to log to the same dictionary.
        def log(name: str, value: Any, *_: Any, batch_size: int | None = None, **__: Any) -> None:
            logged[name] = (value, batch_size)

        def log_dict(values: Any, *_: Any, batch_size: int | None = None, **__: Any) -> None:
            logged.update({name: (value, batch_size) for name, value in values.items()})

        vars(module).update(log=log, log_dict=log_dict)

    def build_metrics(self, split: str) -> "LoggedValues":
        return LoggedValues(self.measures, self.network)

    def metric_names(self, split: str) -> list[str]:
        return list(self.measures)

    def loss(self, batch: Any) -> Tensor:
        """Return the loss of `training_step`, which may return a dictionary with it."""
        returned: Any = self.network.training_step(batch, self.trainer.fit_loop.batch_idx)
        self.logged.clear()
        loss: Tensor = returned["loss"] if isinstance(returned, dict) else returned
        return loss

    def evaluate(self, batch: Any) -> tuple[Tensor, ...]:
        """Return what `validation_step` returns: predictions and targets for added metrics."""
        returned: Any = self.network.validation_step(batch, 0)
        return returned if isinstance(returned, tuple) else ()

    def _update(self, index: int, batch: Any) -> None:
        split = self._split_metrics(index)
        assert isinstance(split.task_metrics, LoggedValues)
        self.logged.clear()
        with split.task_metrics.replace_metrics(self.network):
            returned = self.evaluate(batch)
        if missing := [name for name in self.measures if name not in self.logged]:
            raise ConfigError(
                f"task: validation_step does not log '{missing[0]}', which `measures` names"
            )
        split.task_metrics.update(self.logged, _count_samples(batch))
        if self.added_metrics:
            if not returned:
                raise ConfigError(
                    "metrics: validation_step has to return predictions and targets, a tuple"
                )
            split.added.update(*returned)


class LoggedValues(Metric):
    """Values that a module logs: means over samples, and the module's metrics at their end.

    The metrics are copies of those of `module`, so splits and averaged weights do not mix.
    """

    totals: Tensor
    samples: Tensor

    def __init__(self, names: tuple[str, ...], module: nn.Module) -> None:
        super().__init__()
        self.names = names
        self.paths = [
            name
            for name, child in module.named_modules()
            if isinstance(child, Metric | MetricCollection)
            and not isinstance(module.get_submodule(name.rpartition(".")[0]), MetricCollection)
        ]
        metrics = [module.get_submodule(path) for path in self.paths]
        self.copies = nn.ModuleList(copy.deepcopy(metrics))
        self.logged_metrics: dict[str, Metric] = {}
        for state in ("totals", "samples"):
            zeros = torch.zeros(len(names), dtype=torch.float64)
            self.add_state(state, zeros, dist_reduce_fx="sum")

    @contextlib.contextmanager
    def replace_metrics(self, module: nn.Module) -> Iterator[None]:
        """Use the copies as the metrics of `module` inside the context."""
        originals = [module.get_submodule(path) for path in self.paths]
        for path, copied in zip(self.paths, self.copies, strict=True):
            module.set_submodule(path, copied)
        try:
            yield
        finally:
            for path, original in zip(self.paths, originals, strict=True):
                module.set_submodule(path, original)

    def update(self, logged: dict[str, Any], samples: int) -> None:
        """Add logged (value, number of samples or None), of a batch of `samples`."""
        for number, name in enumerate(self.names):
            value, size = logged[name]
            if isinstance(value, Metric):
                self.logged_metrics[name] = value
            else:
                self.totals[number] += float(value) * (size or samples)
                self.samples[number] += size or samples

    def compute(self) -> dict[str, Tensor]:
        means = dict(zip(self.names, self.totals / self.samples, strict=True))
        return means | {name: value.compute() for name, value in self.logged_metrics.items()}

    def reset(self) -> None:
        super().reset()
        for copied in self.copies:
            assert isinstance(copied, Metric | MetricCollection)
            copied.reset()


def _count_samples(batch: Any) -> int:
    """Return the length of the first tensor of a batch."""
    values = batch.values() if isinstance(batch, dict) else batch
    return next(len(value) for value in values if isinstance(value, Tensor))
