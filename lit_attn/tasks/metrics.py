"""Metrics of an experiment, known without reading data or building a network.

A metric's name is `<split>/<name>`, and `<split>/averaged-<name>` for averaged weights. A task has
metrics of its own (lit_attn.tasks.task); `metrics:` of an experiment adds others.
"""

import inspect
import re
import warnings
from abc import abstractmethod
from collections.abc import Sequence
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, Protocol

import torch
from pydantic import Field, FiniteFloat
from torch import Tensor

from lit_attn.cells.records import Metric, StudyPairs
from lit_attn.schema.base import Config, Kind
from lit_attn.schema.errors import suggest
from lit_attn.schema.mistakes import is_unexpected
from lit_attn.schema.own_classes import import_class
from lit_attn.schema.plugins import explain_failure, find_user_line

if TYPE_CHECKING:
    import torchmetrics

SAMPLE_CLASSES = 100  # Largest number of classes with which a metric is tried before a run.
PACKAGES = (
    "torchmetrics",
    "torchmetrics.classification",
    "torchmetrics.clustering",
    "torchmetrics.nominal",
    "torchmetrics.regression",
    "torchmetrics.segmentation",
    "torchmetrics.text",
    "lit_attn.tasks.square_metrics",
)
"""Modules of the metrics; classes of later modules replace those of earlier ones."""
SHARE = re.compile(
    "Accuracy|AUROC|CalibrationError|Dice|EER|ErrorRate|ExactMatch|F1|FBeta|Hamming|HitRate|IoU|"
    "Jaccard|Precision|PredictiveValue|RankingLoss|Recall|Sensitivity|Specificity"
)
"""Names of the classes of torchmetrics that compute a share; others have its bounds, too."""
Goal = Literal["max", "min"]
GOALS: dict[bool | None, Goal] = {True: "max", False: "min"}
"""Better direction by `higher_is_better` of a metric."""
GOAL_CORRECTIONS: dict[str, Goal] = {"DaviesBouldinScore": "min", "WordInfoPreserved": "max"}
"""Better direction of the metrics for which `higher_is_better` of torchmetrics is wrong."""


class MetricInfo(NamedTuple):
    """Name of a metric without its split, and how tables print it.

    `label` heads the column, `scale` turns the logged value into the printed one, and `goal` says
    which direction is better, None if the metric does not say. A `*` at the end stands for names
    that only the files know. `event` makes it the time until an event, in training steps, and names
    the event in tables ("solved"); a run without the event has all of its planned steps. `best` is
    the best possible value as logged, None if there is none that a model can reach.
    """

    name: str
    label: str
    scale: float = 1.0
    goal: Goal | None = "min"
    event: str = ""
    best: float | None = None

    def match(self, name: str) -> "MetricInfo | None":
        """Return this metric with the label for `name`, or None if `name` is another metric."""
        if name == self.name:
            return self
        prefix = self.name.removesuffix("*")
        is_pattern = prefix != self.name
        if not is_pattern or not name.startswith(prefix):
            return None
        label = self.label.replace("*", name.removeprefix(prefix))
        return self._replace(name=name, label=label)


def percent(name: str, label: str, goal: Goal | None = "max") -> MetricInfo:
    """Return a metric that is logged as a fraction and printed in percent."""
    best = None if goal is None else float(goal == "max")
    return MetricInfo(name, f"{label} (%)", 100.0, goal, best=best)


Form = Literal["probabilities", "classes", "values"]


class Outputs(NamedTuple):
    """Form of a task's predictions and targets, the arguments of `update` of an added metric.

    *probabilities*: (N, classes) and labels (N,); *classes*: predicted classes (N,) and labels
    (N,); *values*: predicted values and targets, both (N, size), or (N,) for one value. Samples,
    tokens and pixels that do not count are left out.
    """

    form: Form
    size: int

    def sample(self) -> tuple[Tensor, Tensor]:
        """Return predictions and targets of eight samples, of at most SAMPLE_CLASSES classes."""
        if self.form == "values":
            shape = (8,) if self.size == 1 else (8, self.size)
            values = torch.linspace(0, 1, 8 * self.size).view(shape)
            return values, values.flip(0)
        classes = min(self.size, SAMPLE_CLASSES)
        labels = torch.arange(8) % classes
        predicted = labels.flip(0)
        if self.form == "classes":
            return predicted, labels
        return torch.eye(classes)[predicted].add(0.1).softmax(1), labels


class AddedMetric(Kind):
    """Family of the metrics that an experiment measures beside those of its task."""

    default_kind: ClassVar[str] = "torchmetrics"

    @abstractmethod
    def build(self, outputs: Outputs | None) -> "torchmetrics.Metric":
        """Return the metric of one split; its `compute` returns a scalar.

        Its `update` takes the predictions and targets that `outputs` describes, or, if a task
        declares no `outputs`, whatever the task's `evaluate` returns.
        """

    @abstractmethod
    def info(self, outputs: Outputs | None) -> MetricInfo:
        """Return the metric's name, heading, factor and direction.

        Raises ValueError if the metric cannot be measured on such outputs.
        """


class TorchMetric(AddedMetric, kind="torchmetrics"):
    """A metric of torchmetrics, or a `torchmetrics.Metric` of your own (docs/own-tasks.md).

    A share of torchmetrics is printed in percent (accuracy, F1, AUROC, calibration error, ...), and
    so is a class of yours with `plot_lower_bound` 0 and `plot_upper_bound` 1. `higher_is_better` of
    the class is its direction.
    """

    name: str = Field(description="class of torchmetrics, or `mine:MyMetric` of mine.py")
    arguments: dict[str, Any] = Field(
        {}, description="arguments of the class; `num_classes` follows from the data"
    )
    record_as: str | None = Field(
        None, pattern=r"^[A-Za-z][\w-]*$", description="name in results; null: that of the class"
    )

    def build(self, outputs: Outputs | None) -> "torchmetrics.Metric":
        from lit_attn.tasks.exact_metrics import ClassMean

        metric_class = _find_class(self.name)
        is_mean = _find_argument(metric_class, "average", self.arguments) == "macro"
        has_classes = outputs is not None and outputs.form != "values"
        if outputs is None or not has_classes or not is_mean or _is_own_class(self.name):
            return self.build_as_written(outputs)
        per_class = self._make(metric_class, outputs, {"average": "none"})
        return ClassMean(per_class, outputs.size, self.arguments.get("ignore_index"))

    def build_as_written(self, outputs: Outputs | None) -> "torchmetrics.Metric":
        """Return the metric of the class and the arguments; its mean covers all classes."""
        return self._make(_find_class(self.name), outputs, {})

    def _make(
        self, metric_class: Any, outputs: Outputs | None, changes: dict[str, Any]
    ) -> "torchmetrics.Metric":
        """Return the metric of a class with the arguments, of which `changes` differ."""
        arguments = self.arguments | changes
        has_classes = outputs is not None and outputs.form != "values"
        if outputs is not None and has_classes and _has_argument(metric_class, "num_classes"):
            arguments.setdefault("num_classes", outputs.size)
        return metric_class(**arguments)

    def info(self, outputs: Outputs | None) -> MetricInfo:
        return _describe(type(self), self.model_dump_json(), outputs)


def _has_argument(metric_class: Any, name: str) -> bool:
    """Return True if the constructor of a metric has the argument `name`."""
    for constructor in (metric_class.__init__, metric_class.__new__):
        if name in inspect.signature(constructor).parameters:
            return True
    return False


def _find_argument(metric_class: Any, name: str, written: dict[str, Any]) -> Any:
    """Return the value of an argument, written or the default; None without such an argument."""
    for constructor in (metric_class.__init__, metric_class.__new__):
        parameter = inspect.signature(constructor).parameters.get(name)
        if parameter is not None:
            return written.get(name, parameter.default)
    return None


@cache
def _describe(member: type[TorchMetric], text: str, outputs: Outputs | None) -> MetricInfo:
    """Return the info of the member with the JSON `text`; cached, because it builds the metric."""
    config = member.model_validate_json(text)
    _find_class(config.name)
    metric = _build_and_try(config, outputs)
    name = config.record_as or config.name.rpartition(":")[2]
    goal = _find_goal(metric)
    if _is_share(metric):
        return percent(name, name, goal)
    return MetricInfo(name, name, goal=goal)


def _build_and_try(config: TorchMetric, outputs: Outputs | None) -> Any:
    """Return the metric as written, after it was tried; ValueError if an update fails."""
    if outputs is not None and outputs.form != "values":
        outputs = outputs._replace(size=min(outputs.size, SAMPLE_CLASSES))
    try:
        with warnings.catch_warnings():
            # The values of the sample mean nothing.
            warnings.simplefilter("ignore")
            if outputs is not None:
                _try_metric(config.build(outputs), outputs)
            # The properties of the class, such as its direction, are those of the written metric.
            metric = config.build_as_written(outputs)
    except Exception as error:
        # A metric can raise any exception for arguments or predictions that do not suit it.
        form = "" if outputs is None else f" for predictions in the form of {outputs.form}"
        reason = " ".join(str(error).split())
        if find_user_line(error) or is_unexpected(error):
            reason = explain_failure(error, config.name)
        raise ValueError(f"{config.name} cannot be used{form}: {reason}") from error
    return metric


def _try_metric(metric: Any, outputs: Outputs) -> None:
    """Update a metric with a sample; ValueError if it does not compute one number."""
    from lit_attn.tasks.exact_metrics import update, use_float64

    if metric.__module__.startswith("torchmetrics.segmentation."):
        raise ValueError("needs whole masks; JaccardIndex is mIoU, and F1Score Dice")
    use_float64(metric)
    update(metric, outputs.sample())
    count = metric.compute().numel()
    # A metric of values can have one number for each value.
    largest_count = outputs.size if outputs.form == "values" else 1
    if count not in (1, largest_count):
        raise ValueError(f"it computes {count} numbers; choose an average")


def _find_goal(metric: Any) -> Goal | None:
    """Return the better direction of a metric, or None if it does not say."""
    class_name = type(metric).__name__
    if class_name in GOAL_CORRECTIONS:
        return GOAL_CORRECTIONS[class_name]
    return GOALS.get(metric.higher_is_better)


def _is_share(metric: Any) -> bool:
    """Return True if the values of a metric are shares from 0 to 1, printed in percent."""
    if (metric.plot_lower_bound, metric.plot_upper_bound) != (0, 1):
        return False
    # The class that sets the bounds. Those of torchmetrics can be wrong.
    owner = next(cls for cls in type(metric).__mro__ if "plot_upper_bound" in vars(cls))
    is_own = not owner.__module__.startswith("torchmetrics.")
    return is_own or SHARE.search(owner.__name__) is not None


def _is_own_class(name: object) -> bool:
    """Return True if the name of a metric is that of a class to import, `file:Class`."""
    return ":" in str(name)


def _find_class(name: str) -> Any:
    """Return a class of torchmetrics, or the class `file:Class`; ValueError with the nearest."""
    if _is_own_class(name):
        return import_class(name, "torchmetrics:Metric")
    classes = {}
    for package in PACKAGES:
        module = import_module(package)
        for member_name in module.__all__:
            member = getattr(module, member_name)
            if isinstance(member, type):
                classes[member_name] = member
    if name not in classes:
        raise ValueError(f"'{name}' is not a metric of torchmetrics{suggest(name, classes)}")
    return classes[name]


RATE = MetricInfo("train/lr", "learning rate", goal="max")
TRAINING_METRICS = (MetricInfo("train/loss", "training loss"), RATE)
TOKENS = MetricInfo("train/tokens_per_second", "tokens per second", goal="max")
EVALUATION = MetricInfo("evaluation/seconds", "time of an evaluation (s)")

DEFAULT_METRIC = Metric(name="test/accuracy", label="accuracy (%)", goal="max", scale=100.0)
"""Metric of a study or cell that names none."""


class Measured(Protocol):
    """Experiment (lit_attn.config.experiment) as the choice of a metric sees it."""

    @property
    def data(self) -> Any:
        """Data set, which has the splits and the signature."""

    @property
    def task(self) -> Any:
        """Task, which has metrics of its own."""

    @property
    def metrics(self) -> Sequence[AddedMetric]:
        """Metrics that the experiment adds."""

    @property
    def training(self) -> Any:
        """Training, which may average the weights."""


class MetricChoice(Config):
    """The metric that a study compares, as YAML names it."""

    name: str = Field(
        DEFAULT_METRIC.name,
        description="name with its split; without one, test/accuracy or the task's first metric",
    )
    label: str | None = Field(None, description="heading of the column; null: the metric's own")
    goal: Goal | None = Field(None, description="better direction; null: the metric's")
    scale: FiniteFloat | None = Field(None, description="factor for printing; null: the metric's")
    selection: Literal["last", "best-validation"] = Field("last", description="epoch that counts")
    margin: FiniteFloat | None = Field(
        None,
        gt=0,
        description="largest difference that does not matter, in printed units; null: no test",
    )
    pairs: StudyPairs | None = Field(
        None,
        description="test: seed, sign flips of pairs of equal seeds, or log-rank, of times until an"
        " event; null: log-rank for such a time, seed for any other metric",
    )

    @property
    def _is_default(self) -> bool:
        """True if the study does not name its metric."""
        return "name" not in self.model_fields_set

    def resolve(self, experiment: Measured) -> Metric:
        """Return the metric with its label, goal and scale.

        Raises ValueError, which names the nearest metric, if no cell of `experiment` measures it.
        Two facts are known only to the cells: whether a folder has a validation split, and class
        names that are in no configuration.
        """
        metrics = available(experiment)
        splits = experiment.data.splits
        split, _, name = self.name.partition("/")
        is_evaluated = split in splits
        if is_evaluated and name.startswith("averaged-") and experiment.training.average is None:
            raise ValueError(f"'{self.name}' measures averaged weights; set training.average")
        info = self._find_info(metrics)
        if self.selection == "best-validation" and not is_evaluated:
            raise ValueError(f"'{self.name}' is not evaluated on a split; set `selection: last`")
        if self.selection == "best-validation" and "val" not in splits:
            raise ValueError("best-validation needs a validation split: set data.validation")
        values: dict[str, Any] = {"label": info.label, "goal": info.goal, "scale": info.scale}
        values["event"] = info.event
        values["best"] = info.best
        values["pairs"] = "log-rank" if info.event else "seed"
        # The keys that the study writes count before those of the metric.
        values |= self.model_dump(exclude_none=True)
        if self._is_default:
            values["name"] = info.name
        if values["goal"] not in (None, info.goal):
            # The best value belongs to the direction of the metric itself.
            values["best"] = None
        if values["best"] is not None:
            values["best"] *= values["scale"]
        if values["goal"] is None:
            raise ValueError(f"'{self.name}' does not say which direction is better; set goal")
        if values["pairs"] == "log-rank":
            self._check_log_rank(info)
        return Metric.model_validate(values)

    def _check_log_rank(self, info: MetricInfo) -> None:
        """Raise ValueError if a log-rank test cannot answer what the study asks."""
        if not info.event:
            raise ValueError(
                f"'{self.name}' is not the time until an event, which a log-rank test needs; leave"
                " `pairs` out"
            )
        if self.margin is not None:
            raise ValueError(
                "a log-rank test has no interval that could lie within `margin`; leave it out, or"
                " write `pairs: seed`"
            )

    def _find_info(self, metrics: list[MetricInfo]) -> MetricInfo:
        """Return the metric with the name of this choice; ValueError if none has it.

        Without a name it is the first metric of the task if the task has no accuracy.
        """
        for info in metrics:
            match = info.match(self.name)
            if match is not None:
                return match
        named = [info for info in metrics if "*" not in info.name]
        if self._is_default and named:
            return named[0]
        names = [info.name for info in named]
        raise ValueError(
            f"'{self.name}' is not measured{suggest(self.name, names)} (a metric that the task does"
            " not have needs an entry in `metrics`)"
        )


def available(experiment: Measured) -> list[MetricInfo]:
    """Return every metric that a cell of `experiment` may record, with its full name.

    The metrics of evaluated splits come first, those of averaged weights after the others.
    """
    signature = experiment.data.signature()
    outputs = experiment.task.outputs(signature)
    evaluated = list(experiment.task.metrics(signature))
    evaluated += [metric.info(outputs) for metric in experiment.metrics]
    metrics: list[MetricInfo] = []
    for split in experiment.data.splits:
        label_prefix = "validation " if split == "val" else ""
        for info in evaluated:
            name = f"{split}/{info.name}"
            metrics.append(info._replace(name=name, label=f"{label_prefix}{info.label}"))
        if experiment.training.average is not None:
            for info in evaluated:
                name = f"{split}/averaged-{info.name}"
                label = f"{label_prefix}{info.label}, averaged weights"
                metrics.append(info._replace(name=name, label=label))
    metrics += TRAINING_METRICS
    metrics += experiment.task.training_metrics
    if signature.tokens is not None:
        metrics.append(TOKENS)
    metrics.append(EVALUATION)
    return metrics


def list_events(experiment: Measured) -> dict[str, str]:
    """Return the event of each metric that is a time until it, by the full name of the metric."""
    return {info.name: info.event for info in available(experiment) if info.event}
