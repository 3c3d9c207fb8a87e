"""Figure of segmented images: image, labels and the predictions of every variant."""

import math
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from lit_attn.cells.legend import Legend
from lit_attn.report.figures import drawing
from lit_attn.report.figures.drawing import GREY, MOST_PANELS
from lit_attn.report.records.skipped import LOG
from lit_attn.report.records.study_record import CellRecord, StudyRecord
from lit_attn.schema.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from numpy.typing import NDArray

ROW_HEIGHT = 1.05  # Inches; a row of pictures.
MOST_PIXELS = 2**22
"""Most pixels of a picture's file that is read; a cell writes at most 256 rows."""


class Panels(NamedTuple):
    """Image, labels and prediction of one picture, each (h, w, 3) uint8."""

    image: "NDArray[np.uint8]"
    labels: "NDArray[np.uint8]"
    prediction: "NDArray[np.uint8]"


class CellPictures(NamedTuple):
    """Pictures of one cell and their legend."""

    variant: str
    panels: list[Panels]
    legend: Legend


def draw_pictures(study: StudyRecord) -> "Figure | None":
    """Draw images, labels and predictions of the first seed of every variant, with a legend.

    Returns None if no cell has pictures.
    """
    cells = read_pictures(study)
    if not cells:
        return None
    rows = {
        "image": [panels.image for panels in cells[0].panels],
        "labels": [panels.labels for panels in cells[0].panels],
    }
    for cell in cells:
        rows[cell.variant] = [panels.prediction for panels in cell.panels]
    colours = _list_shown([cell.legend for cell in cells])
    # The number of entries that fit side by side if all are as wide as the longest one.
    longest = max((len(name) for name in colours), default=0)
    columns = max(1, int(drawing.WIDTH / (0.6 + drawing.LETTER_WIDTH * longest)))
    legend_lines = 1 + math.ceil(len(colours) / columns)
    height = ROW_HEIGHT * len(rows) + drawing.LINE_HEIGHT * legend_lines
    figure = drawing.new_figure(height)
    most_pictures = max(len(pictures) for pictures in rows.values())
    grid = figure.subplots(len(rows), most_pictures, squeeze=False)
    for line, (name, pictures) in zip(grid, rows.items(), strict=True):
        _draw_row(line, name, pictures)
    _draw_legend(figure, colours, columns, cells)
    return figure


def read_pictures(study: StudyRecord) -> list[CellPictures]:
    """Return the pictures of the first seed of every variant that has some.

    Pictures that cannot be read are left out with a warning, and so are variants after MOST_PANELS.
    """
    cells = []
    for variant in study.plan.variants[:MOST_PANELS]:
        for cell in study.variant_cells(variant.name)[:1]:
            pictures = _read_cell(cell)
            if pictures is not None:
                cells.append(pictures)
    return cells


def _read_cell(cell: CellRecord) -> CellPictures | None:
    """Return the pictures of a finished cell; None without any, or if they cannot be read."""
    if cell.value is None or cell.folder is None:
        return None
    folder = cell.folder / "pictures"
    try:
        legend = Legend.read(folder / "legend.json")
        paths = sorted(folder.glob("*.png"), key=lambda path: int(path.stem))
        panels = [read_panels(path) for path in paths]
    except (ConfigError, OSError, SyntaxError, ValueError) as error:
        LOG.warning("%s: its pictures cannot be read and are skipped: %s", cell.folder, error)
        return None
    if legend is None or not panels:
        return None
    return CellPictures(cell.variant, panels, legend)


def read_panels(path: Path) -> Panels:
    """Return the three panels of a file; raise ValueError or OSError if it is no such file."""
    from PIL import Image

    with Image.open(path, formats=["PNG"]) as image:
        width, height = image.size
        if width % 3 or width * height > MOST_PIXELS:
            raise ValueError(f"{path.name}: {width} x {height} pixels are not three panels")
        pixels = np.asarray(image.convert("RGB"))
    first, second, third = np.split(pixels, 3, axis=1)
    return Panels(first, second, third)


def _list_shown(legends: list[Legend]) -> dict[str, tuple[int, int, int]]:
    """Return the colours of the classes that occur in any picture, in the order of the classes."""
    shown = {name for legend in legends for name in legend.shown}
    colours: dict[str, tuple[int, int, int]] = {}
    for legend in legends:
        for name, colour in legend.classes.items():
            if name in shown:
                colours.setdefault(name, colour)
    return colours


def _draw_row(line: "NDArray[np.object_]", name: str, pictures: "list[NDArray[np.uint8]]") -> None:
    """Draw pictures into the axes of a row, whose name stands at its left."""
    axes: Axes
    for axes in line:
        axes.grid(False)
        axes.set(xticks=[], yticks=[], frame_on=False)
    for axes, picture in zip(line, pictures, strict=False):
        axes.imshow(picture, interpolation="nearest")
    line[0].set_ylabel(name, rotation="horizontal", ha="right", va="center")


def _draw_legend(
    figure: "Figure",
    colours: dict[str, tuple[int, int, int]],
    columns: int,
    cells: list[CellPictures],
) -> None:
    """Draw the colours of the classes below the pictures, with the weights that predict."""
    from matplotlib.patches import Patch

    patches = []
    for name, (red, green, blue) in colours.items():
        face = (red / 255, green / 255, blue / 255)
        patches.append(Patch(facecolor=face, edgecolor=GREY, linewidth=0.4, label=name))
    weights = " or ".join(sorted({cell.legend.weights for cell in cells}))
    title = f"Predictions of the {weights} weights"
    figure.legend(handles=patches, loc="outside lower center", ncols=columns, title=title)
