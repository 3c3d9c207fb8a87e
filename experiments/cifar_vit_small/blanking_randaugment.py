"""Plug-in for the RandAugment of the ViT-small CIFAR set-up.

The studies of BeliefFormer and AttentionX on CIFAR name this file under `parts`.

Source: github.com/kentaroy47/vision-transformers-cifar10 at 5bb83d3 (docs/setups.md, section 1).
"""

from typing import Any

import numpy as np
import torch
from pydantic import Field, PositiveInt
from torch import Tensor

from lit_attn.data.augment.base import Augmentation, ImageFormat
from lit_attn.data.augment.operations import MATRICES, Pixels
from lit_attn.data.augment.policies import RandAugment


class BlankingRandAugmentConfig(Augmentation, kind="blanking-randaugment"):
    """RandAugment whose translations exceed the width of an image of CIFAR.

    Two of its 16 operations move a 32-pixel image by 46.7 pixels at magnitude 14 of 30, so two
    draws make 23.4 % of the images black.
    """

    runs_foreign_code = False  # Tests try it out, so a dry run need not.
    stage = "bytes"
    ops: PositiveInt = Field(2, description="operations for each image")
    magnitude: int = Field(14, ge=0, le=30, description="strength of the operations")

    def build(self, images: ImageFormat) -> "BlankingRandAugment":
        return BlankingRandAugment(self.ops, self.magnitude, images)

    def identity(self) -> dict[str, Any]:
        """Return the identity from the time when `randaugment` of the package had this flavour."""
        return {**super().identity(), "kind": "randaugment", "flavour": "blanking"}


RANGES = {
    "AutoContrast": (0.0, 1.0),
    "Equalize": (0.0, 1.0),
    "Invert": (0.0, 1.0),
    "Rotate": (0.0, 30.0),
    "Posterize": (0.0, 4.0),
    "Solarize": (0.0, 256.0),
    "SolarizeAdd": (0.0, 110.0),
    "Color": (0.1, 1.9),
    "Contrast": (0.1, 1.9),
    "Brightness": (0.1, 1.9),
    "Sharpness": (0.1, 1.9),
    "ShearX": (0.0, 0.3),
    "ShearY": (0.0, 0.3),
    "CutoutAbs": (0.0, 40.0),
    "TranslateX": (0.0, 100.0),
    "TranslateY": (0.0, 100.0),
}
"""Strengths of each operation at magnitudes 0 and 30. Translations are in pixels."""

CUTOUT_FILL = (125, 123, 114)


class BlankingRandAugment(RandAugment):
    """RandAugment with the operations and ranges of the released code.

    Colour operations only weaken (factor 0.94 at magnitude 14), so they have no sign.
    """

    signed_names = frozenset({"Rotate", *MATRICES})

    def strengths(self, magnitude: int, size: int) -> dict[str, float]:
        """Return the strength of each operation: `magnitude` of 30 on its range."""
        share = magnitude / 30
        strengths = {name: share * (high - low) + low for name, (low, high) in RANGES.items()}
        strengths["Posterize"] = max(1, int(strengths["Posterize"]))
        return strengths

    def draw_places(self, shape: tuple[int, int], generator: torch.Generator) -> Tensor:
        """Return two uniform numbers (N, rounds, 2) for the centre of a square."""
        return torch.rand(*shape, 2, generator=generator, dtype=torch.double)

    def change(
        self, pixels: Pixels, rows: list[int], name: str, amount: float, places: Tensor
    ) -> None:
        if name == "CutoutAbs":
            for row in rows:
                cut_out(pixels[row], amount, places[row].tolist())
        elif name == "SolarizeAdd":
            pixels[rows] = add_and_solarize(pixels[rows], int(amount))
        else:
            super().change(pixels, rows, name, amount, places)


def add_and_solarize(pixels: Pixels, addition: int) -> Pixels:
    """Return the pixels plus `addition`, at most 255, with levels of 128 and more inverted."""
    brighter = np.minimum(255, np.arange(256) + addition)
    levels = np.where(brighter < 128, brighter, 255 - brighter).astype(np.uint8)
    return levels[pixels]


def cut_out(image: Pixels, side: float, place: list[float]) -> None:
    """Fill a square of one image (C, H, W), in place, around a random centre.

    The released code draws centres "from 32 to 1", that is in (1, 32], not [0, 32). `place` has two
    uniform numbers, for the column and the row. Pillow's rectangles include both of their edges.
    """
    channels, height, width = image.shape
    x = width + (1 - width) * place[0]
    y = height + (1 - height) * place[1]
    left = int(max(0, x - side / 2))
    top = int(max(0, y - side / 2))
    right = int(min(width, left + side))
    bottom = int(min(height, top + side))
    colour = np.array(CUTOUT_FILL[:channels], np.uint8)
    image[:, top : bottom + 1, left : right + 1] = colour[:, None, None]
