"""Readers of images and label maps for mmsegmentation that check every file.

A malformed file is a ConfigError that names it. mmsegmentation itself would stretch labels of
another size and wrap labels that eight bits cannot hold.
"""

from typing import Any

import cv2
import numpy as np
from mmcv.transforms import LoadImageFromFile
from mmseg.datasets.transforms import LoadAnnotations
from PIL import Image

from lit_attn.config.data.segmentation import IGNORED
from lit_attn.schema.errors import ConfigError

# Pillow's modes of images with one 8-bit value per pixel.
ONE_BYTE = {"1", "L", "P"}


class CheckedImage(LoadImageFromFile):
    """Reader of the image at `img_path`, (h, w, 3) BGR."""

    def transform(self, results: dict[str, Any]) -> dict[str, Any]:
        try:
            read: dict[str, Any] = super().transform(results)
        except (AssertionError, OSError, cv2.error) as error:
            raise ConfigError(
                f"data.root: {results['img_path']} cannot be read as an image"
            ) from error
        return read


class CheckedAnnotations(LoadAnnotations):
    """Reader of the labels at `seg_map_path`, (h, w): classes 0 to `num_classes` - 1, or IGNORED.

    In the file 0 means no class, so its numbers are larger by one. The image, which is read first,
    has stored its size as `ori_shape`.
    """

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.num_classes = num_classes

    def transform(self, results: dict[str, Any]) -> dict[str, Any]:
        path = results["seg_map_path"]
        try:
            with Image.open(path) as file:
                _require_matching(results, file)
            read: dict[str, Any] = super().transform(results)
        except (OSError, SyntaxError) as error:
            # Pillow raises SyntaxError for a broken PNG.
            raise ConfigError(f"data.root: {path} cannot be read as an image") from error
        labels = read["gt_seg_map"]
        unknown = np.unique(labels[(labels >= self.num_classes) & (labels != IGNORED)])
        if len(unknown):
            raise ConfigError(
                f"data.root: {path} has the label {unknown[0] + 1}; labels are 1 to "
                f"{self.num_classes} for the classes, and 0 or {IGNORED} for no class"
            )
        return read


def _require_matching(results: dict[str, Any], labels: Image.Image) -> None:
    """Raise ConfigError if the header of `labels` does not match the image."""
    path = results["seg_map_path"]
    if labels.mode not in ONE_BYTE:
        raise ConfigError(
            f"data.root: {path} has pixels of mode {labels.mode}; labels are a PNG of mode L with "
            "the number of a class in each pixel"
        )
    height, width = results["ori_shape"]
    if labels.size != (width, height):
        raise ConfigError(
            f"data.root: {path} has {labels.width} x {labels.height} pixels, its image "
            f"{results['img_path']} has {width} x {height}"
        )
