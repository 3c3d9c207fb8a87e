"""Figures of a study's results: every seed and its difference, learning curves, costs."""

import itertools
import math
import statistics
from collections import defaultdict
from collections.abc import Callable
from typing import TYPE_CHECKING

from lit_attn.cells.records import Result
from lit_attn.report import stats
from lit_attn.report.drawing import (
    COLOURS,
    GREY,
    LINE_HEIGHT,
    Curve,
    draw_band,
    legend_columns,
    new_figure,
    new_panels,
    sd,
    use_integer_ticks,
)
from lit_attn.report.read import StudyRecord

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")

CAPTIONS = {
    "seeds": "Left: the value of every seed (dots) and the mean (bar). Right: the difference of "
    "every seed to the baseline (dots), the mean difference (bar) and its 95 % paired t interval "
    "(line).",
    "curves": "Learning curves: mean and one standard deviation over the seeds that finished. The "
    "baseline is grey and dashed. The vertical axis covers the last three quarters of training.",
    "cost": "Mean and standard deviation over seeds, plotted against trainable parameters, FLOPs "
    "of the forward pass of one sample (matrix products and convolutions only) and the median time "
    "of a training step.",
}


def draw_seeds(study: StudyRecord) -> "Figure":
    """Draw the value of every seed, and beside it its difference to the baseline."""
    names = [variant.name for variant in study.plan.variants]
    figure = new_figure(0.26 * len(names) + 0.75)
    left, right = figure.subplots(1, 2, sharey=True)
    baseline = study.values(study.plan.baseline)
    for row, name in enumerate(names):
        values = study.values(name)
        _draw_dots(left, row, list(values.values()))
        if values:
            left.plot(statistics.fmean(values.values()), row, "|", color="black", markersize=13)
        pairs = [value - baseline[seed] for seed, value in values.items() if seed in baseline]
        if name == study.plan.baseline or not pairs:
            continue
        _draw_dots(right, row, pairs)
        # The interval lies below the dots, which would hide it.
        if interval := stats.paired_interval(pairs):
            right.plot(interval[1:], [row + 0.22] * 2, color="black", linewidth=1)
        right.plot(statistics.fmean(pairs), row + 0.22, "|", color="black", markersize=6)
    right.axvline(0, color=GREY, linewidth=0.8)
    left.set_yticks(range(len(names)), [_label_with_count(study, name) for name in names])
    left.set_ylim(len(names) - 0.5, -0.5)
    left.set_xlabel(study.plan.metric.label)
    right.set_xlabel(f"difference to {study.plan.baseline}")
    return figure


def _draw_dots(axes: "Axes", row: int, values: list[float]) -> None:
    axes.plot(values, [row] * len(values), "o", color=COLOURS[0], markersize=4, alpha=0.55, mew=0)


def _label_with_count(study: StudyRecord, variant: str) -> str:
    done, planned = len(study.values(variant)), len(study.variant_cells(variant))
    return variant if done == planned else f"{variant} ({done}/{planned})"


def draw_curves(study: StudyRecord) -> "Figure | None":
    """Draw a panel for each variant: its metric over training, and the baseline's."""
    unit, curves = _read_curves(study)
    baseline = curves[study.plan.baseline]
    shown = {
        name: curve
        for name, curve in curves.items()
        if len(curve) > 1 and (name != study.plan.baseline or len(curves) == 1)
    }
    if not shown:
        return None
    figure, panels = new_panels(len(shown))
    for axes, (name, curve) in zip(panels, shown.items(), strict=True):
        draw_band(axes, baseline, GREY, "--")
        draw_band(axes, curve, COLOURS[0], "-")
        axes.set_title(name)
    panels[0].set_ylim(_late_range([*shown.values(), baseline]))
    use_integer_ticks(panels[0])
    figure.supxlabel(unit, fontsize=8)
    figure.supylabel(study.plan.metric.label, fontsize=8)
    return figure


def _read_curves(study: StudyRecord) -> tuple[str, dict[str, Curve]]:
    """Return the unit of training time ("epoch" or "step") and each variant's finite values."""
    rows = {
        variant.name: [
            cell.curve(study.plan.metric)
            for cell in study.variant_cells(variant.name)
            if cell.result is not None
        ]
        for variant in study.plan.variants
    }
    # A language model can be evaluated many times in one epoch; then only steps are distinct.
    is_once_per_epoch = all(
        len({row.epoch for row in cell}) == len(cell) for cells in rows.values() for cell in cells
    )
    curves: dict[str, Curve] = {}
    for name, cells in rows.items():
        values = defaultdict(list)
        for row in itertools.chain.from_iterable(cells):
            if math.isfinite(row.value):
                values[row.epoch + 1 if is_once_per_epoch else row.step].append(row.value)
        curves[name] = dict(sorted(values.items()))
    return "epoch" if is_once_per_epoch else "step", curves


def _late_range(curves: list[Curve]) -> tuple[float, float]:
    """Return the range of values after the first quarter of training, where curves differ."""
    times = sorted({time for curve in curves for time in curve})
    late = times[0] + (times[-1] - times[0]) / 4
    ends = [
        statistics.fmean(values) + sign * sd(values)
        for curve in curves
        for time, values in curve.items()
        if time >= late
        for sign in (-1, 1)
    ]
    margin = 0.05 * (max(ends) - min(ends)) or 0.5
    return min(ends) - margin, max(ends) + margin


def draw_cost(study: StudyRecord) -> "Figure":
    """Draw the mean against parameters, FLOPs and step time."""
    from matplotlib.ticker import EngFormatter

    costs: dict[str, Callable[[Result], float]] = {
        "parameters": lambda result: result.parameters,
        "FLOPs per sample, forward": lambda result: result.flops,
        "seconds per training step": lambda result: result.step_time.median,
    }
    names = [variant.name for variant in study.plan.variants if study.values(variant.name)]
    columns = legend_columns(names)
    figure = new_figure(2.5 + LINE_HEIGHT * -(-len(names) // columns))
    panels = figure.subplots(1, len(costs), sharey=True)
    styles = dict(zip(names, zip(itertools.cycle(COLOURS), itertools.cycle(MARKERS)), strict=False))
    for axes, (label, cost) in zip(panels, costs.items(), strict=True):
        places = []
        for name in names:
            values = list(study.values(name).values())
            colour, marker = styles[name]
            places.append(statistics.median(cost(result) for result in study.results(name)))
            axes.errorbar(
                places[-1],
                statistics.fmean(values),
                yerr=sd(values),
                fmt=marker,
                color=colour,
                markersize=5,
                ecolor=(colour, 0.5),
                elinewidth=0.8,
                label=name,
            )
        # Costs that are equal by design look equal with five percent of room on either side.
        axes.set_xlim(0.95 * min(places), 1.05 * max(places))
        axes.set_xlabel(label)
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    panels[0].set_ylabel(study.plan.metric.label)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=columns)
    return figure
