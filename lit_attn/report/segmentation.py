"""Results that only a study of segmentation has: the IoU of each class, and predicted pictures."""

import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

import pandas as pd

from lit_attn.cells.records import Legend
from lit_attn.report import drawing
from lit_attn.report.columns import NOTHING, format_spread
from lit_attn.report.drawing import GREY
from lit_attn.report.formats import Cell, Table, named_table
from lit_attn.report.read import LOG, StudyRecord
from lit_attn.schema.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from numpy.typing import NDArray

WEIGHTS = {
    "trained": "the weights after the last step",
    "averaged": "the moving average of the weights (EMA) after the last step",
}

Colours = dict[str, tuple[int, int, int]]


def make_class_frame(study: StudyRecord) -> pd.DataFrame:
    """Return mean and standard deviation (ddof 1) of the IoU in percent, by class and variant.

    The values belong to the split and the weights (trained or averaged) of the study's metric. The
    frame is empty for a study without classes.
    """
    metric = study.plan.metric
    prefix = f"metric {metric.name.partition('/')[0]}/{'ema-' * metric.averaged}IoU:"
    rows = [
        (name.removeprefix(prefix), cell.variant, 100 * value)
        for cell in study.finished_cells()
        for name, value in cell.measurements.items()
        if name.startswith(prefix)
    ]
    frame = pd.DataFrame(rows, columns=["class", "variant", "iou"]).astype({"iou": float})
    groups = frame.groupby(["variant", "class"], sort=False)["iou"]
    summary = groups.agg(mean="mean", sd="std", n="count").reset_index()
    return summary[["class", "variant", "mean", "sd", "n"]]


def make_class_table(classes: pd.DataFrame) -> Table:
    """Return the class frame as a table: classes down, variants across, best means bold."""
    variants = list(dict.fromkeys(classes["variant"]))
    rows = []
    for label, values in classes.set_index("variant").groupby("class", sort=False):
        # A mean over fewer seeds than another variant's is never the best one.
        best = values.loc[values["n"] == values["n"].max(), "mean"].max()
        row = [Cell(str(label))]
        for variant in variants:
            if variant not in values.index:
                row.append(Cell(NOTHING))
                continue
            mean, spread = values.loc[variant, ["mean", "sd"]]
            row.append(Cell(format_spread(mean, spread, 2), is_bold=mean == best))
        rows.append(row)
    return named_table("classes", rows, variants)


def draw_pictures(study: StudyRecord) -> "Figure | None":
    """Draw images, labels and every variant's predictions with the first seed.

    The legend below them has the classes that occur and the weights that predict, if the cells
    recorded them. Returns None if there are no pictures.
    """
    from matplotlib.patches import Patch

    shown, legends = {}, {}
    unreadable: list[Path] = []
    for variant in study.plan.variants:
        cell = study.variant_cells(variant.name)[0]
        if cell.value is None or cell.folder is None:
            continue
        folder = cell.folder / "pictures"
        if panels := _read_panels(folder, unreadable):
            shown[variant.name] = panels
            try:
                legend = Legend.read(folder / "legend.json")
            except ConfigError:
                unreadable.append(folder / "legend.json")
                continue
            if legend is not None:
                legends[variant.name] = legend
    if unreadable:
        LOG.warning("%s: unreadable and skipped: %s", study.plan.study, unreadable[0])
    if not shown:
        return None
    first = next(iter(shown.values()))
    rows = {"image": [panel[0] for panel in first], "labels": [panel[1] for panel in first]}
    rows |= {name: [panel[2] for panel in panels] for name, panels in shown.items()}
    colours = _class_colours(list(legends.values()))
    columns = drawing.legend_columns(list(colours))
    title = _legend_title(legends)
    lines = 1 + title.count("\n") + -(-len(colours) // columns) if legends else 0
    figure = drawing.new_figure(1.05 * len(rows) + drawing.LINE_HEIGHT * lines)
    grid = figure.subplots(len(rows), len(first), squeeze=False)
    for line, (name, pictures) in zip(grid, rows.items(), strict=True):
        for axes, picture in zip(line, pictures, strict=False):
            axes.imshow(picture, interpolation="nearest")
            axes.grid(False)
            axes.set(xticks=[], yticks=[], frame_on=False)
        line[0].set_ylabel(name, rotation="horizontal", ha="right", va="center")
    if legends:
        patches = [
            Patch(facecolor=(r / 255, g / 255, b / 255), edgecolor=GREY, linewidth=0.4, label=name)
            for name, (r, g, b) in colours.items()
        ]
        figure.legend(handles=patches, loc="outside lower center", ncols=columns, title=title)
    return figure


def _read_panels(folder: Path, unreadable: list[Path]) -> "list[list[NDArray]]":
    """Return image, labels and prediction (h, w, 3) of each picture in a cell's folder."""
    from matplotlib.image import imread

    panels = []
    for path in sorted(folder.glob("*.png")):
        try:
            picture = imread(path)
        except (OSError, SyntaxError, ValueError):
            unreadable.append(path)
            continue
        width = picture.shape[1] // 3
        panels.append([picture[:, i * width : (i + 1) * width] for i in range(3)])
    return panels


def _class_colours(legends: list[Legend]) -> Colours:
    """Return the colours of the classes that occur for any variant, in the data set's order.

    Classes that share a colour (ADE20K has two) share an entry.
    """
    occurring = {name for legend in legends for name in legend.shown}
    names: dict[tuple[int, int, int], list[str]] = {}
    for name, colour in [item for legend in legends[:1] for item in legend.classes.items()]:
        if name in occurring:
            names.setdefault(colour, []).append(name)
    return {" / ".join(same): colour for colour, same in names.items()}


def _legend_title(legends: dict[str, Legend]) -> str:
    """Return which weights predict; if they differ between variants, in lines that fit."""
    variants: dict[str, list[str]] = {}
    for name, legend in legends.items():
        variants.setdefault(WEIGHTS[legend.weights], []).append(name)
    if len(variants) == 1:
        return f"Predictions of {next(iter(variants))}"
    lines = [f"Predictions of {weights}: {', '.join(names)}" for weights, names in variants.items()]
    width = int(drawing.WIDTH / drawing.LETTER_WIDTH)
    return "\n".join(textwrap.fill(line, width, break_on_hyphens=False) for line in lines)
