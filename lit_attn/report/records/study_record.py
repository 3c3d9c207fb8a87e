"""Record of a study in the report: the plan, and the state and results of every planned cell."""

import os
import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from lit_attn.cells import decisions, records
from lit_attn.cells.floors import Floors
from lit_attn.cells.rows import MetricRow, read_metrics
from lit_attn.cells.samples import Samples
from lit_attn.cells.screening import Screening
from lit_attn.report.figures.drawing import MOST_PANELS
from lit_attn.report.numbers import fill
from lit_attn.report.records.skipped import read_or_skip
from lit_attn.report.records.timing import NOT_ALONE, find_time_fault
from lit_attn.report.statistics.shares import are_two_valued
from lit_attn.report.statistics.significance import OWN_TEST
from lit_attn.report.statistics.significance_base import SignificanceTest
from lit_attn.report.statistics.stats import ALPHA, find_resolution
from lit_attn.report.statistics.times import count_events

NEWER = "of a newer version"
"""Status of a cell whose result was written by a newer version of lit_attn."""

BUSY_RATIO = 1.2
"""Ratio of the longest to the shortest time over seeds from which on a time is not printed."""


@dataclass(frozen=True, slots=True)
class CellRecord:
    """A planned cell and the content of its folder.

    `status` is a state of `lit_attn.cells.folder` or "without <metric>". Only a cell with status
    "done" has a value (the study's metric in printed units) and measurements: the columns of
    per_seed.csv, times in seconds, memory in bytes. The value is a `Censored` one if the metric is
    the time until an event that did not come. One of a smoke run has no value, and a cell of
    another program's table no path.
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
        """True if `run` would train the cell: it has no result and has not diverged."""
        if self.status == "error" and not self.path:
            # A failed run of another program is one of its results.
            return False
        has_ended = self.status in ("done", "diverged", NEWER)
        return not has_ended and not self.status.startswith("without ")

    @property
    def is_open(self) -> bool:
        """True if the planned cell has neither a result nor a failure yet."""
        return self.status in ("missing", "running", "interrupted", "unreadable")

    def curve(self, metric: records.Metric | str) -> list[MetricRow]:
        """Return the logged rows of `metric` in printed units, or of a name in recorded units."""
        if isinstance(metric, str):
            name = metric
            scale = 1.0
        else:
            name = metric.name
            scale = metric.scale
        rows = read_or_skip(read_metrics, self.folder, "metrics.csv") or []
        return [row._replace(value=row.value * scale) for row in rows if row.name == name]


@dataclass(frozen=True)
class StudyRecord:
    """A plan and all of its cells, in the order of the plan.

    `plan.cells` is empty: `cells` has the same content and more. `unreadable` names the files of
    the study that exist and cannot be read. `names` has the names of variants by their labels if
    the labels stand in all other places (`lit_attn.report.tables.labels`). `test` answers every
    question about significance. `alpha` is the error that all tests of the study may use together.
    """

    plan: records.Plan
    cells: list[CellRecord]
    seals: decisions.Seals | None = None
    tuning: records.Tuning | None = None
    screening: Screening | None = None
    step_times: records.StepTimes | None = None
    looks: decisions.Looks | None = None
    floors: Floors | None = None
    samples: Samples | None = None
    unreadable: Sequence[str] = ()
    names: Mapping[str, str] = field(default_factory=dict)
    folder: Path | None = None
    test: SignificanceTest = OWN_TEST
    alpha: float = ALPHA

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

    @cached_property
    def is_two_valued(self) -> bool:
        """True if the test has an interval for shares, and every value is that of 0 or 1."""
        values = [cell.value for cell in self.cells if cell.value is not None]
        if not values or not self.test.share_words:
            return False
        return are_two_valued(values, self.plan.metric.scale)

    @property
    def test_words(self) -> Mapping[str, str]:
        """Placeholders of captions about the test, with the name of the baseline."""
        words = {**self.test.words}
        if self.is_two_valued:
            words |= self.test.share_words
        values = {
            "baseline": self.plan.baseline,
            "high": f"{self.plan.metric.scale:g}",
            "planned": len(self.plan.seeds),
        }
        return {key: fill(text, **values) for key, text in words.items()}

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

    def center(self, variant: str) -> float | None:
        """Return the mean of a variant, or the median of its times until an event.

        It is None without a result, and if over half of the runs have not had the event.
        """
        return self.test.find_center(self.values(variant).values())

    def count_events(self, variant: str) -> int | None:
        """Return the runs with the event of a metric that is a time until it, None for others.

        It is None for a smoke run, too: its runs end before the event can come.
        """
        if not self.plan.metric.event or self.plan.is_smoke:
            return None
        return count_events(self.values(variant).values())

    def measurements(self, name: str, variant: str | None = None) -> list[Any]:
        """Return the recorded measurements `name`, of one variant or of all variants."""
        cells = self.cells if variant is None else self.variant_cells(variant)
        values = (cell.measurements.get(name) for cell in cells)
        return [value for value in values if value is not None]

    def is_mixed(self, variant: str, other: str) -> bool:
        """Return True if results of two variants come from different code or data."""
        cells = self.finished_cells(variant) + self.finished_cells(other)
        return bool(find_differences(cells))

    def config_paths(self, variant: str) -> Iterator[Path]:
        """Yield the config.yaml of a variant's cells that this process may read."""
        for cell in self.variant_cells(variant):
            if cell.folder is not None:
                path = cell.folder / "config.yaml"
                if os.access(path, os.R_OK):
                    yield path

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
        """Return the step time measured alone, or the median of seeds within BUSY_RATIO."""
        alone = self._step_time_alone(variant)
        if alone is not None:
            return alone
        times = self.measurements("step_time", variant)
        if times and max(times) <= BUSY_RATIO * min(times):
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
        # The last measurement of each kind of cell counts.
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
