"""Metrics in float64, averages over the classes that occur, and values that are not defined.

Many metrics of torchmetrics are differences of large sums: R² of targets around 10,000 is 0.0 in
float32 and right in float64. So every metric of a task and of `metrics` gets float64 arguments and
keeps float64 states.
"""

import warnings
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection

from lit_attn.private_names.of_torchmetrics import convert_states, default_states


def widen(value: Any) -> Any:
    """Return a tensor of floating-point numbers in float64, and any other value as it is."""
    if isinstance(value, Tensor) and value.is_floating_point():
        return value.double()
    return value


def use_float64(metric: Metric | MetricCollection) -> None:
    """Keep the states of a metric in float64, also after a reset; counts stay integers."""
    # `Metric.set_dtype` would convert counts, too, and forget metrics in a metric.
    convert_states(metric, widen)


def update(metric: Metric | MetricCollection, arguments: Iterable[Any]) -> None:
    """Update a metric with float64 arguments."""
    metric.update(*(widen(argument) for argument in arguments))


def compute(metrics: Metric | MetricCollection) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the values by name, and by name the reason why a value is not defined.

    torchmetrics raises ValueError for samples on which a metric has no value, such as R² of one
    sample. Such a value is NaN, so the other metrics are recorded. An error of a metric from
    elsewhere is a mistake in it and is raised.
    """
    if isinstance(metrics, Metric):
        return metrics.compute(), {}
    values: dict[str, Tensor] = {}
    reasons: dict[str, str] = {}
    for name, metric in metrics.items():
        try:
            value = metric.compute()
        except ValueError as error:
            if not type(metric).__module__.startswith("torchmetrics."):
                raise
            value = torch.tensor(torch.nan)
            reasons[str(name)] = " ".join(str(error).split())
        values |= value if isinstance(value, dict) else {str(name): value}
    return values, reasons


class ClassMean(Metric):
    """Mean of a metric's values for each class, over the classes that have samples.

    A class without samples has no recall and no area under a curve. torchmetrics counts the area as
    0, and the recall as 0 if the class was predicted once.
    """

    counts: Tensor

    def __init__(self, per_class: Metric, classes: int, ignored: int | None) -> None:
        """Take a metric that computes (classes,) values; labels `ignored` are not counted."""
        super().__init__()
        self.per_class = per_class
        self.ignored = ignored
        self.add_state("counts", torch.zeros(classes, dtype=torch.int64), dist_reduce_fx="sum")

    def update(self, predictions: Tensor, labels: Tensor) -> None:
        self.per_class.update(predictions, labels)
        counted = labels if self.ignored is None else labels[labels != self.ignored]
        self.counts += torch.bincount(counted.flatten(), minlength=len(self.counts))

    def compute(self) -> Tensor:
        with warnings.catch_warnings():
            # torchmetrics warns of the classes without samples, which are left out below.
            warnings.simplefilter("ignore", UserWarning)
            values: Tensor = self.per_class.compute()
        if values.numel() == 1:
            # The arguments chose a metric without classes, such as `task: binary`.
            return values
        return values[self.counts > 0].mean()

    def reset(self) -> None:
        super().reset()
        self.per_class.reset()


def clear_states(metrics: nn.Module) -> None:
    """Set the states of all metrics in `metrics` to those before an update, but for their shapes.

    A state that is a list of tensors keeps empty tensors of their types.
    """
    for metric in metrics.modules():
        if not isinstance(metric, Metric):
            continue
        for name, default in default_states(metric).items():
            state = getattr(metric, name)
            if isinstance(state, list):
                setattr(metric, name, [tensor[:0] for tensor in state])
            else:
                assert isinstance(default, Tensor)
                setattr(metric, name, default.to(state).expand_as(state).clone())
