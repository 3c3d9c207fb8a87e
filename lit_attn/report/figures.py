"""Figures of one study, as SVG and PNG: learning curves, per-seed dots, value against cost.

The same records give the same bytes: fixed SVG ids, no dates.
"""

import statistics
from collections import defaultdict
from collections.abc import Callable
from itertools import cycle, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lit_attn.files import write_atomic
from lit_attn.report.read import StudyRecord

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe & Ito's colours, told apart by colour-blind readers; then dashes, then markers repeat them.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
DASHES = ("-", "--", "-.", ":")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")


def write_figures(study: StudyRecord, folder: Path) -> list[str]:
    """Write every figure that the records can fill; returns their names without suffix."""
    if not study.results:
        return []
    import matplotlib as mpl

    mpl.use("Agg")
    settings: Any = {
        "svg.hashsalt": "lit_attn",
        "svg.fonttype": "none",
        "font.size": 9,
        "axes.spines.top": False,
        "axes.spines.right": False,
    }
    drawn: dict[str, Callable[[StudyRecord], Figure]] = {
        "curves": _curves,
        "seeds": _seeds,
        "cost": _cost,
    }
    with mpl.rc_context(settings):
        for name, draw in drawn.items():
            figure = draw(study)
            for kind in ("svg", "png"):
                _save(figure, folder / f"{name}.{kind}", kind)
            mpl.pyplot.close(figure)
    return list(drawn)


def _save(figure: "Figure", path: Path, kind: str) -> None:
    import io

    content = io.BytesIO()
    metadata = {"Date": None} if kind == "svg" else {"Software": None}
    figure.savefig(content, format=kind, dpi=160, bbox_inches="tight", metadata=metadata)
    write_atomic(path, content.getvalue())


def _curves(study: StudyRecord) -> "Figure":
    """The metric over epochs: mean over seeds, band of one standard deviation."""
    figure, axes = _figure()
    metric = study.plan.metric
    for variant, style in _styles(study):
        by_epoch: dict[int, list[float]] = defaultdict(list)
        for cell in study.of(variant):
            for row in cell.metrics if cell.result is not None else []:
                if row.name == metric.name:
                    by_epoch[row.epoch + 1].append(row.value * metric.scale)
        epochs = sorted(by_epoch)
        means = [statistics.fmean(by_epoch[e]) for e in epochs]
        spread = [_sd(by_epoch[e]) for e in epochs]
        colour, dash, _ = style
        axes.plot(epochs, means, color=colour, linestyle=dash, linewidth=1.3, label=variant)
        low = [m - s for m, s in zip(means, spread, strict=True)]
        high = [m + s for m, s in zip(means, spread, strict=True)]
        axes.fill_between(epochs, low, high, color=colour, alpha=0.12, linewidth=0)
    axes.set_xlabel("epoch")
    axes.set_ylabel(metric.label)
    _legend(axes)
    return figure


def _seeds(study: StudyRecord) -> "Figure":
    """Every seed's value as a dot, a bar at the mean; one seed's dots are joined."""
    figure, axes = _figure(height=0.34 * len(study.plan.variants) + 0.9)
    metric = study.plan.metric
    names = [variant.name for variant in study.plan.variants]
    joined: dict[int, list[tuple[float, int]]] = defaultdict(list)
    for place, (variant, (colour, _, _)) in enumerate(_styles(study)):
        values = []
        for cell in study.of(variant):
            if cell.result is not None and metric.name in cell.result.metrics:
                value = cell.result.metrics[metric.name] * metric.scale
                values.append(value)
                joined[cell.planned.seed].append((value, place))
        axes.plot(values, [place] * len(values), "o", color=colour, markersize=4, alpha=0.8)
        if values:
            axes.plot([statistics.fmean(values)], [place], "|", color=colour, markersize=16)
    for points in joined.values():
        axes.plot(*zip(*points, strict=True), color="#999999", linewidth=0.4, zorder=0)
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set_xlabel(f"{metric.label}, one dot per seed, bar at the mean")
    return figure


def _cost(study: StudyRecord) -> "Figure":
    """The mean against FLOPs and against step time."""
    import matplotlib.pyplot as plt

    figure, both = plt.subplots(1, 2, figsize=(7.2, 3.0), sharey=True, layout="constrained")
    metric = study.plan.metric
    for variant, (colour, _, marker) in _styles(study):
        results = [cell.result for cell in study.of(variant) if cell.result is not None]
        values = [
            r.metrics[metric.name] * metric.scale for r in results if metric.name in r.metrics
        ]
        if not values:
            continue
        costs = (
            results[0].flops / 1e6,
            statistics.median(r.step_time.median for r in results) * 1e3,
        )
        for axes, cost in zip(both, costs, strict=True):
            axes.errorbar(
                [cost],
                [statistics.fmean(values)],
                yerr=[_sd(values)],
                fmt=marker,
                color=colour,
                markersize=5,
                linewidth=0.8,
                label=variant,
            )
    both[0].set_xlabel("MFLOPs per sample, forward")
    both[1].set_xlabel("ms per training step, median")
    both[0].set_ylabel(f"{metric.label}, mean ± sd")
    _legend(both[1])
    return figure


def _figure(height: float = 3.4) -> "tuple[Figure, Axes]":
    import matplotlib.pyplot as plt

    return plt.subplots(figsize=(6.4, height), layout="constrained")


def _legend(axes: "Axes") -> None:
    axes.legend(fontsize=7, frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))


def _styles(study: StudyRecord) -> list[tuple[str, tuple[str, str, str]]]:
    """A colour, a dash and a marker for every variant, the same in all figures."""
    styles = []
    markers = islice(cycle(MARKERS), len(study.plan.variants))
    for place, (variant, marker) in enumerate(zip(study.plan.variants, markers, strict=True)):
        dash = DASHES[place // len(COLOURS) % len(DASHES)]
        styles.append((variant.name, (COLOURS[place % len(COLOURS)], dash, marker)))
    return styles


def _sd(values: list[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else 0.0
