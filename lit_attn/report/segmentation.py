"""Results that only a study of segmentation has: the IoU of each class, and predicted pictures."""

from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from lit_attn.cells.records import Legend
from lit_attn.report import drawing
from lit_attn.report.columns import format_spread
from lit_attn.report.drawing import GREY
from lit_attn.report.formats import Cell, Table, named_table
from lit_attn.report.read import LOG, StudyRecord
from lit_attn.schema.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from numpy.typing import NDArray

Panels = list[list["NDArray[Any]"]]
"""Image, labels and prediction (h, w, 3) of each picture of a cell."""


def make_class_frame(study: StudyRecord) -> pd.DataFrame:
    """Return mean and standard deviation (ddof 1) of the IoU in percent, by class and variant.

    The values belong to the split and the weights (trained or averaged) of the study's metric.
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
        measured = values[["mean", "sd"]].reindex(variants).itertuples(index=False)
        cells = (Cell(format_spread(mean, sd, 2), is_bold=mean == best) for mean, sd in measured)
        rows.append([Cell(str(label)), *cells])
    return named_table("classes", rows, variants)


def draw_pictures(study: StudyRecord) -> "Figure | None":
    """Draw images, labels and every variant's predictions with the first seed.

    The legend below them has the classes that occur and the weights that predict, if the cells
    recorded them. Returns None if there are no pictures.
    """
    from matplotlib.image import imread
    from matplotlib.patches import Patch

    shown: dict[str, Panels] = {}
    legends: list[Legend] = []
    names = (variant.name for variant in study.plan.variants)
    for cell in (cell for name in names for cell in study.variant_cells(name)[:1]):
        if cell.value is not None and cell.folder is not None:
            try:
                paths = sorted((cell.folder / "pictures").glob("*.png"))
                panels = [np.split(imread(path), 3, axis=1) for path in paths]
                legend = Legend.read(cell.folder / "pictures" / "legend.json")
            except (ConfigError, OSError, SyntaxError, ValueError) as error:
                LOG.warning("%s: unreadable pictures are skipped: %s", cell.folder, error)
                continue
            shown |= {cell.variant: panels} if panels else {}
            legends += [legend] if panels and legend else []
    if not shown:
        return None
    first = next(iter(shown.values()))
    rows = {"image": [panel[0] for panel in first], "labels": [panel[1] for panel in first]}
    rows |= {name: [panel[2] for panel in panels] for name, panels in shown.items()}
    occurring = {name for legend in legends for name in legend.shown}
    classes = legends[0].classes if legends else {}
    colours = {name: colour for name, colour in classes.items() if name in occurring}
    columns = drawing.legend_columns(list(colours))
    lines = 1 + -(-len(colours) // columns) if legends else 0
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
        weights = " or ".join(dict.fromkeys(legend.weights for legend in legends))
        title = f"Predictions of the {weights} weights"
        figure.legend(handles=patches, loc="outside lower center", ncols=columns, title=title)
    return figure
