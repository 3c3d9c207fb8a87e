"""Figures of a study's results: differences of every seed, learning curves, costs."""

import itertools
import math
import statistics
from collections import defaultdict
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from lit_attn.report import drawing
from lit_attn.report.columns import STAR
from lit_attn.report.comparison import ALPHA, Comparisons
from lit_attn.report.drawing import COLOURS, GREY, sd, shorten
from lit_attn.report.effects import Effect
from lit_attn.report.read import StudyRecord

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")


def draw_seeds(study: StudyRecord, comparisons: Comparisons) -> "Figure":
    """Draw a forest plot: the value of every seed, and its difference to the baseline."""
    metric, baseline = study.plan.metric, study.values(study.plan.baseline)
    names = _order_variants(study, comparisons)[: drawing.MOST_ROWS]
    figure = drawing.new_figure(0.26 * len(names) + 0.75)
    left, right = figure.subplots(1, 2, sharey=True)
    differences = {
        name: [v - baseline[seed] for seed, v in study.values(name).items() if seed in baseline]
        for name in names
        if name != study.plan.baseline
    }
    left.set_xlim(_usual_range([v for name in names for v in study.values(name).values()]))
    ends = [comparisons.records.get(name, {}).get(end) for name in names for end in ("low", "high")]
    shown = [*itertools.chain(*differences.values()), *(end for end in ends if end is not None)]
    right.set_xlim(_usual_range(shown))
    right.axvline(0, color=GREY, linewidth=0.8)
    for row, name in enumerate(names):
        values = list(study.values(name).values())
        _draw_dots(left, row, values)
        if values:
            left.plot(statistics.fmean(values), row, "|", color="black", markersize=13)
        if not (pairs := differences.get(name)):
            continue
        record = comparisons.records[name]
        interval = (record.get("low"), record["difference"], record.get("high"))
        _draw_differences(right, row, pairs, interval, record["significant"])
    left.set_yticks(range(len(names)), [_label_with_count(study, name) for name in names])
    left.set_ylim(len(names) - 0.5, -0.5)
    left.set_xlabel(metric.label)
    arrow = "better →" if metric.goal == "max" else "← better"
    right.set_xlabel(f"difference to the first row, {arrow}")
    return figure


def draw_effects(effects: list[Effect], label: str) -> "Figure | None":
    """Draw the effects of a factorial study as a forest plot."""
    effects = effects[: drawing.MOST_ROWS]
    if not effects:
        return None
    figure = drawing.new_figure(0.26 * len(effects) + 0.75)
    axes = figure.subplots()
    axes.axvline(0, color=GREY, linewidth=0.8)
    axes.set_xlim(_usual_range([v for e in effects for v in (*e.by_seed, e.low, e.high) if v]))
    for row, effect in enumerate(effects):
        ends = (effect.low, effect.difference, effect.high)
        _draw_differences(axes, row, effect.by_seed, ends, effect.p <= ALPHA)
    axes.set_yticks(range(len(effects)), [shorten(effect.effect, 60) for effect in effects])
    axes.set_ylim(len(effects) - 0.5, -0.5)
    axes.set_xlabel(f"effect on {label}")
    return figure


def _draw_differences(
    axes: "Axes",
    row: int,
    values: list[float],
    interval: tuple[float | None, float, float | None],
    is_starred: bool,
) -> None:
    """Draw differences of all seeds, and below them their interval: low end, mean, high end."""
    _draw_dots(axes, row, values)
    low, mean, high = interval
    if low is not None and high is not None:
        axes.plot([low, high], [row + 0.24] * 2, color="black", linewidth=1)
    axes.plot(mean, row + 0.24, "|", color="black", markersize=6)
    if is_starred:
        place = axes.get_yaxis_transform()
        axes.text(1.01, row, STAR, transform=place, va="center", fontsize=11)


def _order_variants(study: StudyRecord, comparisons: Comparisons) -> list[str]:
    """Return the baseline, then the variants from the best to the worst difference."""
    sign = -1 if study.plan.metric.goal == "max" else 1
    names = [variant.name for variant in study.plan.variants]
    keys = {
        name: sign * comparisons.records.get(name, {}).get("difference", sign * math.inf)
        for name in names
    }
    others = [name for name in names if name != study.plan.baseline]
    return [study.plan.baseline, *sorted(others, key=keys.__getitem__)]


def _usual_range(values: list[float]) -> tuple[float, float]:
    """Return the range of `values` with a margin, without far outliers (three quartile ranges)."""
    if not values:
        return 0.0, 1.0
    low, high = np.percentile(values, [25, 75])
    reach = 3 * (high - low)
    inside = [v for v in values if low - reach <= v <= high + reach] if reach else values
    margin = 0.06 * (max(inside) - min(inside)) or 0.05 * abs(inside[0]) or 0.5
    return min(inside) - margin, max(inside) + margin


def _draw_dots(axes: "Axes", row: int, values: list[float]) -> None:
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
    axes.plot(x, y, "o", color=COLOURS[0], markersize=4, alpha=0.55, mew=0)
    below, above = [v for v in values if v < low], [v for v in values if v > high]
    for outliers, edge, marker, align in ((below, low, "<", "left"), (above, high, ">", "right")):
        if outliers:
            ends = dict.fromkeys(f"{value:.4g}" for value in (min(outliers), max(outliers)))
            axes.plot(edge, row, marker, color=COLOURS[1], markersize=5, clip_on=False)
            text = f"  {' to '.join(ends)}  "
            axes.text(edge, row - 0.1, text, ha=align, va="bottom", fontsize=6.5, color=COLOURS[1])


def _label_with_count(study: StudyRecord, variant: str) -> str:
    done, planned = len(study.values(variant)), len(study.variant_cells(variant))
    name = shorten(variant, 36)
    return name if done == planned else f"{name} ({done}/{planned})"


def draw_curves(study: StudyRecord) -> "Figure | None":
    """Draw a panel for each variant: its metric over training, and the baseline's.

    Curves of fewer than three evaluations show no learning and are not drawn.
    """
    unit, curves = _read_curves(study)
    curves = {name: curve for name, curve in curves.items() if curve.index.nunique() > 2}
    baseline = curves.get(study.plan.baseline)
    shown = {name: curve for name, curve in curves.items() if name != study.plan.baseline}
    shown = dict(list((shown or curves).items())[: drawing.MOST_PANELS])
    if not shown:
        return None
    figure, panels = drawing.new_panels(len(shown))
    for axes, (name, curve) in zip(panels, shown.items(), strict=True):
        if baseline is not None and curve is not baseline:
            drawing.draw_band(axes, baseline, GREY, "--")
        drawing.draw_band(axes, curve, COLOURS[0], "-")
        axes.set_title(drawing.panel_title(name))
    panels[0].set_ylim(_late_range([*shown.values(), *([] if baseline is None else [baseline])]))
    drawing.use_integer_ticks(panels[0])
    figure.supxlabel(unit, fontsize=8)
    figure.supylabel(study.plan.metric.label, fontsize=8)
    return figure


def _read_curves(study: StudyRecord) -> "tuple[str, dict[str, pd.Series[float]]]":
    """Return the unit of time ("epoch" or "step") and each variant's finite values by time."""
    frame = study.curves
    # A language model can be evaluated many times in one epoch; then only steps are distinct.
    unit = "step" if frame.duplicated(["variant", "seed", "epoch"]).any() else "epoch"
    groups = frame.set_index(unit).groupby("variant", sort=False)["value"]
    return unit, {str(name): values for name, values in groups}


def _late_range(curves: "list[pd.Series[float]]") -> tuple[float, float]:
    """Return the range of values after the first quarter of training, where curves differ."""
    times = np.concatenate([curve.index for curve in curves])
    late = times.min() + (times.max() - times.min()) / 4
    ends = []
    for curve in curves:
        groups = curve[curve.index >= late].groupby(level=0)
        spread = groups.std().fillna(0)
        ends += [(groups.mean() - spread).min(), (groups.mean() + spread).max()]
    margin = 0.05 * (max(ends) - min(ends)) or 0.5
    return min(ends) - margin, max(ends) + margin


def draw_progress(study: StudyRecord, comparisons: Comparisons) -> "Figure | None":
    """Draw metric and paired difference against steps, training FLOPs and seconds of training.

    The difference is that to the baseline with the same seed at the same cost, between evaluations
    by linear interpolation. Costs that a variant lacks have no panel.
    """
    names = _order_variants(study, comparisons)[: len(COLOURS)]
    values = study.curves.pivot_table(index="step", columns=["variant", "seed"], values="value")
    shown = [name for name in names if name in values and len(values[name].dropna()) > 2]
    if len(shown) < 2 or shown[0] != study.plan.baseline:
        return None
    planned = {variant.name: variant for variant in study.plan.variants}
    costs: dict[str, list[float | None]] = {
        "step": [1.0] * len(shown),
        "training FLOPs": [planned[name].step_flops for name in shown],
        "seconds of training": [study.step_time(name) for name in shown],
    }
    units = {label: scales for label, scales in costs.items() if None not in scales}
    figure = drawing.new_figure(4.2)
    grid = figure.subplots(2, len(units), sharex="col", sharey="row", squeeze=False)
    key: drawing.Key = {name: (c, "-") for name, c in zip(shown, COLOURS, strict=False)}
    for (top, bottom), (label, scales) in zip(grid.T, units.items(), strict=True):
        start = None
        for name, scale in zip(shown, scales, strict=True):
            rows = values[name].dropna()
            rows.index = rows.index * float(scale or 1)
            start = rows if start is None else start
            drawing.draw_band(top, rows.stack().droplevel(1), *key[name], alpha=0.1)
            inside = rows[rows.index <= start.index.max()]
            differences = {
                seed: inside[seed] - np.interp(inside.index, start.index, start[seed])
                for seed in inside.columns.intersection(start.columns)
            }
            if name != shown[0] and differences:
                by_seed = pd.concat(differences.values())
                drawing.draw_band(bottom, by_seed, *key[name], alpha=0.1)
        bottom.axhline(0, color=GREY, linewidth=0.8)
        bottom.set_xlabel(label)
    grid[0][0].set_ylabel(study.plan.metric.label)
    grid[1][0].set_ylabel(f"difference to {shorten(shown[0], 20)}")
    drawing.add_legend(figure, key)
    return figure


COSTS = {
    "parameters": "parameters",
    "flops": "FLOPs per sample, forward",
    "step_time": "seconds per training step",
}
"""Label by measurement."""


def draw_cost(study: StudyRecord) -> "Figure | None":
    """Draw the mean against each cost that differs between variants by more than one percent.

    Step times are drawn only for variants whose seeds agree on them. The legend orders the variants
    by their means. Returns None if all costs are equal or unknown.
    """
    from matplotlib.ticker import EngFormatter

    names = [variant.name for variant in study.plan.variants if study.values(variant.name)]
    values = {name: list(study.values(name).values()) for name in names[: drawing.MOST_ROWS]}
    means = {name: statistics.fmean(values[name]) for name in values}
    costs = {label: _median_costs(study, list(values), cost) for cost, label in COSTS.items()}
    costs = {
        label: by_name
        for label, by_name in costs.items()
        if len(by_name) > 1 and max(by_name.values()) > 1.01 * min(by_name.values())
    }
    if not costs:
        return None
    figure = drawing.new_figure(max(2.5, 0.15 * len(means) + 0.7))
    panels = figure.subplots(1, len(costs), sharey=True, squeeze=False)[0]
    limits = _usual_range([m + sign * sd(values[n]) for n, m in means.items() for sign in (-1, 1)])
    handles = {}
    styles = zip(itertools.cycle(COLOURS), itertools.cycle(MARKERS), strict=False)
    is_descending = study.plan.metric.goal == "max"
    ordered = sorted(means, key=means.__getitem__, reverse=is_descending)
    for name, (colour, marker) in zip(ordered, styles, strict=False):
        # The legend says where a far outlier is.
        is_outlier = not limits[0] <= means[name] <= limits[1]
        height = min(max(means[name], limits[0]), limits[1])
        label = shorten(name, 28) + (f" ({means[name]:.4g})" if is_outlier else "")
        for axes, by_name in zip(panels, costs.values(), strict=True):
            if name in by_name:
                handles[label] = axes.errorbar(
                    by_name[name], height, sd(values[name]), None, marker, color=colour, ms=4.5
                )
    for axes, label in zip(panels, costs, strict=True):
        axes.set_ylim(*limits)
        axes.margins(x=0.1)
        axes.set_xlabel(label)
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
        axes.locator_params(axis="x", nbins=4)
    panels[0].set_ylabel(study.plan.metric.label)
    figure.legend(handles.values(), handles, loc="outside right center", fontsize=6.5)
    return figure


def _median_costs(study: StudyRecord, names: list[str], cost: str) -> dict[str, float]:
    """Return the median of a cost over the seeds of each variant that has it."""
    costs = {}
    for name in names:
        measured = study.measurements(cost, name)
        median = statistics.median(measured) if measured else None
        median = study.step_time(name) if cost == "step_time" else median
        if median is not None:
            costs[name] = median
    return costs
