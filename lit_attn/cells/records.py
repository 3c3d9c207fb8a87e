"""What a study leaves on disk: the plan, each cell's result, each attempt's end, each metric row.

These are the whole interface between training (which writes them) and the report (which reads
nothing else):

    runs/<study>/plan.json                                    Plan      of a trial, <study>@<...>
    runs/<study>/<variant>/<seed>-<identity>/result.json      Result    written last: success
    runs/<study>/<variant>/<seed>-<identity>/attempts/<k>/exit.json     Exit
    runs/<study>/<variant>/<seed>-<identity>/metrics.csv      step,epoch,name,value
    runs/<study>/<variant>/<seed>-<identity>/diagnostics.csv  step,layer,head,name,value
    runs/<study>/<variant>/<seed>-<identity>/attention.npz    arrays of the last look
    runs/<study>/<variant>/<seed>-<identity>/pictures/<k>.png image | labels | prediction
    runs/<study>/<variant>/<seed>-<identity>/pictures/legend.json       Legend
"""

import contextlib
import csv
import io
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, field_validator

from lit_attn.files import write_atomic

FailureClass = Literal[
    "out-of-memory", "diverged", "killed", "timed-out", "no-space", "bad-configuration", "error"
]


class Record(BaseModel):
    """Base of everything written: unknown keys are errors, values do not change."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    def write(self, path: Path) -> None:
        """Write as JSON: temp, fsync, rename."""
        write_atomic(path, self.model_dump_json(indent=2) + "\n")


class Metric(Record):
    """The number a study compares.

    `name` is the logged name, `scale` turns the logged value into the printed one (100 for an
    accuracy in percent), and `selection` says which epoch counts: the last one, or the one with
    the best value of `name` on the validation split. There is no choice by test results. `margin`
    is the largest difference in printed units that does not matter: with it the report says which
    variants are equivalent to the baseline.
    """

    name: str = "test/accuracy"
    label: str = "accuracy (%)"
    goal: Literal["max", "min"] = "max"
    scale: FiniteFloat = 100.0
    selection: Literal["last", "best-validation"] = "last"
    margin: FiniteFloat | None = Field(None, gt=0)

    @property
    def averaged(self) -> bool:
        """Whether it is of the moving average of the weights, and not of the trained ones."""
        return self.name.partition("/")[2].startswith("ema-")


class PlannedVariant(Record):
    """A row of the table: a name and, where a paper printed it, its mean and sd (printed units)."""

    name: str
    published: tuple[float, float | None] | None = None


class PlannedCell(Record):
    """One variant with one seed; `path` is the cell's folder, relative to the study's folder."""

    variant: str
    seed: int
    identity: str
    path: str

    @field_validator("path")
    @classmethod
    def _inside_the_study(cls, path: str) -> str:
        if Path(path).is_absolute() or ".." in Path(path).parts:
            raise ValueError(f"'{path}' is outside the folder of the study")
        return path


class Plan(Record):
    """All cells of a study: what the report counts missing cells against."""

    study: str
    title: str
    source: str = ""
    baseline: str
    metric: Metric
    variants: list[PlannedVariant]
    seeds: list[int]
    cells: list[PlannedCell]


class Spread(Record):
    """A timing: median and interquartile range, in seconds, over `count` measurements."""

    median: FiniteFloat
    iqr: FiniteFloat
    count: int


class Result(Record):
    """A finished cell. Its existence is the only mark of success; every number in it is finite."""

    study: str
    variant: str
    seed: int
    identity: str
    metrics: dict[str, FiniteFloat] = Field(description="at the selected epoch, by logged name")
    selected_epoch: int
    steps: int
    epochs: int
    devices: int = Field(1, description="that shared every batch")
    batch_size: int | None = Field(None, description="samples of a step, over all devices")
    parameters: int = Field(description="trainable scalars")
    flops: int = Field(description="forward pass of one sample, multiply-add = 2")
    ffn_width: int | None = Field(description="hidden width after matching; null without an FFN")
    step_time: Spread
    evaluation_time: Spread | None = Field(None, description="of all splits; null in old records")
    peak_memory: int = Field(
        description="bytes, of the fullest device: CUDA allocator on a GPU, resident set on a CPU"
    )
    wall_time: FiniteFloat = Field(description="seconds over all attempts that led here")
    device: str
    attempts: int
    code: str = Field(description="hash of the package's source files")
    data: str = Field(description="hash of the arrays trained and evaluated on")
    versions: dict[str, str]
    finished: str = Field(description="UTC, ISO 8601")


class Timing(Record):
    """What a few steps of a cell say of the whole; times are in seconds.

    `startup` is all but steps and evaluations, `evaluation_time` is of one whole evaluation of all
    splits, and `memory` is as in Result.
    """

    startup: FiniteFloat
    step_time: FiniteFloat
    steps: int
    evaluation_time: FiniteFloat
    evaluations: int
    memory: int

    @property
    def seconds(self) -> float:
        """The whole cell's."""
        of_steps = self.steps * self.step_time
        return self.startup + of_steps + self.evaluations * self.evaluation_time


class Legend(Record):
    """How to read a cell's pictures, whose predictions are made after the last step."""

    weights: Literal["trained", "averaged"] = Field(description="that predict")
    classes: dict[str, tuple[int, int, int]] = Field(description="colour of every class, 0 to 255")
    shown: list[str] = Field(description="classes that are labelled or predicted in a picture")


class Exit(Record):
    """How one attempt at a cell ended without a result."""

    failure: FailureClass
    returncode: int
    message: str = Field(description="the last line that says why")
    rank: int = 0
    finished: str


class MetricRow(NamedTuple):
    """One logged value of `metrics.csv`."""

    step: int
    epoch: int
    name: str
    value: float


class DiagnosticRow(NamedTuple):
    """One value of `diagnostics.csv`; layers and heads count from 1, no head is a whole layer's."""

    step: int
    layer: int
    head: int | None
    name: str
    value: float


def read_metrics(path: Path) -> list[MetricRow]:
    """Rows of a metrics.csv, or none without one.

    A crash while writing tears the last line, and what is appended later may go on in it: a line
    that is not a whole row is left out.
    """
    rows = []
    for fields in _whole_lines(path):
        with contextlib.suppress(ValueError):
            step, epoch, name, value = fields
            rows.append(MetricRow(int(step), int(epoch), name, float(value)))
    return rows


def read_diagnostics(path: Path) -> list[DiagnosticRow]:
    """Rows of a diagnostics.csv, in the same way."""
    rows = []
    for fields in _whole_lines(path):
        with contextlib.suppress(ValueError):
            step, layer, head, name, value = fields
            of = int(head) if head else None
            rows.append(DiagnosticRow(int(step), int(layer), of, name, float(value)))
    return rows


def csv_lines(rows: Iterable[Iterable[Any]]) -> str:
    """Rows as CSV, each ended by a line feed."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()


def _whole_lines(path: Path) -> Iterator[list[str]]:
    """Yield the fields of every complete line, without lines whose fields exceed csv's limit."""
    if not path.exists():
        return
    text = path.read_text(encoding="utf-8", errors="replace")
    for line in text[: text.rfind("\n") + 1].splitlines():
        with contextlib.suppress(csv.Error):
            yield from csv.reader([line])
