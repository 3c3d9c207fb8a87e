"""Figures of one study: learning curves, every seed and its difference, value against cost.

The same records give the same bytes: fixed SVG ids, no dates.
"""

import io
import itertools
import math
import statistics
import warnings
from collections import defaultdict
from collections.abc import Callable
from typing import TYPE_CHECKING

from lit_attn.cells.records import Result
from lit_attn.report import diagnostics, stats
from lit_attn.report.attention import Recorded
from lit_attn.report.read import StudyRecord
from lit_attn.report.segmentation import draw_pictures
from lit_attn.report.style import COLOURS, GREY, MARKERS, SETTINGS, Curve, band, new_figure, sd

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FIGURES = {
    "seeds": "Left: every seed, and a bar at the mean. Right: every seed's difference to the "
    "baseline, with the mean and its 95 % paired t interval.",
    "curves": "Learning curves: mean over the seeds that finished, band of one standard deviation; "
    "the baseline in grey. The axis leaves out what lies below the first quarter of training.",
    "cost": "Mean and standard deviation against trainable parameters, FLOPs of a forward pass of "
    "one sample (of matrix products and convolutions alone), and the median time of a training "
    "step.",
    "pictures": "Evaluation images, their labels (black: none) and the predictions after the last "
    "step of training, with the first seed. The legend has the weights that predict, and the "
    "classes that occur.",
    **diagnostics.FIGURES,
}


def draw(study: StudyRecord, recorded: dict[str, Recorded]) -> dict[tuple[str, str], bytes]:
    """Every figure that the records fill, by name and kind ("svg" or "png")."""
    if not study.results():
        return {}
    import matplotlib as mpl

    drawn: dict[str, Callable[[], Figure | None]] = {
        "seeds": lambda: _seeds(study),
        "curves": lambda: _curves(study),
        "cost": lambda: _cost(study),
        "pictures": lambda: draw_pictures(study),
        **diagnostics.drawn(recorded, study.plan.baseline),
    }
    images = {}
    with mpl.rc_context(), warnings.catch_warnings():
        # Whatever the user's matplotlibrc says, which would change the bytes.
        mpl.rcdefaults()
        mpl.rcParams.update(SETTINGS)
        # A name in a script that the font lacks is drawn as boxes.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        for name, function in drawn.items():
            if figure := function():
                for kind, metadata in (("svg", {"Date": None}), ("png", {"Software": None})):
                    content = io.BytesIO()
                    figure.savefig(content, format=kind, dpi=200, metadata=metadata)
                    images[name, kind] = content.getvalue()
    return images


def _seeds(study: StudyRecord) -> "Figure":
    """Every seed's value, and beside it every seed's difference to the baseline."""
    names = [variant.name for variant in study.plan.variants]
    figure = new_figure(0.26 * len(names) + 0.75)
    left, right = figure.subplots(1, 2, sharey=True)
    baseline = study.values(study.plan.baseline)
    for place, name in enumerate(names):
        own = study.values(name)
        _dots(left, place, list(own.values()))
        if own:
            left.plot(statistics.fmean(own.values()), place, "|", color="black", markersize=13)
        pairs = [value - baseline[seed] for seed, value in own.items() if seed in baseline]
        if name == study.plan.baseline or not pairs:
            continue
        _dots(right, place, pairs)
        # Below the dots, which it would hide.
        if interval := stats.paired_interval(pairs):
            right.plot(interval[1:], [place + 0.22] * 2, color="black", linewidth=1)
        right.plot(statistics.fmean(pairs), place + 0.22, "|", color="black", markersize=6)
    right.axvline(0, color=GREY, linewidth=0.8)
    left.set_yticks(range(len(names)), [_with_count(study, name) for name in names])
    left.set_ylim(len(names) - 0.5, -0.5)
    left.set_xlabel(study.plan.metric.label)
    right.set_xlabel(f"difference to {study.plan.baseline}")
    return figure


def _dots(axes: "Axes", place: int, values: list[float]) -> None:
    axes.plot(values, [place] * len(values), "o", color=COLOURS[0], markersize=4, alpha=0.55, mew=0)


def _curves(study: StudyRecord) -> "Figure | None":
    """A panel per variant: the metric over training, the baseline's behind it."""
    unit, curves = _read_curves(study)
    baseline = curves[study.plan.baseline]
    shown = {
        name: curve
        for name, curve in curves.items()
        if len(curve) > 1 and (name != study.plan.baseline or len(curves) == 1)
    }
    if not shown:
        return None
    columns = min(4, len(shown))
    lines = -(-len(shown) // columns)
    figure = new_figure(1.35 * lines + 0.55)
    panels = list(figure.subplots(lines, columns, sharex=True, sharey=True, squeeze=False).flat)
    for axes, (name, curve) in zip(panels, shown.items(), strict=False):
        band(axes, baseline, GREY, "--")
        band(axes, curve, COLOURS[0], "-")
        axes.set_title(name)
    for above, axes in zip(panels, panels[columns:], strict=False):
        if not axes.lines:
            axes.set_visible(False)
            above.tick_params(labelbottom=True)
    panels[0].set_ylim(_late_range([*shown.values(), baseline]))
    panels[0].xaxis.get_major_locator().set_params(integer=True)
    figure.supxlabel(unit, fontsize=8)
    figure.supylabel(study.plan.metric.label, fontsize=8)
    return figure


def _read_curves(study: StudyRecord) -> tuple[str, dict[str, Curve]]:
    """The unit of training, "epoch" or "step", and each variant's finite values at each of it."""
    rows = {
        variant.name: [
            cell.curve(study.plan.metric)
            for cell in study.of(variant.name)
            if cell.result is not None
        ]
        for variant in study.plan.variants
    }
    # A language model may be evaluated many times in one epoch.
    once = all(
        len({row.epoch for row in cell}) == len(cell) for cells in rows.values() for cell in cells
    )
    curves: dict[str, Curve] = {}
    for name, cells in rows.items():
        values = defaultdict(list)
        for row in itertools.chain.from_iterable(cells):
            if math.isfinite(row.value):
                values[row.epoch + 1 if once else row.step].append(row.value)
        curves[name] = dict(sorted(values.items()))
    return "epoch" if once else "step", curves


def _late_range(curves: list[Curve]) -> tuple[float, float]:
    """The values from the second quarter of training on: where the curves come to differ."""
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


def _cost(study: StudyRecord) -> "Figure":
    """The mean against parameters, FLOPs and step time."""
    from matplotlib.ticker import EngFormatter

    costs: dict[str, Callable[[Result], float]] = {
        "parameters": lambda result: result.parameters,
        "FLOPs per sample, forward": lambda result: result.flops,
        "seconds per training step": lambda result: result.step_time.median,
    }
    names = [variant.name for variant in study.plan.variants if study.values(variant.name)]
    figure = new_figure(2.5 + 0.16 * -(-len(names) // 4))
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
        # What is equal by design is to look equal: at least five percent on either side.
        axes.set_xlim(0.95 * min(places), 1.05 * max(places))
        axes.set_xlabel(label)
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    panels[0].set_ylabel(study.plan.metric.label)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4)
    return figure


def _with_count(study: StudyRecord, variant: str) -> str:
    done, planned = len(study.values(variant)), len(study.of(variant))
    return variant if done == planned else f"{variant} ({done}/{planned})"
