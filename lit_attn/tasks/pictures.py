"""Pictures of a segmentation: image, labels and prediction side by side, and a legend.

Shapes: image (h, w, 3) uint8 RGB; labels and prediction (h, w) uint8, IGNORED where a pixel has no
label; picture (H, 3 W, 3) uint8 with H at most HEIGHT.
"""

import colorsys
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from lit_attn.cells.legend import Legend

Colour = tuple[int, int, int]
"""Red, green and blue from 0 to 255."""

HEIGHT = 256  # Most pixels of a picture's height.
NO_LABEL = "no label"
"""Name in the legend of the pixels without a class."""
LEGEND_LINE = 20  # Pixels between two classes of a legend.
LEGEND_WIDTH = 240  # Pixels.


class Pictures(NamedTuple):
    """Pictures of the predictions of one cell, and their legend."""

    drawn: list[NDArray[np.uint8]]
    legend: Legend


def choose_colours(classes: int) -> list[Colour]:
    """Return colours for so many classes: hues at equal distances."""
    colours = []
    for number in range(classes):
        red, green, blue = colorsys.hsv_to_rgb(number / classes, 0.8, 0.9)
        colours.append((int(255 * red), int(255 * green), int(255 * blue)))
    return colours


def choose_empty_colour(palette: list[Colour]) -> Colour:
    """Return the colour of pixels without a label: black, or the darkest grey that no class has."""
    for level in range(256):
        if (level, level, level) not in palette:
            return (level, level, level)
    raise ValueError("the palette has all greys")


def draw_picture(
    image: NDArray[np.uint8],
    labels: NDArray[np.uint8],
    prediction: NDArray[np.uint8],
    colours: NDArray[np.uint8],
) -> NDArray[np.uint8]:
    """Return image, labels and prediction side by side; `colours` (256, 3) are those of labels."""
    height, width = labels.shape
    drawn_height = min(HEIGHT, height)
    size = (max(1, round(width * drawn_height / height)), drawn_height)
    panels = [np.asarray(Image.fromarray(image).resize(size))]
    for classes in (labels, prediction):
        # Colours between two classes would be those of a third one.
        panel = Image.fromarray(colours[classes]).resize(size, Image.Resampling.NEAREST)
        panels.append(np.asarray(panel))
    return np.concatenate(panels, axis=1)


def draw_legend(legend: Legend) -> NDArray[np.uint8]:
    """Return an image with the colour and the name of every class that is shown."""
    height = LEGEND_LINE * max(1, len(legend.shown))
    image = Image.new("RGB", (LEGEND_WIDTH, height), "white")
    pen = ImageDraw.Draw(image)
    font = ImageFont.load_default()
    for line, name in enumerate(legend.shown):
        top = LEGEND_LINE * line
        pen.rectangle((4, top + 4, 16, top + 16), fill=legend.classes[name], outline="grey")
        pen.text((24, top + 4), name, fill="black", font=font)
    return np.asarray(image)
