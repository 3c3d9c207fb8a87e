"""Figures of a paper, drawn from the recorded curves, costs and diagnostics as in the paper."""

import itertools
from typing import TYPE_CHECKING, Any

import pandas as pd

from lit_attn.cells.records import Metric, read_clock
from lit_attn.config.papers import Figure, Panel, PaperSource, Reference
from lit_attn.report import diagnostics, drawing
from lit_attn.report.papers import Records, measure

if TYPE_CHECKING:
    import matplotlib.figure

AXIS_LABELS = {"epoch": "epoch", "step": "step", "seconds": "wall-clock time (s)", "variant": ""}
MOST_IN_A_ROW = 3
"""Largest number of panels side by side."""


def draw_figure(source: PaperSource, item: Figure, records: Records) -> dict[str, dict[str, bytes]]:
    """Return the drawings of a figure by name, each as {"svg": ..., "png": ...}.

    The drawing of the panels has the name "panels". Drawings without records are left out.
    """
    if not any(reference.study in records for reference in source.references(item)):
        return {}
    with drawing.appearance():
        drawn = _draw_diagnostics(source, item, records)
        drawn["panels"] = _draw_panels(source, item, records) if item.panels else None
        return {
            name: drawing.render(figure) for name, figure in drawn.items() if figure is not None
        }


def _draw_diagnostics(
    source: PaperSource, item: Figure, records: Records
) -> "dict[str, matplotlib.figure.Figure | None]":
    values, arrays = [], {}
    lines = source.locate_lines(item, item.lines if item.draw else {})
    for label, (study, variant) in lines.items():
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
    styles = itertools.product(("-", "--"), drawing.COLOURS)
    key: drawing.Key = {
        label: (colour, dash) for label, (dash, colour) in zip(item.all_lines, styles, strict=False)
    }
    columns = min(MOST_IN_A_ROW, len(item.panels))
    rows = -(-len(item.panels) // columns)
    figure = drawing.new_figure(2.4 * rows + 0.5)
    all_axes = list(figure.subplots(rows, columns, squeeze=False).flat)
    frames = []
    for axes, panel in itertools.zip_longest(all_axes, item.panels):
        if panel is None:
            axes.set_visible(False)
            continue
        lines = source.locate_lines(item, panel.lines or item.lines)
        lines = {label: line for label, line in lines.items() if line.study in records}
        frames.append(frame := _read_panel(panel, lines, records))
        for label, part in frame.groupby("label", sort=False)["value"]:
            if panel.x == "variant":
                axes.bar(label, part.mean(), yerr=part.std() or None, color=key[str(label)][0])
            else:
                drawing.draw_band(axes, part, *key[str(label)])
        if panel.x == "variant":
            axes.tick_params(axis="x", rotation=60)
        labels = [records[line.study].plan.metric.label for line in lines.values()]
        axes.set_xlabel(AXIS_LABELS[panel.x])
        axes.set_ylabel(panel.label or (labels[0] if panel.y == "metric" and labels else panel.y))
        for axis in panel.log:
            getattr(axes, f"set_{axis}scale")("log")
    if any(panel.x != "variant" for panel in item.panels):
        drawing.add_legend(figure, key)
    return None if all(frame.empty for frame in frames) else figure


def _read_panel(panel: Panel, lines: dict[str, Reference], records: Records) -> pd.DataFrame:
    """Return the label and value of every seed, indexed by epoch, step, seconds or variant.

    The wall-clock time of a step is its mean over the seeds.
    """
    rows: list[tuple[Any, ...]] = []
    for label, reference in lines.items():
        if panel.x == "variant":
            values = measure(records, reference, panel.y).values()
            rows += [(label, label, label, value) for value in values]
            continue
        study = records[reference.study]
        named = Metric(name=panel.y, label=panel.y, goal="min", scale=1)
        for cell in study.finished_cells(reference.variant):
            clock = read_clock(cell.folder / "clock.csv") if cell.folder else {}
            for row in cell.curve(study.plan.metric if panel.y == "metric" else named):
                # Epochs of the records count from 0.
                times = {"epoch": row.epoch + 1, "step": row.step, "seconds": clock.get(row.step)}
                rows.append((label, row.step, times[panel.x], row.value))
    frame = pd.DataFrame(rows, columns=["label", "step", "time", "value"]).dropna()
    frame["value"] *= panel.scale
    if panel.x == "seconds":
        frame["time"] = frame.groupby(["label", "step"])["time"].transform("mean")
    return frame.set_index("time")[["label", "value"]]
