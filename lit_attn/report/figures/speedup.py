"""Effective speed-up of each variant at each size: in compute, and in wall-clock time.

The compute multiplier m says how many times the variant's training FLOPs the baseline needs for the
same value (`lit_attn.report.figures.scaling`). With t seconds and f training FLOPs of a step, the
baseline needs m (t0 / f0) / (t / f) times the variant's training time.
"""

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import pandas as pd

from lit_attn.cells.records import Plan
from lit_attn.report.figures import drawing
from lit_attn.report.figures.drawing import COLOURS, GREY
from lit_attn.report.records.study_record import StudyRecord
from lit_attn.report.statistics import stats
from lit_attn.report.tables.columns import NOTHING, format_number
from lit_attn.report.tables.formats import Cell, Table, named_table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Multipliers = Mapping[tuple[str, str], Mapping[int, float]]
"""Compute multipliers of each seed, by variant and level."""

PANELS = {"compute": "compute multiplier", "time": "wall-clock multiplier"}
"""Label of the axis of each kind of speed-up."""


class SpeedUp(NamedTuple):
    """Geometric mean of a multiplier over seeds with its 95 % interval; above 1 is faster."""

    variant: str
    level: str
    kind: str
    mean: float
    low: float | None
    high: float | None


def find_speedups(studies: Sequence[StudyRecord], multipliers: Multipliers) -> list[SpeedUp]:
    """Return the speed-ups of each variant at each level, `compute` before `time`.

    `studies` are the levels. A time that cannot be compared with the baseline's gives none.
    """
    speedups = []
    for study in studies:
        for variant in study.plan.variants:
            by_seed = multipliers.get((variant.name, study.plan.level), {})
            if not by_seed:
                continue
            factors = {"compute": 1.0, "time": _find_time_factor(study, variant.name)}
            for kind, factor in factors.items():
                if factor is not None:
                    logarithms = [math.log(factor * value) for value in by_seed.values()]
                    speedup = _summarise(variant.name, study.plan.level, kind, logarithms)
                    speedups.append(speedup)
    return speedups


def _find_time_factor(study: StudyRecord, variant: str) -> float | None:
    """Return the baseline's seconds for each FLOP over those of a variant, None if unknown."""
    baseline_rate = _find_seconds_per_flop(study, study.plan.baseline)
    rate = _find_seconds_per_flop(study, variant)
    if baseline_rate is None or rate is None:
        return None
    return baseline_rate / rate


def _find_seconds_per_flop(study: StudyRecord, variant: str) -> float | None:
    """Return the seconds of a step for each of its training FLOPs, None if unknown or faulty."""
    seconds = study.step_time(variant)
    flops = _find_step_flops(study, variant)
    if study.step_time_faults[variant] or not seconds or not flops:
        return None
    return seconds / flops


def _find_step_flops(study: StudyRecord, variant: str) -> float | None:
    """Return the training FLOPs of a step: three forward passes for each sample."""
    for cell in study.finished_cells(variant):
        samples = cell.measurements.get("batch_size")
        flops = cell.measurements.get("flops")
        if samples and flops:
            return float(3 * samples * flops)
    return None


def _summarise(variant: str, level: str, kind: str, logarithms: list[float]) -> SpeedUp:
    """Return the geometric mean of multipliers with Student's interval of their logarithms."""
    mean = math.fsum(logarithms) / len(logarithms)
    interval = stats.paired_interval(logarithms)
    if interval is None:
        return SpeedUp(variant, level, kind, math.exp(mean), None, None)
    ends = [math.exp(min(end, 700.0)) for end in (interval.low, interval.high)]
    return SpeedUp(variant, level, kind, math.exp(mean), *ends)


def make_speedup_table(speedups: Sequence[SpeedUp], plan: Plan) -> Table:
    """Return one row for each variant and level, and the sentences about the largest level."""
    by_place: dict[tuple[str, str], dict[str, SpeedUp]] = {}
    for speedup in speedups:
        by_place.setdefault((speedup.variant, speedup.level), {})[speedup.kind] = speedup
    rows = []
    for (variant, level), kinds in by_place.items():
        texts = [variant, level]
        texts += [_format(kinds.get(kind)) for kind in PANELS]
        rows.append([Cell(text) for text in texts])
    table = named_table("speedup", rows, family=plan.family, baseline=plan.baseline)
    table.notes.extend(describe_speedups(speedups, plan))
    return table


def describe_speedups(speedups: Sequence[SpeedUp], plan: Plan) -> list[str]:
    """Return a sentence about each variant at the largest level that it has."""
    last: dict[str, dict[str, SpeedUp]] = {}
    for speedup in speedups:
        kinds = last.setdefault(speedup.variant, {})
        # Levels come in the order of their sizes.
        if kinds and next(iter(kinds.values())).level != speedup.level:
            kinds.clear()
        kinds[speedup.kind] = speedup
    sentences = []
    for variant, kinds in last.items():
        level = next(iter(kinds.values())).level
        parts = [f"{_format(kinds['compute'])} times the compute"]
        if "time" in kinds:
            parts.append(f"{_format(kinds['time'])} times the training time")
        sentences.append(
            f"At {level}, {plan.baseline} needs {' and '.join(parts)} of {variant} for the same "
            f"{plan.metric.label}."
        )
    return sentences


def _format(speedup: SpeedUp | None) -> str:
    """Return a multiplier with its interval, as "1.05 [1.01, 1.09]"."""
    if speedup is None:
        return NOTHING
    text = format_number(speedup.mean, ".2f")
    if speedup.low is None or speedup.high is None:
        return text
    return f"{text} [{format_number(speedup.low, '.2f')}, {format_number(speedup.high, '.2f')}]"


def draw_speedups(
    speedups: Sequence[SpeedUp], styles: Mapping[str, drawing.Style]
) -> "Figure | None":
    """Draw the multipliers of at most seven variants over the levels, a panel for each kind."""
    variants = list(dict.fromkeys(speedup.variant for speedup in speedups))[: len(COLOURS)]
    measured_kinds = {speedup.kind for speedup in speedups}
    kinds = [kind for kind in PANELS if kind in measured_kinds]
    levels = list(dict.fromkeys(speedup.level for speedup in speedups))
    if not variants:
        return None
    figure = drawing.new_figure(3.0)
    panels = figure.subplots(1, len(kinds), sharey=True, squeeze=False)[0]
    key: drawing.Key = {name: (styles[name].colour, styles[name].dash) for name in variants}
    for axes, kind in zip(panels, kinds, strict=True):
        axes.axhline(1.0, color=GREY, linewidth=0.8)
        for number, variant in enumerate(variants):
            shown = [s for s in speedups if (s.variant, s.kind) == (variant, kind)]
            frame = pd.DataFrame(shown, columns=SpeedUp._fields)
            # Points of one level stand side by side.
            shift = 0.08 * (number - (len(variants) - 1) / 2)
            places = frame["level"].map(levels.index) + shift
            lower = (frame["mean"] - frame["low"].astype(float)).fillna(0.0)
            upper = (frame["high"].astype(float) - frame["mean"]).fillna(0.0)
            style = {"color": styles[variant].colour, "fmt": "o", "ms": 3.5, "elinewidth": 0.9}
            points = (places, frame["mean"])
            drawing.draw_points(axes, points, variant, frame["level"], yerr=[lower, upper], **style)
        drawing.use_log_scale(axes, "y")
        axes.set_xticks(range(len(levels)), levels)
        axes.set_xlabel("size")
        axes.set_ylabel(PANELS[kind])
    drawing.add_legend(figure, key)
    return figure
