"""Metrics of an experiment, known without reading data or building a network.

A metric's name is `<split>/<name>`, and `<split>/ema-<name>` for averaged weights.
"""

from typing import Literal

from pydantic import Field, FiniteFloat

from lit_attn.cells.records import Metric
from lit_attn.config.experiment import Experiment
from lit_attn.config.tasks import MetricInfo, percent
from lit_attn.schema.base import Config
from lit_attn.schema.errors import suggest

TRAINING = (
    MetricInfo("train/loss", "training loss"),
    MetricInfo("train/lr", "learning rate", goal="max"),
    percent("train/mfu", "MFU"),
)
TOKENS = MetricInfo("train/tokens_per_second", "tokens per second", goal="max")
EVALUATION = MetricInfo("evaluation/seconds", "time of an evaluation (s)")

DEFAULT_METRIC = Metric(name="test/accuracy", label="accuracy (%)", goal="max", scale=100.0)
"""Metric of a study or cell that names none."""


class MetricChoice(Config):
    """The metric that a study compares, as YAML names it.

    `label`, `goal` and `scale` are those of the metric unless they are given.
    """

    name: str = Field(
        DEFAULT_METRIC.name,
        description="name of the metric, beginning with its split, as test/accuracy",
    )
    label: str | None = Field(None, description="heading of the column; null: the metric's own")
    goal: Literal["max", "min"] | None = Field(
        None, description="direction of improvement; null: the metric's own"
    )
    scale: FiniteFloat | None = Field(
        None, description="factor from the logged to the printed value; null: the metric's own"
    )
    selection: Literal["last", "best-validation"] = Field(
        "last", description="epoch that counts: the last, or the best on the validation split"
    )
    margin: FiniteFloat | None = Field(
        None,
        gt=0,
        description="largest difference that does not matter, in printed units; null: no "
        "test of equivalence",
    )

    def resolve(self, experiment: Experiment) -> Metric:
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
        if is_evaluated and name.startswith("ema-") and experiment.training.ema is None:
            raise ValueError(f"'{self.name}' measures averaged weights; set training.ema")
        if info is None:
            raise ValueError(f"'{self.name}' is not measured{_hint(self.name, metrics)}")
        if self.selection == "best-validation" and not is_evaluated:
            raise ValueError(f"'{self.name}' is not evaluated on a split; set `selection: last`")
        if self.selection == "best-validation" and "val" not in splits:
            raise ValueError("best-validation needs a validation split: set data.validation")
        return Metric(
            name=self.name,
            label=info.label if self.label is None else self.label,
            goal=self.goal or info.goal,
            scale=info.scale if self.scale is None else self.scale,
            selection=self.selection,
            margin=self.margin,
        )


def available(experiment: Experiment) -> list[MetricInfo]:
    """Return every metric that a cell of `experiment` may record, with its full name.

    The metrics of evaluated splits come first, those of averaged weights after the others.
    """
    signature = experiment.data.signature()
    metrics = experiment.task.metrics(signature)
    suffixes = {"": "", "ema-": ", averaged weights"}
    if experiment.training.ema is None:
        del suffixes["ema-"]
    evaluated = [
        info._replace(name=f"{split}/{prefix}{info.name}", label=_label(split, info) + suffix)
        for split in experiment.data.splits
        for prefix, suffix in suffixes.items()
        for info in metrics
    ]
    tokens = [] if signature.tokens is None else [TOKENS]
    return [*evaluated, *TRAINING, *tokens, EVALUATION]


def _label(split: str, info: MetricInfo) -> str:
    return f"validation {info.label}" if split == "val" else info.label


def _hint(name: str, metrics: list[MetricInfo]) -> str:
    """Return the nearest name; if none is near, the names without those of one class or task."""
    names = [info.name for info in metrics if "*" not in info.name]
    hint = suggest(name, names)
    return hint if "did you mean" in hint else suggest("", [n for n in names if ":" not in n])
