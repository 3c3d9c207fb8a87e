"""Images and their labels as mmsegmentation reads them, each file held to what its data say.

Whatever is wrong with a file is a ConfigError that names it: mmsegmentation itself would stretch
labels of another size, and wrap those that eight bits do not hold.
"""

from typing import Any

import cv2
import numpy as np
from mmcv.transforms import LoadImageFromFile
from mmseg.datasets.transforms import LoadAnnotations
from PIL import Image

from lit_attn.config.data.segmentation import IGNORED
from lit_attn.schema.errors import ConfigError

# Pillow's names for images of one value a pixel, which eight bits hold.
ONE_BYTE = {"1", "L", "P"}


class CheckedImage(LoadImageFromFile):
    """The image at `img_path`, (h, w, 3) BGR."""

    def transform(self, results: dict[str, Any]) -> dict[str, Any]:
        try:
            found: dict[str, Any] = super().transform(results)
        except (AssertionError, OSError, cv2.error) as error:
            raise ConfigError(
                f"data.root: {results['img_path']} cannot be read as an image"
            ) from error
        return found


class CheckedAnnotations(LoadAnnotations):
    """The labels at `seg_map_path`, (h, w): classes 0 to `num_classes` - 1, or IGNORED.

    In the file 0 is no class, so its numbers are one more. What is read before them has the size of
    the image in its file under `ori_shape`.
    """

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.num_classes = num_classes

    def transform(self, results: dict[str, Any]) -> dict[str, Any]:
        path = results["seg_map_path"]
        try:
            with Image.open(path) as file:
                _of_the_image(results, file)
            found: dict[str, Any] = super().transform(results)
        except (OSError, SyntaxError) as error:
            # Of a broken PNG Pillow says SyntaxError.
            raise ConfigError(f"data.root: {path} cannot be read as an image") from error
        labels = found["gt_seg_map"]
        unknown = np.unique(labels[(labels >= self.num_classes) & (labels != IGNORED)])
        if len(unknown):
            raise ConfigError(
                f"data.root: {path} has the label {unknown[0] + 1}; labels are 1 to "
                f"{self.num_classes}, a class each, and 0 or {IGNORED} where there is none"
            )
        return found


def _of_the_image(results: dict[str, Any], labels: Image.Image) -> None:
    """ConfigError where the header of `labels` says that they are not those of the image."""
    path = results["seg_map_path"]
    if labels.mode not in ONE_BYTE:
        raise ConfigError(
            f"data.root: {path} has pixels of mode {labels.mode}; labels are a PNG of mode L, the "
            "number of a class in each pixel"
        )
    height, width = results["ori_shape"]
    if labels.size != (width, height):
        raise ConfigError(
            f"data.root: {path} has {labels.width} x {labels.height} pixels, its image "
            f"{results['img_path']} has {width} x {height}"
        )
