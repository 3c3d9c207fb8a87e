"""Generated pictures for input pipelines, and numbers that describe the augmented images."""

import functools
import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from released.recording import Arrays, generator

PROJECTIONS = 6
SIZES = ((60, 90), (100, 80), (48, 160), (30, 150), (150, 130))
"""(height, width) of the pictures."""


def picture(name: str) -> NDArray[np.uint8]:
    """Return an RGB picture (height, width, 3) of coloured squares with noise."""
    drawn = generator("picture", name)
    height, width = SIZES[drawn.integers(len(SIZES))]
    squares = drawn.integers(40, 216, size=(height // 8 + 1, width // 8 + 1, 3))
    colours = squares.repeat(8, 0).repeat(8, 1)[:height, :width]
    noisy = colours + drawn.integers(-40, 40, size=colours.shape)
    return noisy.astype(np.uint8)


def write(path: Path, pixels: NDArray[np.uint8]) -> None:
    """Write `pixels` as a PNG file of any name, and create its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path, format="PNG")


@functools.cache
def weights(size: int) -> NDArray[np.float64]:
    """Return random weights (PROJECTIONS, size) of unit length."""
    drawn = generator("projections", size).standard_normal((PROJECTIONS, size))
    return np.asarray(drawn / np.sqrt(size))


class Comparison(NamedTuple):
    """Number of results, how many are identical, and the largest difference."""

    number: int
    identical: int
    difference: float


def compare(name: str, ours: Arrays, theirs: Arrays) -> Comparison:
    """Compare the descriptions of images by this project and by released code."""
    identical = (ours[f"{name} digests"] == theirs[f"{name} digests"]).sum()
    difference = np.abs(ours[name] - theirs[name]).max()
    return Comparison(len(theirs[name]), int(identical), float(difference))


def describe(name: str, images: Iterable[Tensor]) -> Arrays:
    """Return weighted sums (n, PROJECTIONS) of the values of n images, and digests (n,).

    Every value of an image enters the sums, so a difference anywhere changes them.
    """
    values = [image.detach().float().contiguous().numpy() for image in images]
    sums = [weights(value.size) @ value.ravel().astype(np.float64) for value in values]
    digests = [hashlib.sha256(value.tobytes()).digest()[:8] for value in values]
    return {
        name: np.array(sums),
        f"{name} digests": np.array([int.from_bytes(digest, "little") for digest in digests]),
    }
