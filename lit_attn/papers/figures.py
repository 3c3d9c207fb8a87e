"""Figures of a paper: panels of curves, points and bars, diagnostics, and pictures of scripts."""

import itertools
import math
from typing import TYPE_CHECKING, Any

import pandas as pd

from lit_attn.cells.rows import read_clock
from lit_attn.papers import published as papers
from lit_attn.papers.layout import AXES, Figure, Panel, Reading
from lit_attn.papers.published import Counts, Records, measure, measure_or_count
from lit_attn.papers.source import PaperSource, Reference
from lit_attn.report.figures import diagnostics, drawing
from lit_attn.report.figures.scaling import read_points
from lit_attn.report.records.skipped import read_or_skip
from lit_attn.report.records.study_record import drop_undefined_steps

if TYPE_CHECKING:
    import matplotlib.axes
    import matplotlib.figure


def draw_figure(
    source: PaperSource, item: Figure, records: Records, reading: Reading
) -> dict[str, dict[str, bytes]]:
    """Return SVG and PNG of the drawings of a reading that have records, by name and kind."""
    pictures = {} if source.size else _read_pictures(source, item)
    counts = papers.read_counts(source, reading) if shows_counts(item) else {}
    counted_lines = {reference for reference, _ in counts}
    lines: dict[str, Reference] = {}
    for (label, _), line in source.locate(item, reading).items():
        if item.file or line.study in records or line in counted_lines:
            lines[label] = line
    if not item.file and not counts:
        cells = (records[line.study].finished_cells(line.variant) for line in lines.values())
        if not any(cells):
            return pictures
    merged = _merge_diagnostics(item, lines, records)
    drawn: dict[str, matplotlib.figure.Figure | None] = {}
    with drawing.appearance():
        if merged is not None:
            first = next(iter(item.lines))
            for kind in item.draw:
                drawn[kind] = diagnostics.PAPER_DRAWERS[kind](merged, first)
        if item.panels:
            drawn["panels"] = draw_panels(source, item, lines, records, counts)
        images = dict(pictures)
        for name, figure in drawn.items():
            if figure:
                images[name] = drawing.render(figure)
    return images


def shows_counts(item: Figure) -> bool:
    """Return True if all panels of a figure show counts of models, which need no training."""
    columns, _ = item.grid()
    return any(item.is_counted(column) for column in columns.values())


def _merge_diagnostics(
    item: Figure, lines: dict[str, Reference], records: Records
) -> diagnostics.Diagnostics | None:
    """Return the diagnostics of the lines of a figure, which stand for variants, if it has any."""
    values = []
    arrays = {}
    for label, (study, variant) in lines.items():
        if not item.draw or label not in item.lines:
            continue
        recorded = diagnostics.read_study_diagnostics(records[study])
        chosen = recorded.values[recorded.values["variant"] == variant]
        chosen = chosen[chosen["step"] <= (item.last_step or math.inf)]
        values.append(chosen.assign(variant=label))
        if variant in recorded.arrays:
            arrays[label] = recorded.arrays[variant]
    return diagnostics.Diagnostics(pd.concat(values), arrays) if values else None


def _read_pictures(source: PaperSource, item: Figure) -> dict[str, dict[str, bytes]]:
    """Return the SVG and PNG files of the pictures that a script has drawn, by number."""
    pictures: dict[str, dict[str, bytes]] = {}
    for name in item.pictures:
        paths = {kind: source.runs / f"{name}.{kind}" for kind in ("svg", "png")}
        if all(path.exists() for path in paths.values()):
            contents = {kind: path.read_bytes() for kind, path in paths.items()}
            pictures[f"picture-{len(pictures) + 1}"] = contents
    return pictures


def draw_panels(
    source: PaperSource,
    item: Figure,
    located: dict[str, Reference],
    records: Records,
    counts: Counts,
) -> "matplotlib.figure.Figure | None":
    """Draw the panels side by side with one legend; return None without any record or count."""
    names = dict.fromkeys(label.partition(" / ")[0] for label, _ in item.variants())
    # All colours of a style before the next style.
    styles = itertools.cycle(itertools.product(("-", "--", ":", "-."), drawing.COLOURS))
    key: drawing.Key = {}
    for name, (dash, colour) in zip(names, styles, strict=False):
        key[name] = (colour, dash)
    columns = 2 if len(item.panels) == 4 else min(3, len(item.panels))
    rows = math.ceil(len(item.panels) / columns)
    figure = drawing.new_figure(2.4 * rows + 0.5)
    all_axes = list(figure.subplots(rows, columns, squeeze=False).flat)
    for axes in all_axes[len(item.panels) :]:
        axes.set_visible(False)
    is_empty = True
    for axes, panel in zip(all_axes, item.panels, strict=False):
        labels = panel.lines or item.lines
        lines = {label: located[label] for label in labels if label in located}
        if item.file:
            frame = _read_points(source, item, panel, lines)
        else:
            frame = _read_panel(panel, lines, records, counts)
        if not frame.empty:
            is_empty = False
        _draw_panel(axes, panel, frame, key)
        if item.file and panel.x not in ("variant", "compute"):
            axes.locator_params(axis="x", integer=True)
        axes.set_ylabel(_label_values(panel, lines, records))
        for axis in panel.log:
            drawing.use_log_scale(axes, axis)
    if any(panel.x != "variant" for panel in item.panels):
        drawing.add_legend(figure, key)
    return None if is_empty else figure


def _draw_panel(
    axes: "matplotlib.axes.Axes", panel: Panel, frame: pd.DataFrame, key: drawing.Key
) -> None:
    """Draw a bar or a band for every label of `frame`."""
    for label, values in frame.groupby("label", sort=False)["value"]:
        colour, dash = key[str(label)]
        if panel.x == "variant":
            axes.bar(str(label), values.mean(), yerr=values.std() or None, color=colour)
        else:
            drawing.draw_band(axes, values, colour, dash, label=str(label))
    if panel.x in ("variant", "compute"):
        axes.tick_params(axis="x", which="both", rotation=60)
    axes.set_xlabel(AXES.get(panel.x, panel.x))


def _label_values(panel: Panel, lines: dict[str, Reference], records: Records) -> str:
    """Return the label of the values of a panel: its own, that of the metric, or a name."""
    if panel.label:
        return panel.label
    if panel.y == "metric":
        for line in lines.values():
            if line.study in records:
                return records[line.study].plan.metric.label
    return panel.y


def _read_points(
    source: PaperSource, item: Figure, panel: Panel, lines: dict[str, Reference]
) -> pd.DataFrame:
    """Return the label and value of every point in the files of scripts, indexed by the axis x."""
    columns, _ = item.grid()
    rows: list[tuple[Any, ...]] = []
    for label, line in lines.items():
        for x, value in papers.read_file(source, line, columns[""], panel.x, panel.y):
            rows.append((label, x, value))
    return pd.DataFrame(rows, columns=["label", "x", "value"]).set_index("x")


def _read_panel(
    panel: Panel, lines: dict[str, Reference], records: Records, counts: Counts
) -> pd.DataFrame:
    """Return the label and value of every seed, indexed by epoch, step, seconds or variant."""
    rows: list[tuple[Any, ...]] = []
    for label, reference in lines.items():
        if panel.x == "variant":
            values = measure_or_count(records, counts, reference, panel.y).values.values()
            rows += [(label, label, label, value) for value in values]
        elif panel.x == "compute":
            rows += _read_scaling(panel, label, lines, records)
        else:
            rows += _read_curves(panel, label, reference, records)
    frame = pd.DataFrame(rows, columns=["label", "step", "time", "value"])
    frame = drop_undefined_steps(frame, "label").dropna()
    frame["value"] *= panel.scale
    if panel.x == "seconds":
        # Seeds take different times for a step.
        frame["time"] = frame.groupby(["label", "step"])["time"].transform("mean")
    return frame.set_index("time")[["label", "value"]]


def _read_scaling(
    panel: Panel, label: str, lines: dict[str, Reference], records: Records
) -> list[tuple[Any, ...]]:
    """Return the name and size of a line with the FLOPs and the value of every seed.

    With `relative`, the value is the relative improvement in percent over another line of the size.
    """
    name, _, size = label.partition(" / ")
    reference = lines[label]
    base = measure(records, lines.get(f"{panel.relative.get(name)} / {size}"), "metric")
    rows: list[tuple[Any, ...]] = []
    for point in read_points([records[reference.study]]):
        is_compared = point.seed in base or not panel.relative
        if point.variant == reference.variant and is_compared:
            value = point.value
            if base:
                value = 100 * (1 - point.value / base[point.seed])
            rows.append((name, size, point.flops, value))
    return rows


def _read_curves(
    panel: Panel, label: str, reference: Reference, records: Records
) -> list[tuple[Any, ...]]:
    """Return the label of a line with step, time on the axis, and value of every logged row."""
    study = records[reference.study]
    metric = study.plan.metric if panel.y == "metric" else panel.y
    rows: list[tuple[Any, ...]] = []
    for cell in study.finished_cells(reference.variant):
        clock = read_or_skip(read_clock, cell.folder, "clock.csv") or {}
        for row in cell.curve(metric):
            # Epochs of the records count from 0.
            times = {"epoch": row.epoch + 1, "step": row.step, "seconds": clock.get(row.step)}
            rows.append((label, row.step, times[panel.x], row.value))
    return rows
