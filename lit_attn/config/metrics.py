"""Metrics of an experiment, known without reading data or building a network.

A metric's name is `<split>/<name>`, and `<split>/averaged-<name>` for averaged weights. A task has
metrics of its own (lit_attn.config.tasks); `metrics:` of an experiment adds others.
"""

import inspect
import re
import warnings
from abc import abstractmethod
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

from pydantic import Field, FiniteFloat

from lit_attn.cells.records import Metric
from lit_attn.schema.base import Config, Kind
from lit_attn.schema.errors import suggest
from lit_attn.schema.own_classes import import_class

if TYPE_CHECKING:
    import torchmetrics
    from torch import Tensor

    from lit_attn.config.experiment import Experiment

SAMPLE_CLASSES = 100  # Largest number of classes with which a metric is tried before a run.
PACKAGES = "", "classification", "clustering", "nominal", "regression", "segmentation", "text"
SHARE = re.compile(
    "Accuracy|AUROC|CalibrationError|Dice|EER|ErrorRate|ExactMatch|F1|FBeta|Hamming|HitRate|IoU|"
    "Jaccard|Precision|PredictiveValue|RankingLoss|Recall|Sensitivity|Specificity"
)
"""Names of the classes of torchmetrics that compute a share; others have its bounds, too."""
Goal = Literal["max", "min"]
GOALS: dict[Any, Goal] = {True: "max", False: "min"}
GOALS |= {"DaviesBouldinScore": "min", "WordInfoPreserved": "max"}
"""Direction by `higher_is_better`, and by the names of metrics for which torchmetrics is wrong."""


class MetricInfo(NamedTuple):
    """Name of a metric without its split, and how tables print it.

    `label` heads the column, `scale` turns the logged value into the printed one, and `goal` says
    which direction is better, None if the metric does not say. A `*` at the end stands for names
    that only the files know.
    """

    name: str
    label: str
    scale: float = 1.0
    goal: Goal | None = "min"

    def match(self, name: str) -> "MetricInfo | None":
        """Return this metric with the label for `name`, or None if `name` is another metric."""
        prefix = self.name.removesuffix("*")
        if prefix == self.name or not name.startswith(prefix):
            return self if name == self.name else None
        return self._replace(name=name, label=self.label.replace("*", name.removeprefix(prefix)))


def percent(name: str, label: str, goal: Goal | None = "max") -> MetricInfo:
    """Return a metric that is logged as a fraction and printed in percent."""
    return MetricInfo(name, f"{label} (%)", 100.0, goal)


Form = Literal["probabilities", "classes", "values"]


class Outputs(NamedTuple):
    """Form of a task's predictions and targets, the arguments of `update` of an added metric.

    *probabilities*: (N, classes) and labels (N,); *classes*: predicted classes (N,) and labels
    (N,); *values*: predicted values and targets, both (N, size), or (N,) for one value. Samples,
    tokens and pixels that do not count are left out.
    """

    form: Form
    size: int

    def sample(self) -> "tuple[Tensor, Tensor]":
        """Return predictions and targets of eight samples, of at most SAMPLE_CLASSES classes."""
        import torch

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

    @classmethod
    def name_code(cls, written: dict[Any, Any]) -> dict[str, Any]:
        name = written.get("name")
        return {"name": name} if _is_own_class(name) else {}

    def build(self, outputs: Outputs | None) -> "torchmetrics.Metric":
        metric_class = _find_class(self.name)
        arguments = dict(self.arguments)
        if outputs is not None and outputs.form != "values":
            constructors = (metric_class.__init__, metric_class.__new__)
            if any("num_classes" in inspect.signature(c).parameters for c in constructors):
                arguments.setdefault("num_classes", outputs.size)
        return metric_class(**arguments)

    def info(self, outputs: Outputs | None) -> MetricInfo:
        return _describe(type(self), self.model_dump_json(), outputs)


@cache
def _describe(member: type[TorchMetric], text: str, outputs: Outputs | None) -> MetricInfo:
    """Return the info of the member with the JSON `text`; cached, because it builds the metric."""
    config = member.model_validate_json(text)
    name = config.record_as or config.name.rpartition(":")[2]
    _find_class(config.name)
    if outputs is not None and outputs.form != "values":
        outputs = outputs._replace(size=min(outputs.size, SAMPLE_CLASSES))
    try:
        with warnings.catch_warnings():
            # The values of the sample mean nothing.
            warnings.simplefilter("ignore")
            metric = config.build(outputs)
            if outputs is not None:
                if metric.__module__.startswith("torchmetrics.segmentation."):
                    raise ValueError("needs whole masks; JaccardIndex is mIoU, and F1Score Dice")
                metric.update(*outputs.sample())
                values = outputs.size if outputs.form == "values" else 1
                if (count := metric.compute().numel()) not in (1, values):
                    raise ValueError(f"it computes {count} numbers; choose an average")
    except Exception as error:
        # A metric can raise any exception for arguments or predictions that do not suit it.
        form = "" if outputs is None else f" for predictions in the form of {outputs.form}"
        reason = " ".join(str(error).split())
        raise ValueError(f"{config.name} cannot be used{form}: {reason}") from error
    goal = GOALS.get(type(metric).__name__, GOALS.get(metric.higher_is_better))
    source = next(cls for cls in type(metric).__mro__ if "plot_upper_bound" in vars(cls))
    is_share = not source.__module__.startswith("torchmetrics.") or SHARE.search(source.__name__)
    if is_share and (metric.plot_lower_bound, metric.plot_upper_bound) == (0, 1):
        return percent(name, name, goal)
    return MetricInfo(name, name, goal=goal)


def _is_own_class(name: object) -> bool:
    """Return True if the name of a metric is that of a class to import, `file:Class`."""
    return ":" in str(name)


def _find_class(name: str) -> Any:
    """Return a class of torchmetrics, or the class `file:Class`; ValueError with the nearest."""
    if _is_own_class(name):
        return import_class(name, "torchmetrics:Metric")
    modules = [import_module(f"torchmetrics.{package}".rstrip(".")) for package in PACKAGES]
    members = {name: getattr(module, name) for module in modules for name in module.__all__}
    classes = {name: member for name, member in members.items() if isinstance(member, type)}
    if name not in classes:
        raise ValueError(f"'{name}' is not a metric of torchmetrics{suggest(name, classes)}")
    return classes[name]


RATE = MetricInfo("train/lr", "learning rate", goal="max")
TRAINING = (MetricInfo("train/loss", "training loss"), RATE)
TOKENS = MetricInfo("train/tokens_per_second", "tokens per second", goal="max")
EVALUATION = MetricInfo("evaluation/seconds", "time of an evaluation (s)")

DEFAULT_METRIC = Metric(name="test/accuracy", label="accuracy (%)", goal="max", scale=100.0)
"""Metric of a study or cell that names none."""


class MetricChoice(Config):
    """The metric that a study compares, as YAML names it."""

    name: str = Field(DEFAULT_METRIC.name, description="name with its split, as test/accuracy")
    label: str | None = Field(None, description="heading of the column; null: the metric's own")
    goal: Goal | None = Field(None, description="better direction; null: the metric's")
    scale: FiniteFloat | None = Field(None, description="factor for printing; null: the metric's")
    selection: Literal["last", "best-validation"] = Field("last", description="epoch that counts")
    margin: FiniteFloat | None = Field(
        None,
        gt=0,
        description="largest difference that does not matter, in printed units; null: no test",
    )

    def resolve(self, experiment: "Experiment") -> Metric:
        """Return the metric with its label, goal and scale.

        Raises ValueError, which names the nearest metric, if no cell of `experiment` measures it.
        Two facts are known only to the cells: whether a folder has a validation split, and class
        names that are in no configuration.
        """
        metrics = available(experiment)
        splits = experiment.data.splits
        info = next((match for info in metrics if (match := info.match(self.name))), None)
        split, _, name = self.name.partition("/")
        is_evaluated = split in splits
        if is_evaluated and name.startswith("averaged-") and experiment.training.average is None:
            raise ValueError(f"'{self.name}' measures averaged weights; set training.average")
        if info is None:
            names = [info.name for info in metrics if "*" not in info.name]
            if "name" not in self.model_fields_set:
                raise ValueError(f"the default '{self.name}' is not measured{suggest('', names)}")
            raise ValueError(f"'{self.name}' is not measured{suggest(self.name, names)}")
        if self.selection == "best-validation" and not is_evaluated:
            raise ValueError(f"'{self.name}' is not evaluated on a split; set `selection: last`")
        if self.selection == "best-validation" and "val" not in splits:
            raise ValueError("best-validation needs a validation split: set data.validation")
        chosen = {"label": info.label, "goal": info.goal, "scale": info.scale}
        chosen |= self.model_dump(exclude_none=True)
        if chosen["goal"] is None:
            raise ValueError(f"'{self.name}' does not say which direction is better; set goal")
        return Metric.model_validate(chosen)


def available(experiment: "Experiment") -> list[MetricInfo]:
    """Return every metric that a cell of `experiment` may record, with its full name.

    The metrics of evaluated splits come first, those of averaged weights after the others.
    """
    signature = experiment.data.signature()
    outputs = experiment.task.outputs(signature)
    added = (metric.info(outputs) for metric in experiment.metrics)
    metrics = [*experiment.task.metrics(signature), *added]
    suffixes = {"": "", "averaged-": ", averaged weights"}
    if experiment.training.average is None:
        del suffixes["averaged-"]
    evaluated = [
        info._replace(
            name=f"{split}/{prefix}{info.name}",
            label=f"{'validation ' * (split == 'val')}{info.label}{suffix}",
        )
        for split in experiment.data.splits
        for prefix, suffix in suffixes.items()
        for info in metrics
    ]
    tokens = [] if signature.tokens is None else [TOKENS]
    return [*evaluated, *TRAINING, *experiment.task.training_metrics, *tokens, EVALUATION]
