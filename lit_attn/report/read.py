"""Records of a study as the report reads them: the plan, and the state of every planned cell."""

import logging
import math
import os
import statistics
import sys
import zipfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from lit_attn.cells import decisions, records
from lit_attn.cells.folder import read_cell, read_result
from lit_attn.files import require_folder
from lit_attn.report.drawing import MOST_PANELS
from lit_attn.report.rows import Row
from lit_attn.report.stats import find_resolution
from lit_attn.report.timing import NOT_ALONE, find_time_fault
from lit_attn.schema.errors import ConfigError, escape_control, require, suggest

Arrays = dict[str, NDArray[Any]]
Content = TypeVar("Content")

BUSY = 1.2
"""Ratio of the longest to the shortest time over seeds from which on a time is not printed."""

MEASUREMENTS = (
    "selected_epoch",
    "steps",
    "epochs",
    "batch_size",
    "parameters",
    "flops",
    "ffn_width",
    "peak_memory",
    "wall_time",
    "attempts",
    "finished",
)
"""Fields of a result that are columns of per_seed.csv."""

LOG = logging.getLogger(__name__)
"""Logger of everything that a report leaves out. Without a handler Python prints it to stderr."""


@dataclass(frozen=True, slots=True)
class CellRecord:
    """A planned cell and the content of its folder.

    `status` is a state of `lit_attn.cells.folder` or "without <metric>". Only a cell with status
    "done" has a value (the study's metric in printed units) and measurements: the columns of
    per_seed.csv, times in seconds, memory in bytes. A cell of another program's table has no path.
    `modules` has the hashes of the user's modules by path.
    """

    variant: str
    seed: int
    status: str
    value: float | None = None
    measurements: Mapping[str, Any] = field(default_factory=dict)
    identity: str = ""
    path: str = ""
    modules: Mapping[str, str] = field(default_factory=dict)

    @property
    def folder(self) -> Path | None:
        """Folder of the cell."""
        return Path(self.path) if self.path else None

    @property
    def is_waiting(self) -> bool:
        """True if `run` would train the cell: no result, not diverged, variant not ended."""
        has_ended = self.status in ("done", "diverged", "stopped")
        return not has_ended and not self.status.startswith("without ")

    @property
    def is_open(self) -> bool:
        """True if the planned cell has neither a result nor a failure yet."""
        return self.status in ("missing", "running", "interrupted", "unreadable")

    def curve(self, metric: records.Metric | str) -> list[records.MetricRow]:
        """Return the logged rows of `metric` in printed units, or of a name in recorded units."""
        if isinstance(metric, str):
            name, scale = metric, 1.0
        else:
            name, scale = metric.name, metric.scale
        rows = read_or_skip(records.read_metrics, self.folder, "metrics.csv") or []
        return [row._replace(value=row.value * scale) for row in rows if row.name == name]


@dataclass(frozen=True)
class StudyRecord:
    """A plan and all of its cells, in the order of the plan.

    `plan.cells` is empty: `cells` has the same content and more. `contrast` is the study that
    `plan.contrast` names, if it has a plan and the same metric. `endings` are the variants that a
    rule of the plan has ended early, by name. `unreadable` names the files of the study that exist
    and cannot be read. `names` has the names of variants by their labels if the
    labels stand in all other places (`lit_attn.report.labels`).
    """

    plan: records.Plan
    cells: list[CellRecord]
    contrast: "StudyRecord | None" = None
    seals: decisions.Seals | None = None
    tuning: records.Tuning | None = None
    step_times: records.StepTimes | None = None
    looks: decisions.Looks | None = None
    endings: Mapping[str, decisions.Ending] = field(default_factory=dict)
    unreadable: Sequence[str] = ()
    names: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def curves(self) -> pd.DataFrame:
        """Values of the metric (variant, seed, step, value) for the variants of figures.

        All are finite: `drop_undefined_steps` removes the steps of a variant with another value.
        """
        finished = [v.name for v in self.plan.variants if self.values(v.name)]
        names = list(dict.fromkeys([self.plan.baseline, *finished]))
        rows: list[tuple[Any, ...]] = []
        # Figures show the baseline and at most MOST_PANELS other variants.
        for name in names[: MOST_PANELS + 1]:
            for cell in self.finished_cells(name):
                curve = cell.curve(self.plan.metric)
                rows += [(name, cell.seed, row.step, row.value) for row in curve]
        frame = pd.DataFrame(rows, columns=["variant", "seed", "step", "value"])
        return drop_undefined_steps(frame.astype({"value": float}), "variant")

    @cached_property
    def _by_variant(self) -> dict[str, list[CellRecord]]:
        """Cells by variant, so that no method searches all cells."""
        groups: dict[str, list[CellRecord]] = {v.name: [] for v in self.plan.variants}
        for cell in self.cells:
            groups.setdefault(cell.variant, []).append(cell)
        return groups

    @cached_property
    def resolution(self) -> float:
        """Step of the metric in printed units: all differences of values are multiples of it."""
        return find_resolution(c.value for c in self.cells if c.value is not None)

    def variant_cells(self, variant: str) -> list[CellRecord]:
        """Return the cells of one variant, in the order of the plan's seeds."""
        return self._by_variant.get(variant, [])

    def finished_cells(self, variant: str | None = None) -> list[CellRecord]:
        """Return the cells with a value, of one variant or of all variants."""
        cells = self.cells if variant is None else self.variant_cells(variant)
        return [cell for cell in cells if cell.value is not None]

    def values(self, variant: str) -> dict[int, float]:
        """Return the study's metric by seed, for the cells that have it."""
        return {c.seed: c.value for c in self.finished_cells(variant) if c.value is not None}

    def measurements(self, name: str, variant: str | None = None) -> list[Any]:
        """Return the recorded measurements `name`, of one variant or of all variants."""
        values = (cell.measurements.get(name) for cell in self.finished_cells(variant))
        return [value for value in values if value is not None]

    def is_mixed(self, variant: str, other: str) -> bool:
        """Return True if results of two variants come from different code or data."""
        cells = self.finished_cells(variant) + self.finished_cells(other)
        return bool(find_differences(cells))

    def config_path(self, variant: str) -> Path | None:
        """Return the first readable config.yaml of a variant's cells."""
        for cell in self.variant_cells(variant):
            if cell.folder is not None:
                path = cell.folder / "config.yaml"
                if os.access(path, os.R_OK):
                    return path
        return None

    @cached_property
    def time_faults(self) -> dict[str, str]:
        """Reason why the times of a variant's cells cannot be compared, or "", by variant."""
        baseline = [cell.measurements for cell in self.finished_cells(self.plan.baseline)]
        faults = {}
        for variant in self.plan.variants:
            cells = [cell.measurements for cell in self.finished_cells(variant.name)]
            faults[variant.name] = find_time_fault(cells, baseline)
        return faults

    @cached_property
    def step_time_faults(self) -> dict[str, str]:
        """The same for `step_time`, which can have been measured alone and in turns."""
        if self.step_times is None or not self.step_times.variants:
            return self.time_faults
        timed = {entry.variant for entry in self.step_times.variants}
        faults = {}
        for variant in self.plan.variants:
            if variant.name in timed or variant.variant in timed:
                faults[variant.name] = ""
            else:
                reasons = [NOT_ALONE, self.time_faults[variant.name]]
                faults[variant.name] = "; ".join(reason for reason in reasons if reason)
        return faults

    def step_time(self, variant: str) -> float | None:
        """Return the step time measured alone, or the median of seeds that agree on it (BUSY)."""
        alone = self._step_time_alone(variant)
        if alone is not None:
            return alone
        times = self.measurements("step_time", variant)
        if times and max(times) <= BUSY * min(times):
            return statistics.median(times)
        return None

    def _step_time_alone(self, variant: str) -> float | None:
        """Return the step time of a variant that was measured alone, None without a measurement.

        It is the ratio to the baseline that was measured in the same session, times the seconds of
        that baseline in its last session, so that sessions on a slower machine do not differ.
        """
        if self.step_times is None:
            return None
        names = {variant}
        for planned in self.plan.variants:
            # Variants under several criteria share the time of one variant.
            if planned.name == variant and planned.variant is not None:
                names.add(planned.variant)
        # Of the last measurement of each kind of cell.
        seconds = {entry.kind: entry.seconds for entry in self.step_times.variants}
        for entry in self.step_times.variants:
            if entry.variant in names:
                baseline_seconds = entry.seconds / entry.ratio
                return entry.ratio * seconds.get(entry.baseline_kind, baseline_seconds)
        return None


def find_differences(cells: Sequence[CellRecord]) -> dict[str, list[str]]:
    """Return the hashes of the code, the data and each module that differ between `cells`.

    A hash with + is that of a cell which was continued with other code, and differs by itself.
    Cells that have not imported a module do not differ in it.
    """
    hashes: defaultdict[str, set[str]] = defaultdict(set)
    for cell in cells:
        for name in ("code", "data"):
            value = cell.measurements.get(name)
            if value is not None:
                hashes[name].add(value)
        for path, value in cell.modules.items():
            hashes[path].add(value)
    modules = sorted(hashes.keys() - {"code", "data"})
    differences: dict[str, list[str]] = {}
    for name in ("code", "data", *modules):
        values = sorted(hashes[name])
        if len(values) > 1 or any("+" in value for value in values):
            # A page that is published must not contain the paths of a machine.
            shown = Path(name).name if name in modules else name
            differences[shown] = values
    return differences


def drop_undefined_steps(frame: pd.DataFrame, group: str) -> pd.DataFrame:
    """Return `frame` without the steps of a `group` at which a seed's value is not finite.

    The mean of the other seeds would be the mean of those that did not fail.
    """
    is_finite = pd.Series(np.isfinite(frame["value"].to_numpy(float)), index=frame.index)
    is_defined = is_finite.groupby([frame[group], frame["step"]]).transform("all")
    return frame[is_defined.astype(bool)]


class Outcome(NamedTuple):
    """Folders or pages that were written, and names of studies and families that were skipped."""

    written: list[Path]
    skipped: list[str]


def read_or_skip(
    read: Callable[[Path], Content], folder: Path | None, name: str = ""
) -> Content | None:
    """Return `read(folder / name)`, or None (and a warning) for a file that cannot be read."""
    if folder is None:
        return None
    try:
        return read(folder / name)
    except (ConfigError, OSError) as error:
        LOG.warning("%s: unreadable and skipped: %s", folder / name, error)
        return None


def read_arrays(path: Path) -> Arrays:
    """Return the arrays of an .npz file, or nothing for a missing or damaged file (a warning)."""
    try:
        with path.open("rb") as stream, np.load(stream, allow_pickle=False) as arrays:
            return dict(arrays)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, EOFError, KeyError, zipfile.BadZipFile):
        LOG.warning("%s: unreadable and skipped", path)
        return {}


def read_studies(runs: Path, names: list[str] | None = None) -> Iterator[StudyRecord]:
    """Read the studies below `runs` (all that have a plan, or those in `names`) one by one.

    A study that cannot be read is skipped with a warning, whatever is wrong with its records.
    Raises ConfigError if `runs` holds no plan, if a name has no plan, or if not one of the studies
    can be read.
    """
    require_folder(runs)
    plans = {path.parent.name: path for path in sorted(runs.glob("*/plan.json"))}
    if not plans:
        raise ConfigError(f"{runs}: contains no study (no */plan.json)")
    for name in names or []:
        require(f"{runs}: has no study", name, plans)
    chosen = names or list(plans)
    skipped_count = 0
    for name in chosen:
        try:
            study = _read_study(plans[name])
        except Exception as error:
            reason = str(error)
            if not isinstance(error, ConfigError):
                reason = f"{plans[name].parent}: {describe_failure(error)}"
            skipped_count += 1
            if skipped_count == len(chosen):
                raise ConfigError(reason) from error
            LOG.warning("%s. This study is skipped.", reason)
        else:
            yield study


def describe_failure(error: Exception) -> str:
    """Return an exception as the end of a line: its records cannot be reported, and why."""
    if isinstance(error, ConfigError):
        return str(error)
    text = escape_control(" ".join(str(error).split()))
    if len(text) > 200:
        text = f"{text[:200]}..."
    return f"its records cannot be reported ({type(error).__name__}: {text})"


def _read_study(path: Path, is_contrast: bool = False) -> StudyRecord:
    """Read the study of the plan at `path`. Raises ConfigError if that is not possible."""
    plan = records.Plan.load(path)
    # The folder of the report has the study's name, so that name must not lead elsewhere.
    if plan.study != path.parent.name:
        raise ConfigError(f"{path}: is the plan of '{plan.study}', not of '{path.parent.name}'")
    require(f"{path}: baseline: no variant", plan.baseline, (v.name for v in plan.variants))
    folder = path.parent
    endings = read_or_skip(decisions.Endings.read, folder, "endings.json")
    ended = {} if endings is None else endings.of_plan(plan)
    cells = [_mark_stopped(cell, ended) for cell in _read_cells(folder, plan)]
    seals = read_or_skip(decisions.Seals.read, folder, "seals.json")
    tuning = read_or_skip(records.Tuning.read, folder, "tuning.json")
    step_times = read_or_skip(records.StepTimes.read, folder, "step_times.json")
    looks = read_or_skip(decisions.Looks.read, folder, "looks.json")
    files = {
        "seals.json": seals,
        "tuning.json": tuning,
        "step_times.json": step_times,
        "looks.json": looks,
        "endings.json": endings,
    }
    unreadable = []
    for name, content in files.items():
        if content is None and (folder / name).exists():
            unreadable.append(name)
    study = StudyRecord(
        plan,
        cells,
        seals=seals,
        tuning=tuning,
        step_times=step_times,
        looks=looks,
        endings=ended,
        unreadable=unreadable,
    )
    _require_metric(path, study)
    if plan.contrast and not is_contrast:
        return replace(study, contrast=_read_contrast(path, plan.contrast, plan.metric))
    return study


def _mark_stopped(cell: CellRecord, ended: Mapping[str, decisions.Ending]) -> CellRecord:
    """Return the cell with the state "stopped" if its variant has ended before it was started."""
    is_unstarted = cell.status in ("missing", "interrupted")
    return replace(cell, status="stopped") if is_unstarted and cell.variant in ended else cell


def _read_cells(folder: Path, plan: records.Plan) -> list[CellRecord]:
    """Read the planned cells in their order, and remove them from the plan.

    Each is freed as soon as its record has been read: a study can have 50,000 cells.
    """
    plan.cells.reverse()
    cells = []
    while plan.cells:
        cells.append(_read_cell(str(folder), plan.cells.pop(), plan.metric))
    return cells


def _require_metric(path: Path, study: StudyRecord) -> None:
    """Raise ConfigError if cells have results, and not one of them has the study's metric."""
    name = study.plan.metric.name
    without = [cell for cell in study.cells if cell.status == f"without {name}"]
    if not without or study.finished_cells():
        return
    result = read_result(Path(without[0].path), without[0].identity)
    nearest = suggest(name, result.metrics) if result else ""
    raise ConfigError(f"{path}: metric.name: no cell has '{name}'{nearest}")


def _read_contrast(path: Path, name: str, metric: records.Metric) -> StudyRecord | None:
    """Return the study `name` beside the plan at `path`, None if it cannot be compared."""
    other = path.parents[1] / name / "plan.json"
    if not other.exists():
        return None
    contrast = read_or_skip(partial(_read_study, is_contrast=True), other)
    if contrast is None:
        return None
    if contrast.plan.metric != metric:
        LOG.warning("%s: contrast: the metric of %r differs", path, name)
        return None
    return contrast


def _read_cell(study: str, planned: records.PlannedCell, metric: records.Metric) -> CellRecord:
    """Read the folder of a planned cell of the study in the folder `study`."""
    path = f"{study}/{planned.path}"
    result = read_result(Path(path), planned.identity)

    def record(status: str, **content: Any) -> CellRecord:
        # Thousands of cells share the names of variants and states.
        variant = sys.intern(planned.variant)
        return CellRecord(
            variant,
            planned.seed,
            sys.intern(status),
            identity=planned.identity,
            path=path,
            **content,
        )

    if result is None:
        identity = planned.identity
        state = read_or_skip(lambda folder: read_cell(folder, identity).state, Path(path))
        return record(state or "unreadable")
    if metric.name not in result.metrics:
        return record(f"without {metric.name}")
    value = result.metrics[metric.name] * metric.scale
    if not math.isfinite(value):
        LOG.warning("%s: %s times %g is not finite", path, metric.name, metric.scale)
        return record("unreadable")
    return record(
        "done",
        value=value,
        measurements=_measure(result, metric),
        modules=_shorten_hashes(result.inputs),
    )


def _shorten_hashes(inputs: Mapping[str, str]) -> dict[str, str]:
    """Return the first digits of the hashes of the user's modules, by path.

    A hash with + has those of the code before and after a cell was continued.
    """
    modules = {}
    for name, stamp in inputs.items():
        if name.endswith(".py"):
            parts = [part[:12] for part in stamp.split("+")]
            modules[sys.intern(name)] = sys.intern("+".join(parts))
    return modules


def _waiting_share(step: records.Spread, wall: records.Spread) -> float:
    """Return the share of the wall time of a step in which the device waited, 0 to 1."""
    if wall.median <= 0:
        return 0.0
    return max(0.0, 1 - step.median / wall.median)


def _measure(result: records.Result, metric: records.Metric) -> Row:
    """Return the measurements of a finished cell, in the order of the columns of per_seed.csv."""
    measured = {name: getattr(result, name) for name in MEASUREMENTS}
    measured["step_time"] = result.step_time.median
    measured["step_time_iqr"] = result.step_time.iqr
    evaluation_time = result.evaluation_time
    measured["evaluation_time"] = evaluation_time and evaluation_time.median
    if result.stopped_early:
        measured["stopped_early"] = True
    if result.branched_from is not None:
        measured["shared_steps"] = result.branched_from.steps
    chance = result.chance.get(metric.name)
    if chance is not None:
        measured["chance"] = chance * metric.scale
    if result.is_device_shared:
        measured["is_device_shared"] = True
    if result.step_wall_time is not None:
        measured["waiting"] = _waiting_share(result.step_time, result.step_wall_time)
    device = result.device
    if result.devices > 1:
        device = f"{result.devices} x {device}"
    versions = [f"{package} {version}" for package, version in sorted(result.versions.items())]
    # Thousands of cells share these texts.
    measured["device"] = sys.intern(device)
    measured["code"] = sys.intern(result.code)
    measured["data"] = sys.intern(result.data)
    measured["versions"] = sys.intern("; ".join(versions))
    for name, value in sorted(result.metrics.items()):
        measured[sys.intern(f"metric {name}")] = value
    return Row(measured)
