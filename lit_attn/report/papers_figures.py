"""Figures of a paper, drawn from the recorded curves, costs and diagnostics as in the paper."""

import itertools
import statistics
from typing import TYPE_CHECKING

import pandas as pd

from lit_attn.cells.records import Metric, read_clock
from lit_attn.config.papers import Figure, Panel, PaperSource, Reference
from lit_attn.report import diagnostics
from lit_attn.report.drawing import (
    COLOURS,
    Key,
    add_legend,
    appearance,
    draw_band,
    new_figure,
    render,
    sd,
)
from lit_attn.report.papers import Records, measure

if TYPE_CHECKING:
    import matplotlib.figure
    from matplotlib.axes import Axes

AXIS_LABELS = {"epoch": "epoch", "step": "step", "seconds": "wall-clock time (s)", "variant": ""}
MOST_IN_A_ROW = 3
"""Largest number of panels side by side."""


def draw_figure(source: PaperSource, item: Figure, records: Records) -> dict[str, dict[str, bytes]]:
    """Return the drawings of a figure by name, each as {"svg": ..., "png": ...}.

    The drawing of the panels has the name "panels". Drawings without records are left out.
    """
    with appearance():
        drawn = _draw_diagnostics(source, item, records)
        if item.panels:
            drawn["panels"] = _draw_panels(source, item, records)
        return {name: render(figure) for name, figure in drawn.items() if figure is not None}


def _draw_diagnostics(
    source: PaperSource, item: Figure, records: Records
) -> "dict[str, matplotlib.figure.Figure | None]":
    values, arrays = [], {}
    for label, (study, variant) in source.locate_lines(item, item.lines if item.draw else {}):
        if study in records:
            recorded = diagnostics.read_study_diagnostics(records[study])
            chosen = recorded.values[recorded.values["variant"] == variant]
            if item.last_step is not None:
                chosen = chosen[chosen["step"] <= item.last_step]
            values.append(chosen.assign(variant=label))
            arrays[label] = recorded.arrays.get(variant, [])
    if not values:
        return {}
    merged = diagnostics.Diagnostics(pd.concat(values), arrays)
    drawers = diagnostics.make_drawers(merged, next(iter(item.lines)))
    return {kind: drawers[kind]() for kind in item.draw}


def _draw_panels(
    source: PaperSource, item: Figure, records: Records
) -> "matplotlib.figure.Figure | None":
    """Draw the panels side by side with one legend; return None without any record."""
    styles = itertools.product(("-", "--"), COLOURS)
    key: Key = {
        label: (colour, dash) for label, (dash, colour) in zip(item.all_lines, styles, strict=False)
    }
    columns = min(MOST_IN_A_ROW, len(item.panels))
    rows = -(-len(item.panels) // columns)
    figure = new_figure(2.4 * rows + 0.5)
    panels = list(figure.subplots(rows, columns, squeeze=False).flat)
    for axes in panels[len(item.panels) :]:
        axes.set_visible(False)
    is_drawn = False
    for axes, panel in zip(panels, item.panels, strict=False):
        lines = dict(source.locate_lines(item, panel.lines or item.lines))
        draw = _draw_bars if panel.x == "variant" else _draw_curves
        is_drawn |= draw(axes, panel, lines, records, key)
        labels = [
            records[study].plan.metric.label for study, _ in lines.values() if study in records
        ]
        axes.set_xlabel(AXIS_LABELS[panel.x])
        axes.set_ylabel(panel.label or (labels[0] if panel.y == "metric" and labels else panel.y))
        for axis in panel.log:
            getattr(axes, f"set_{axis}scale")("log")
    if any(panel.x != "variant" for panel in item.panels):
        add_legend(figure, key)
    return figure if is_drawn else None


def _draw_curves(
    axes: "Axes", panel: Panel, lines: dict[str, Reference], records: Records, key: Key
) -> bool:
    """Draw mean and standard deviation of each line; return True if one has a record."""
    curves = {
        label: _read_curve(records, reference, panel)
        for label, reference in lines.items()
        if reference.study in records
    }
    for label, curve in curves.items():
        draw_band(axes, curve, *key[label])
    return any(len(curve) for curve in curves.values())


def _draw_bars(
    axes: "Axes", panel: Panel, lines: dict[str, Reference], records: Records, key: Key
) -> bool:
    """Draw a bar for each line; return True if one has a record."""
    heights = {label: measure(records, reference, panel.y) for label, reference in lines.items()}
    for place, (label, values) in enumerate(heights.items()):
        if values:
            mean = panel.scale * statistics.fmean(values.values())
            spread = panel.scale * sd(list(values.values()))
            axes.bar(place, mean, yerr=spread or None, color=key[label][0])
    axes.set_xticks(range(len(lines)), list(lines), rotation=60, ha="right")
    return any(heights.values())


def _read_curve(records: Records, reference: Reference, panel: Panel) -> "pd.Series[float]":
    """Return the values of all finished seeds by epoch, step or seconds.

    The wall-clock time of a step is its mean over the seeds.
    """
    study = records[reference.study]
    metric = study.plan.metric
    if panel.y != "metric":
        metric = Metric(name=panel.y, label=panel.y, goal="min", scale=1)
    rows = []
    for cell in study.finished_cells(reference.variant):
        clock = read_clock(cell.folder / "clock.csv") if cell.folder else {}
        for row in cell.curve(metric):
            # Epochs of the records count from 0.
            place = row.epoch + 1 if panel.x == "epoch" else row.step
            time = clock.get(row.step) if panel.x == "seconds" else place
            rows.append((place, time, panel.scale * row.value))
    frame = pd.DataFrame(rows, columns=["place", "time", "value"]).dropna()
    times = frame.groupby("place")["time"].transform("mean")
    return pd.Series(frame["value"].to_numpy(), index=times.to_numpy(), dtype=float)
