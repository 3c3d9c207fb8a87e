"""The records of a study on disk: plan, results, ends of attempts, metric rows.

They are the whole interface between training, which writes them, and the report, which reads
nothing else. CELL stands for runs/<study>/<variant>/<seed>-<identity>:

    runs/<study>/plan.json         Plan; the folder of a side study is <study>@<...>
    runs/<study>/step_times.json   StepTimes
    runs/<study>/tuning.json       Tuning
    runs/<study>/screening.json    Screening (lit_attn.cells.screening)
    runs/<study>/seals.json        Seals (lit_attn.cells.decisions)
    runs/<study>/looks.json        Looks (lit_attn.cells.decisions)
    runs/<study>/samples.json      Samples (lit_attn.cells.samples)
    runs/<study>/origin.json       Origin
    CELL/result.json               Result, written last: it marks success
    CELL/attempts/<k>/exit.json    Exit
    CELL/metrics.csv               step,epoch,name,value
    CELL/clock.csv                 step,seconds
    CELL/diagnostics.csv           step,layer,head,name,value
    CELL/attention.npz             arrays of the last recorded diagnostics
    CELL/unreadable-<rank>.csv     split,image,reason of images that were left out
    CELL/units.npz                 loss and correct predictions of each evaluated sample
    CELL/pictures/<k>.png          image | labels | prediction
    CELL/pictures/legend.json      Legend (lit_attn.cells.legend)
"""

import contextlib
import datetime
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    FiniteFloat,
    SerializerFunctionWrapHandler,
    ValidationError,
    field_validator,
    model_serializer,
    model_validator,
)

from lit_attn.files import open_at_once, write_atomic
from lit_attn.schema.errors import ConfigError, explain
from lit_attn.schema.limits import MAX_INTEGER
from lit_attn.schema.names import is_file_name

FailureClass = Literal[
    "out-of-memory", "diverged", "killed", "timed-out", "no-space", "bad-configuration", "error"
]

Integer = Annotated[int, Field(ge=-MAX_INTEGER, le=MAX_INTEGER)]
"""Integer that tables can contain."""

SMOKE = "smoke"
"""Setting in the name of a study whose cells train for one step: STUDY@smoke."""

VERSION = 1
"""Version of plans and results; a record of a newer version is not read as if it were this one."""


def utc_now() -> str:
    """Return the time in UTC as ISO 8601, to the second."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


class Record(BaseModel):
    """Base of all records. Unknown keys, which a newer version may have written, are ignored."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    @model_validator(mode="after")
    def _check_integers(self) -> Self:
        """Refuse integers that tables cannot contain, also in lists."""
        for name, value in self:
            entries = value if isinstance(value, list) else [value]
            for entry in entries:
                if isinstance(entry, int) and abs(entry) > MAX_INTEGER:
                    raise ValueError(f"{name}: an integer has more than 64 bits")
        return self

    def write(self, path: Path) -> None:
        """Write the record atomically as JSON."""
        write_atomic(path, self.model_dump_json(indent=2) + "\n")

    @classmethod
    def read_valid(cls, path: Path) -> Self | None:
        """Return the record, or None without a readable one."""
        with contextlib.suppress(OSError, ValidationError), open_at_once(path) as file:
            return cls.model_validate_json(file.readall())
        return None

    @classmethod
    def read(cls, path: Path) -> Self | None:
        """Return the record, or None without a file; ConfigError if it cannot be read."""
        record = cls.read_valid(path)
        if record is None and path.exists():
            raise ConfigError(f"{path}: cannot be read; move it away to start afresh")
        return record


StudyPairs = Literal["seed", "log-rank"]
"""Tests of significance that a study can choose (lit_attn.report.statistics.significance)."""


class Metric(Record):
    """The metric that a study compares.

    `name` is the logged name, `label` heads its column, and `scale` converts the logged value to
    the printed one (100 for an accuracy in percent). `selection` chooses the epoch: the last one,
    or the one with the best value of `name` on the validation split. Test results never choose an
    epoch. `margin` is the largest difference in printed units that does not matter: with it the
    report tests which variants are equivalent to the baseline. `event` names the event of a metric
    that is the time until it, in training steps; a run without it has all of its steps. `best` is
    the best possible value in printed units. `pairs` is the test.
    """

    name: str
    label: str
    goal: Literal["max", "min"]
    scale: FiniteFloat
    selection: Literal["last", "best-validation"] = "last"
    margin: FiniteFloat | None = Field(None, gt=0)
    event: str = ""
    best: FiniteFloat | None = None
    pairs: StudyPairs = "seed"

    @model_serializer(mode="wrap")
    def _leave_out_defaults(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Return the values; a metric without these keys is written as in earlier versions."""
        content: dict[str, Any] = serialize(self)
        for key in ("event", "best", "pairs"):
            if content[key] == type(self).model_fields[key].default:
                del content[key]
        return content

    @property
    def decided(self) -> "Metric":
        """The metric without what it declares about itself, which no study decides."""
        return self.model_copy(update={"event": "", "best": None})

    @property
    def untested(self) -> "Metric":
        """The metric as the choice of variants or values sees it, which compares means alone."""
        return self.decided.model_copy(update={"pairs": "seed"})

    @property
    def averaged(self) -> bool:
        """True if the metric evaluates an average of the weights."""
        _, _, name_in_split = self.name.partition("/")
        return name_in_split.startswith("averaged-")


class PlannedVariant(Record):
    """A variant under one criterion of the study's `match`.

    `name` is unique in the plan: `variant`, or `variant@criterion` for every criterion but the
    first. `published` are the mean and standard deviation of a paper in printed units.
    """

    name: str
    variant: str | None = Field(None, description="name without the criterion; null: `name`")
    label: str | None = Field(None, description="text of tables and figures; null: `name`")
    criterion: str | None = Field(None, description="parameters, flops, time or none")
    stretch: float = Field(1.0, description="factor on the training steps")
    step_flops: Integer | None = Field(None, description="FLOPs of a step, forward and backward")
    published: tuple[float, float | None] | None = None


class PlannedCell(Record):
    """A variant with a seed. `path` is relative to the study's folder."""

    variant: str
    seed: Integer
    identity: str
    path: str

    @field_validator("path")
    @classmethod
    def _inside_the_study(cls, path: str) -> str:
        """Refuse a path that leaves the folder of the study."""
        if path.startswith("/") or ".." in path.split("/") or "\0" in path:
            raise ValueError(f"'{path}' is outside the folder of the study")
        return path


class Plan(Record):
    """All cells that a study should have. The baseline belongs to every criterion."""

    version: Integer = Field(VERSION, description="version of the record; 1 if it is not named")

    study: str
    title: str
    source: str = ""
    baseline: str
    metric: Metric
    criteria: list[str] = []
    family: str = Field("", description="study with `compare_within` that this is a level of")
    level: str = Field("", description="value of the axes of `compare_within`")
    variants: list[PlannedVariant]
    levels: dict[str, str] = Field(
        {}, description="texts of the values of axes, by their term in the names of variants"
    )
    seeds: list[Integer] = Field(min_length=1)
    cells: list[PlannedCell]
    trials: list[PlannedCell] = Field(
        [], description="cells of the search of `tune`, then those of the screening"
    )
    events: dict[str, str] = Field(
        {}, description="event of each metric that is a time until it, by the metric's name"
    )
    best_test_epoch: bool = Field(False, description="True to show the best test epoch")
    parity: str = Field("", description="agreement with released code")
    is_smoke: bool = Field(False, description="True if every cell trains for one step only")
    columns: list[str] | None = Field(None, description="columns of the tables, by key")
    latex: list[str] | None = Field(None, description="columns of the LaTeX table, by key")

    @field_validator("family")
    @classmethod
    def _names_a_folder(cls, name: str) -> str:
        """Refuse a path: the report writes to the folder of the family."""
        if name and not is_file_name(name):
            raise ValueError(f"'{name}' cannot name a folder")
        return name

    @classmethod
    def load(cls, path: Path) -> Self:
        """Return the plan at `path`. Raises ConfigError if there is none."""
        where = f"{path}: is not a plan; run the study again to write it"
        try:
            with open_at_once(path) as file:
                content = file.readall()
            require_known_version(content, path)
            return cls.model_validate_json(content)
        except OSError as error:
            raise ConfigError(f"{where}: {error.strerror}") from error
        except ValidationError as error:
            raise explain(error, where) from error


class Origin(Record):
    """The file of studies that a study's folder belongs to (see lit_attn.ablate.origin)."""

    file: str = Field(description="path relative to the folder")


class Spread(Record):
    """Median and interquartile range of `count` measured times, in seconds."""

    median: FiniteFloat
    iqr: FiniteFloat
    count: Integer


class Result(Record):
    """The result of a finished cell. Only its existence marks success. All numbers are finite."""

    version: Integer = Field(VERSION, description="version of the record; 1 if it is not named")

    study: str
    variant: str
    seed: Integer
    identity: str
    metrics: dict[str, FiniteFloat] = Field(description="values at the selected epoch by name")
    chance: dict[str, FiniteFloat] = Field(
        {}, description="best value without using the input, by the name of the metric"
    )
    diverged: bool | None = Field(
        None,
        description="True if the training loss ended above ten times its first value; null: "
        "unknown",
    )
    selected_epoch: Integer
    steps: Integer = Field(description="training steps")
    epochs: Integer
    stopped_early: bool = Field(False, description="True if `training.stop` ended the training")
    devices: Integer = Field(1, description="number of devices that shared every batch")
    nodes: Integer = Field(1, description="number of machines with these devices")
    strategy: str | None = Field(
        None, description="division of the training among the devices; null for one device"
    )
    recompute: str = Field("none", description="parts that were computed again for the gradient")
    batch_size: Integer | None = Field(None, description="samples per step on all devices")
    parameters: Integer = Field(description="number of trainable scalars")
    flops: Integer = Field(description="FLOPs of a forward pass of one sample; a multiply-add is 2")
    ffn_width: Integer | None = Field(description="FFN width after matching; null if there is none")
    replaced_layers: Integer | None = Field(
        None, description="attention layers with the variant's mechanism; null in old records"
    )
    attention_layers: Integer | None = Field(
        None, description="all attention layers of the model; null in old records"
    )
    cache_bytes: Integer | None = Field(
        None,
        description="bytes that decoding stores for each token of a sample; null without a cache "
        "and in old records",
    )
    step_time: Spread = Field(description="work of the device in a step, without waiting for data")
    step_wall_time: Spread | None = Field(
        None, description="from the end of a step to the end of the next; null in old records"
    )
    evaluation_time: Spread | None = Field(
        None, description="time of an evaluation of all splits; null in old records"
    )
    is_device_shared: bool = Field(False, description="True if another cell may have used the GPU")
    is_compiled: bool | None = Field(
        None, description="True if torch.compile compiled the model; null in old records"
    )
    compile_failure: str = Field("", description="why compiling failed; trained uncompiled")
    peak_memory: Integer = Field(description="bytes on the fullest device (CPU: resident set)")
    wall_time: FiniteFloat = Field(description="seconds of all attempts of this cell alone")
    device: str
    attempts: Integer
    code: str = Field(description="hash of the executed code; those of all attempts joined by +")
    data: str = Field(description="hash of the data; those of all attempts joined by +")
    inputs: dict[str, str] = Field({}, description="stamps of plug-ins and of data files by path")
    versions: dict[str, str]
    finished: str = Field(description="time in UTC, ISO 8601")


class Timing(Record):
    """The cost of a whole cell, estimated from a few steps. Times are in seconds.

    `startup` is all but steps and evaluations, `evaluation_time` one evaluation of all splits.
    `step_time` is the wall time of a step, data included.
    """

    startup: FiniteFloat
    step_time: FiniteFloat
    steps: Integer
    evaluation_time: FiniteFloat
    evaluations: Integer

    @property
    def seconds(self) -> float:
        """Seconds of the whole cell."""
        training = self.steps * self.step_time
        return self.startup + training + self.evaluations * self.evaluation_time


class TimedVariant(Record):
    """Step time of a variant, measured alone and interleaved with the baseline.

    `seconds` is the median of a step and `ratio` the median over rounds of the ratio to the
    baseline, with the interquartile range `spread` relative to the median.
    """

    variant: str
    kind: str = Field(description="hash of the configuration without the seed (Cell.kind)")
    baseline_kind: str
    seconds: FiniteFloat
    ratio: FiniteFloat
    spread: FiniteFloat


class StepTimes(Record):
    """Measured step times of a study; `is_noisy` if a spread above the limit was allowed."""

    device: str
    finished: str = Field(default_factory=utc_now, description="time in UTC, ISO 8601")
    is_noisy: bool = False
    variants: list[TimedVariant]


class TuningTrial(Record):
    """A trial: its values and the metric of each seed in printed units (null: it has diverged)."""

    values: dict[str, Any]
    mean: FiniteFloat | None
    by_seed: dict[str, FiniteFloat | None]


class TunedVariant(Record):
    """The trials of a variant; `chosen` is null until all have ended, or if all have diverged."""

    variant: str
    chosen: dict[str, Any] | None
    at_edge: list[str]
    trials: list[TuningTrial]


class Tuning(Record):
    """The search of `tune`: `keys` with their values, and `trials` per variant."""

    trials: Integer
    seeds: list[Integer]
    select: Metric
    keys: dict[str, list[Any]]
    variants: list[TunedVariant]


class Exit(Record):
    """The end of an attempt that has no result."""

    failure: FailureClass
    returncode: Integer
    message: str = Field(description="one line with the reason")
    rank: Integer = 0
    is_stopped: bool = Field(False, description="the user or SLURM has stopped the run")
    finished: str = Field(default_factory=utc_now, description="time in UTC, ISO 8601")


class _Versioned(BaseModel):
    """The version in a record of any version."""

    version: int = 1


def require_known_version(content: bytes, path: Path) -> None:
    """Raise ConfigError if the record in `content` was written by a newer version of lit_attn."""
    try:
        version = _Versioned.model_validate_json(content).version
    except ValidationError:
        # The validation of the record itself reports what is wrong.
        return
    if version > VERSION:
        raise ConfigError(
            f"{path}: was written by a newer version of lit_attn (records of version {version}, "
            f"and this one reads version {VERSION}); install the newer version"
        )
