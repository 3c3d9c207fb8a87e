"""Figures of a study's results: differences of every seed, learning curves, costs."""

import itertools
import math
import statistics
from collections import defaultdict
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter

from lit_attn.report import drawing
from lit_attn.report.columns import STAR
from lit_attn.report.comparison import Comparisons
from lit_attn.report.drawing import COLOURS, GREY
from lit_attn.report.effects import Effect
from lit_attn.report.read import BUSY, StudyRecord


class Difference(NamedTuple):
    """A row of a forest plot: its value with every seed, its interval, mean and star."""

    row: int
    name: str
    by_seed: list[float]
    low: float | None
    mean: float
    high: float | None
    is_starred: bool


def draw_seeds(study: StudyRecord, comparisons: Comparisons) -> Figure:
    """Draw a forest plot: the value and difference of every seed, and the margin as a band."""
    metric, baseline = study.plan.metric, study.values(study.plan.baseline)
    names = _order_variants(study, comparisons)[: drawing.MOST_ROWS]
    figure = drawing.new_figure(0.26 * len(names) + 0.75)
    left, right = figure.subplots(1, 2, sharey=True)
    left.set_xlim(_usual_range([v for name in names for v in study.values(name).values()]))
    differences, labels = [], []
    for row, (name, label) in enumerate(zip(names, drawing.short_names(names, 36), strict=True)):
        values = study.values(name)
        _draw_dots(left, row, list(values.values()), name)
        if values:
            mean = statistics.fmean(values.values())
            bars = left.plot(mean, row, "|", color="black", markersize=13)
            drawing.name_values(bars[0], name, [f"mean {drawing.short(mean)}"])
        record = comparisons.records[name]
        pairs = [value - baseline[seed] for seed, value in values.items() if seed in baseline]
        if pairs and name != study.plan.baseline:
            interval = (record.get("low"), record["difference"], record.get("high"))
            differences.append(Difference(row, name, pairs, *interval, record["significant"]))
        planned = len(study.variant_cells(name))
        labels.append(label if len(values) == planned else f"{label} ({len(values)}/{planned})")
    _draw_differences(right, differences, metric.margin or 0.0)
    left.set_yticks(range(len(names)), labels)
    left.set(xlabel=metric.label, ylim=(len(names) - 0.5, -0.5))
    right.locator_params(axis="x", nbins=5)
    arrow = "better →" if metric.goal == "max" else "← better"
    right.set_xlabel(f"difference to the first row, {arrow}")
    return figure


def draw_effects(effects: list[Effect], label: str, level: float) -> Figure | None:
    """Draw the effects of a factorial study as a forest plot, with a star for p <= `level`."""
    effects = effects[: drawing.MOST_ROWS]
    if not effects:
        return None
    figure = drawing.new_figure(0.26 * len(effects) + 0.75)
    axes = figure.subplots()
    middles = [(e.by_seed, e.low, e.difference, e.high) for e in effects]
    rows = [Difference(i, e.effect, *middles[i], e.p <= level) for i, e in enumerate(effects)]
    _draw_differences(axes, rows)
    axes.set_yticks(range(len(effects)), drawing.short_names((e.effect for e in effects), 60))
    axes.set_ylim(len(effects) - 0.5, -0.5)
    axes.set_xlabel(f"effect on {label}")
    return figure


def _draw_differences(axes: Axes, rows: list[Difference], margin: float = 0.0) -> None:
    """Draw the values of each row, below them the interval with a bar at the mean, and a band."""
    ends = [end for row in rows for end in (*row.by_seed, row.low, row.high) if end is not None]
    left, right = _usual_range(ends)
    axes.set_xlim(min(left, -1.1 * margin), max(right, 1.1 * margin))
    axes.axvspan(-margin, margin, color=GREY, alpha=0.18, linewidth=0)
    axes.axvline(0, color=GREY, linewidth=0.8)
    beside = axes.get_yaxis_transform()
    for row, name, by_seed, low, mean, high, is_starred in rows:
        _draw_dots(axes, row, by_seed, name)
        if low is not None and high is not None:
            (line,) = axes.plot([low, high], [row + 0.24] * 2, color="black", linewidth=1)
            drawing.name_values(
                line, name, [f"lower end {drawing.short(low)}", f"upper end {drawing.short(high)}"]
            )
        (bar,) = axes.plot(mean, row + 0.24, "|", color="black", markersize=6)
        drawing.name_values(bar, name, [f"mean {drawing.short(mean)}"])
        if is_starred:
            star = axes.text(1.025, row, STAR, transform=beside, va="center", fontsize=11)
            drawing.name_values(star, name)


def _order_variants(study: StudyRecord, comparisons: Comparisons) -> list[str]:
    """Return the baseline, then the other variants from the best to the worst difference."""
    records, sign = comparisons.records, -1 if study.plan.metric.goal == "max" else 1
    keys = {name: sign * r.get("difference", sign * math.inf) for name, r in records.items()}
    return sorted(records, key=lambda name: (name != study.plan.baseline, keys[name]))


def _usual_range(values: list[float]) -> tuple[float, float]:
    """Return the range of `values` with a margin, without far outliers (three quartile ranges)."""
    if not values:
        return 0.0, 1.0
    low, high = np.percentile(values, [25, 75])
    reach = 3 * (high - low)
    inside = [v for v in values if low - reach <= v <= high + reach] if reach else values
    margin = 0.06 * (max(inside) - min(inside)) or 0.05 * abs(inside[0]) or 0.5
    return min(inside) - margin, max(inside) + margin


def _draw_dots(axes: Axes, row: int, values: list[float], name: str) -> None:
    """Draw one dot for each value; equal values are stacked, far outliers marked at the edge."""
    low, high = axes.get_xlim()
    stacks: dict[int, int] = defaultdict(int)
    dots = []
    for value in sorted(values):
        if low <= value <= high:
            place = round(100 * (value - low) / (high - low))
            dots.append((value, row - 0.09 * stacks[place]))
            stacks[place] += 1
    x, y = zip(*dots, strict=True) if dots else ((), ())
    (line,) = axes.plot(x, y, "o", color=COLOURS[0], markersize=4, alpha=0.55, mew=0)
    drawing.name_values(line, name, map(drawing.short, x))
    below, above = [v for v in values if v < low], [v for v in values if v > high]
    for outliers, edge, marker, align in ((below, low, "<", "left"), (above, high, ">", "right")):
        if outliers:
            span = " to ".join(
                dict.fromkeys(drawing.short(v) for v in (min(outliers), max(outliers)))
            )
            (line,) = axes.plot(edge, row, marker, color=COLOURS[1], markersize=5, clip_on=False)
            drawing.name_values(line, name, [span])
            style: dict[str, Any] = {"ha": align, "va": "bottom", "fontsize": 6.5}
            text = axes.text(edge, row - 0.1, f"  {span}  ", color=COLOURS[1], **style)
            drawing.name_values(text, name)


def draw_progress(study: StudyRecord, comparisons: Comparisons) -> Figure | None:
    """Draw metric and paired difference against steps, training FLOPs and seconds of training.

    The difference is that to the baseline with the same seed at the same (interpolated) cost.
    """
    names = _order_variants(study, comparisons)[: len(COLOURS)]
    values = study.curves.pivot_table(index="step", columns=["variant", "seed"], values="value")
    shown = [name for name in names if name in values and len(values[name].dropna()) > 2]
    if len(shown) < 2 or shown[0] != study.plan.baseline:
        return None
    costs: dict[str, list[float | None]] = {
        "step": [1.0] * len(shown),
        "training FLOPs": [_step_flops(study, name) for name in shown],
        "seconds of training": [_comparable_step_time(study, name) for name in shown],
    }
    units = {label: scales for label, scales in costs.items() if None not in scales}
    figure = drawing.new_figure(4.2)
    grid = figure.subplots(2, len(units), sharex="col", sharey="row", squeeze=False)
    key: drawing.Key = {name: (colour, "-") for name, colour in zip(shown, COLOURS, strict=False)}
    for (top, bottom), (label, scales) in zip(grid.T, units.items(), strict=True):
        start = None
        for name, scale in zip(shown, scales, strict=True):
            rows = values[name].dropna()
            rows.index = rows.index * float(scale or 1)
            start = rows if start is None else start
            drawing.draw_band(top, rows.stack().droplevel(1), *key[name], label=name)
            inside = rows[rows.index <= start.index.max()]
            seeds = inside.columns.intersection(start.columns)
            reference = {seed: np.interp(inside.index, start.index, start[seed]) for seed in seeds}
            differences = {seed: inside[seed] - reference[seed] for seed in seeds}
            if name != shown[0] and differences:
                drawing.draw_band(bottom, pd.concat(differences.values()), *key[name], label=name)
        bottom.axhline(0, color=GREY, linewidth=0.8)
        bottom.set_xlabel(label)
    grid[0][0].set_ylabel(study.plan.metric.label)
    grid[1][0].set_ylabel(f"difference to {drawing.short_names(shown, 20)[0]}")
    drawing.add_legend(figure, key)
    return figure


def _comparable_step_time(study: StudyRecord, variant: str) -> float | None:
    """Return the step time of a variant that was measured in turns with the baseline."""
    return None if study.step_time_faults.get(variant) else study.step_time(variant)


def _step_flops(study: StudyRecord, variant: str) -> float | None:
    """Return the FLOPs of a training step: counted, or three forward passes of a batch."""
    planned = next(entry for entry in study.plan.variants if entry.name == variant)
    passes, batches = (study.measurements(name, variant) for name in ("flops", "batch_size"))
    return planned.step_flops or (3.0 * passes[0] * batches[0] if passes and batches else None)


COSTS = {
    "parameters": ("parameters", ""),
    "flops": ("FLOPs per sample, forward", ""),
    "step_time": ("time per training step", "s"),
}
"""Label and unit by measurement."""


def draw_cost(study: StudyRecord, summary: pd.DataFrame) -> Figure | None:
    """Draw means of the best variants against each cost that differs by more than one percent.

    Step times are drawn only for variants whose seeds agree on them, and that were measured in
    turns with the baseline. The legend orders the variants by their means. Returns None if all
    costs are equal or unknown.
    """
    is_ascending = study.plan.metric.goal == "min"
    frame = summary[summary["n"] > 0].sort_values("mean", ascending=is_ascending, kind="stable")
    is_baseline = frame["variant"] == study.plan.baseline
    frame = frame[is_baseline | ((~is_baseline).cumsum() < drawing.MOST_COSTS)].fillna({"sd": 0.0})
    frame = frame.astype(dict.fromkeys(("mean", "sd", *COSTS), float))
    is_busy = (frame["step_time_ratio"] > BUSY).fillna(False)
    has_fault = frame["step_time_fault"].fillna("").astype(bool)
    frame["step_time"] = frame["step_time"].mask(is_busy | has_fault)
    costs = [c for c in COSTS if frame[c].count() > 1 and frame[c].max() > 1.01 * frame[c].min()]
    if not costs:
        return None
    figure = drawing.new_figure(max(2.5, 0.15 * len(frame) + 0.7))
    panels = figure.subplots(1, len(costs), sharey=True, squeeze=False)[0]
    ends = (frame["mean"] - frame["sd"], frame["mean"] + frame["sd"])
    low, high = _usual_range(pd.concat(ends).tolist())
    entries = {}
    styles = zip(itertools.cycle(COLOURS), itertools.cycle("os^DvPX*"), strict=False)
    names = drawing.short_names(frame["variant"], 28)
    rows = zip(names, frame.to_dict("records"), styles, strict=False)
    for label, row, (colour, marker) in rows:
        # The legend and the page say where a far outlier is; its error bar would lie elsewhere.
        mean = row["mean"]
        is_far = not low <= mean <= high
        label += f" ({drawing.short(mean)})" if is_far else ""
        style = {"fmt": marker, "color": colour, "ms": 4.5, "clip_on": not is_far}
        for axes, cost in zip(panels, costs, strict=True):
            if not math.isnan(row[cost]):
                place = (row[cost], min(max(mean, low), high), 0.0 if is_far else row["sd"])
                name, at = row["variant"], drawing.short(row[cost])
                drawn = drawing.draw_points(axes, place, name, [at], **style)
                drawing.name_values(drawn.lines[0], name, [f"{drawing.short(mean)} at {at}"])
                entries[name] = (drawn, label)
    for axes, cost in zip(panels, costs, strict=True):
        axes.set_ylim(low, high)
        axes.margins(x=0.1)
        label, unit = COSTS[cost]
        axes.set_xlabel(label)
        axes.xaxis.set_major_formatter(EngFormatter(unit, sep=" " if unit else ""))
        axes.locator_params(axis="x", nbins=4)
    panels[0].set_ylabel(study.plan.metric.label)
    figure.legend(*zip(*entries.values(), strict=True), loc="outside right center", fontsize=6.5)
    return figure
