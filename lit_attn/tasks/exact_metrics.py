"""Metrics in float64, averages over classes, and values that are not defined.

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
from torchmetrics.classification import (
    MulticlassAUROC,
    MulticlassFBetaScore,
    MulticlassJaccardIndex,
    MulticlassLogAUC,
    MulticlassNegativePredictiveValue,
    MulticlassPrecision,
    MulticlassSpecificity,
)

NOT_FINITE = "it is not finite on these samples, for example because all targets are equal"

NEED_BOTH_LABELS = (MulticlassAUROC, MulticlassLogAUC)
"""Metrics of a class that need labels of this class and of others."""

DEFINED_BY_PREDICTIONS = (
    MulticlassFBetaScore,
    MulticlassNegativePredictiveValue,
    MulticlassPrecision,
    MulticlassSpecificity,
)
"""Metrics of a class that a prediction of this class defines, as it does the IoU."""


class UndefinedValueError(ValueError):
    """A metric has no value on these samples; the message says why."""


def widen(value: Any) -> Any:
    """Return a tensor of floating-point numbers in float64, and any other value as it is."""
    if isinstance(value, Tensor) and value.is_floating_point():
        return value.double()
    return value


def use_float64(metric: Metric | MetricCollection) -> None:
    """Keep the states of a metric in float64, also after a reset; counts stay integers."""
    # `Metric.set_dtype` would convert counts, too, and forget metrics in a metric.
    metric.to(torch.float64)


def update(metric: Metric | MetricCollection, arguments: Iterable[Any]) -> None:
    """Update a metric with float64 arguments."""
    metric.update(*(widen(argument) for argument in arguments))


def compute(metrics: Metric | MetricCollection) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the values by name, and by name the reason why a value is not defined.

    A metric has no value on some samples, such as R² of constant targets: the metrics of this
    package raise UndefinedValueError, those of torchmetrics ValueError, or their value is not
    finite. Such a value is NaN, so the other metrics are recorded. Another error of a metric is a
    mistake in it and is raised.
    """
    if isinstance(metrics, Metric):
        return metrics.compute(), {}
    values: dict[str, Tensor] = {}
    reasons: dict[str, str] = {}
    for name, metric in metrics.items():
        is_of_torchmetrics = type(metric).__module__.startswith("torchmetrics.")
        try:
            value = metric.compute()
        except ValueError as error:
            if not is_of_torchmetrics and not isinstance(error, UndefinedValueError):
                raise
            value = torch.tensor(torch.nan)
            reasons[str(name)] = " ".join(str(error).split())
        else:
            if is_of_torchmetrics and not value.isfinite().all():
                value = torch.tensor(torch.nan)
                reasons[str(name)] = NOT_FINITE
        values |= value if isinstance(value, dict) else {str(name): value}
    return values, reasons


class ClassMean(Metric):
    """Mean of a metric's values for each class, over the classes for which it is defined.

    A class that is neither a label nor predicted never counts, and neither does an ignored class.
    Without a label of a class, its recall and the area under its curve are not defined
    (torchmetrics counts them as 0), but its IoU, F1 and precision are 0 if it is predicted. Without
    another label, its specificity and AUROC are not defined. As in scikit-learn, the precision of a
    label that is never predicted is 0.
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
        is_defined = self._find_defined()
        with warnings.catch_warnings():
            # torchmetrics warns of the classes without samples, which are left out below.
            warnings.simplefilter("ignore", UserWarning)
            values: Tensor = self.per_class.compute()
        if values.numel() == 1:
            # The arguments chose a metric without classes, such as `task: binary`.
            return values
        if not is_defined.any():
            raise UndefinedValueError("it is defined for none of the classes that occur")
        return values[is_defined].mean()

    def reset(self) -> None:
        super().reset()
        self.per_class.reset()

    def _find_defined(self) -> Tensor:
        """Return True (classes,) for every class whose value counts in the mean."""
        is_label = self.counts > 0
        has_other_labels = self.counts < self.counts.sum()
        if isinstance(self.per_class, NEED_BOTH_LABELS):
            return is_label & has_other_labels
        predicted = self._count_predictions()
        if predicted is None:
            return is_label
        occurs = is_label | (predicted > 0)
        if self.ignored is not None and 0 <= self.ignored < len(occurs):
            occurs[self.ignored] = False
        if isinstance(self.per_class, MulticlassSpecificity):
            return occurs & has_other_labels
        return occurs

    def _count_predictions(self) -> Tensor | None:
        """Return how often each class is predicted, if the metric is defined without its labels."""
        metric = self.per_class
        if isinstance(metric, MulticlassJaccardIndex):
            with metric.sync_context():
                return metric.confmat.sum(0)
        if isinstance(metric, DEFINED_BY_PREDICTIONS) and metric.top_k == 1:
            with metric.sync_context():
                correct, wrong = metric.tp, metric.fp
            # Values of single samples are lists, and have no classes.
            assert isinstance(correct, Tensor)
            assert isinstance(wrong, Tensor)
            return correct + wrong
        return None


def clear_states(metrics: nn.Module) -> None:
    """Set the states of all metrics in `metrics` to those before an update, but for their shapes.

    A state that is a list of tensors keeps empty tensors of their types.
    """
    for metric in metrics.modules():
        if not isinstance(metric, Metric):
            continue
        initial = metric.clone()
        initial.reset()
        for name, default in initial.metric_state.items():
            state = getattr(metric, name)
            if isinstance(state, list):
                setattr(metric, name, [tensor[:0] for tensor in state])
            else:
                assert isinstance(default, Tensor)
                setattr(metric, name, default.to(state).expand_as(state).clone())
