"""Operations of AutoAugment and RandAugment on groups of images, with Pillow's bits.

All images of a group have the same operation and the same amount. Pillow works on one picture at a
time, and for 32 x 32 pixels its calls cost more than the pixels do. So a group is handed to Pillow
in as few calls as possible:

- An operation of single bytes (`Invert`, `Brightness`) sees the group as one tall grey picture.
- A blend with a second picture (`Contrast`, `Color`, `Sharpness`) sees two tall pictures.
- A movement to the nearest pixel (`Rotate`, `TranslateX`) moves a picture of pixel numbers once,
  and all images of the group are read in the order of these numbers.
- `AutoContrast` and `Equalize` have a lookup table for each channel of each image, which is
  computed for the whole group at once. Pillow computes it in a Python loop over 256 levels.

torchvision.transforms.v2.functional has the same operations for batches, and is not used here. For
256 images of 32 x 32 pixels on one core it takes 1.3 times as long (movements 5 times). It has no
bicubic shear of batches. It differs from Pillow by 1 in 21 % of the bytes after Color, 3 % after
AutoContrast and 2 % after Contrast, and moves 7 % of the pixels of a shear differently (torchvision
0.29).

Shapes: groups (G, C, H, W) uint8 with one or three channels; amounts are numbers.
"""

import math
from collections.abc import Callable
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageFilter, ImageOps

Pixels = NDArray[np.uint8]

LEVELS = 256
OUTSIDE = -1  # Pixel number of the places outside the image.

# Pillow's coefficients a to f: output pixel (x, y) is input pixel (a x + b y + c, d x + e y + f).
MATRICES: dict[str, Callable[[float], tuple[float, ...]]] = {
    "ShearX": lambda amount: (1, amount, 0, 0, 1, 0),
    "ShearY": lambda amount: (1, 0, 0, amount, 1, 0),
    "TranslateX": lambda pixels: (1, 0, pixels, 0, 1, 0),
    "TranslateY": lambda pixels: (1, 0, 0, 0, 1, pixels),
}

BYTES: dict[str, Callable[[Image.Image, float], Image.Image]] = {
    "Invert": lambda picture, _: ImageOps.invert(picture),
    "Posterize": lambda picture, bits: ImageOps.posterize(picture, int(bits)),
    "Solarize": lambda picture, threshold: ImageOps.solarize(picture, math.ceil(threshold)),
}
"""Operations whose result for a byte depends on this byte and the amount only."""

DEGENERATES: dict[str, Callable[[Pixels], Pixels]] = {
    "Brightness": lambda group: np.zeros_like(group),
    "Color": lambda group: np.broadcast_to(_to_grey(group), group.shape),
    "Contrast": lambda group: np.broadcast_to(_mean_grey(group), group.shape),
    "Sharpness": lambda group: _smooth(group),
}
"""For each operation of PIL.ImageEnhance, the images with which it blends a group."""

TABLES: dict[str, Callable[[NDArray[np.int64]], NDArray[np.int64]]] = {
    "AutoContrast": lambda histograms: _stretch(histograms),
    "Equalize": lambda histograms: _equalize(histograms),
}
"""Operations with a lookup table (P, 256) for the histogram (P, 256) of each channel."""


def operate(name: str, group: Pixels, amount: float, fill: int, shear: Image.Resampling) -> Pixels:
    """Return the images of a group after the operation `name`.

    `fill` is the grey level of the places outside an image, and `shear` is the interpolation of
    shears.
    """
    if name == "Identity":
        return group
    if name in BYTES:
        return _from_tall(BYTES[name](_to_tall(group), amount), group)
    if name in DEGENERATES:
        degenerate = _to_tall(DEGENERATES[name](group))
        return _from_tall(Image.blend(degenerate, _to_tall(group), amount), group)
    if name in TABLES:
        return _look_up(group, TABLES[name](_count_levels(group)))
    if name.startswith("Shear") and shear != Image.Resampling.NEAREST:
        return _shear_smoothly(name, group, amount, fill, shear)
    return _move(name, group, amount, fill)


def _to_tall(group: Pixels) -> Image.Image:
    """Return all planes of a group, one below the other, as one grey picture."""
    width = group.shape[-1]
    return Image.fromarray(np.ascontiguousarray(group).reshape(-1, width))


def _from_tall(picture: Image.Image, group: Pixels) -> Pixels:
    """Return the planes of a tall picture in the shape of `group`."""
    return np.asarray(picture).reshape(group.shape)


def _to_grey(group: Pixels) -> Pixels:
    """Return the luminance (G, 1, H, W) of a group."""
    count, channels, height, width = group.shape
    if channels == 1:
        return group
    colours = np.ascontiguousarray(group.transpose(0, 2, 3, 1)).reshape(-1, width, channels)
    grey = np.asarray(Image.fromarray(colours).convert("L"))
    return grey.reshape(count, 1, height, width)


def _mean_grey(group: Pixels) -> Pixels:
    """Return the mean luminance of each image, rounded as PIL.ImageEnhance does; (G, 1, 1, 1)."""
    mean = _to_grey(group).mean(axis=(1, 2, 3), keepdims=True, dtype=np.float64)
    return (mean + 0.5).astype(np.uint8)


def _smooth(group: Pixels) -> Pixels:
    """Return a group after Pillow's filter SMOOTH, which leaves the border of an image."""
    tall = _to_tall(group).filter(ImageFilter.SMOOTH)
    smoothed = _from_tall(tall, group)
    # At the border of a plane the filter has seen pixels of the plane above or below.
    result = group.copy()
    result[..., 1:-1, 1:-1] = smoothed[..., 1:-1, 1:-1]
    return result


def _count_levels(group: Pixels) -> NDArray[np.int64]:
    """Return the histogram (G * C, 256) of each plane of a group."""
    planes = group.reshape(group.shape[0] * group.shape[1], -1)
    offsets = LEVELS * np.arange(len(planes))[:, None]
    counts = np.bincount((planes + offsets).ravel(), minlength=LEVELS * len(planes))
    return counts.reshape(len(planes), LEVELS)


def _stretch(histograms: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the lookup tables of PIL.ImageOps.autocontrast."""
    is_used = histograms > 0
    low = is_used.argmax(1)[:, None]
    high = LEVELS - 1 - is_used[:, ::-1].argmax(1)[:, None]
    has_range = high > low
    scale = 255.0 / np.where(has_range, high - low, 1)
    offset = -low * scale
    levels = np.arange(LEVELS)
    stretched = np.clip((levels * scale + offset).astype(np.int64), 0, LEVELS - 1)
    return np.where(has_range, stretched, levels)


def _equalize(histograms: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the lookup tables of PIL.ImageOps.equalize."""
    is_used = histograms > 0
    last = LEVELS - 1 - is_used[:, ::-1].argmax(1)[:, None]
    total = histograms.sum(1, keepdims=True)
    step = (total - np.take_along_axis(histograms, last, 1)) // 255
    has_step = step > 0
    step = np.where(has_step, step, 1)
    darker = histograms.cumsum(1) - histograms
    equalized = np.minimum((step // 2 + darker) // step, LEVELS - 1)
    return np.where(has_step, equalized, np.arange(LEVELS))


def _look_up(group: Pixels, tables: NDArray[np.int64]) -> Pixels:
    """Return a group whose planes are translated by their rows of `tables` (G * C, 256)."""
    # `empty_like` keeps the order of another layout, and `translated` would be a copy.
    result = np.empty(group.shape, np.uint8)
    planes = group.reshape(len(tables), -1)
    translated = result.reshape(len(tables), -1)
    for plane, table, target in zip(planes, tables.astype(np.uint8), translated, strict=True):
        # The method of bytes is several times as fast as an index of NumPy.
        target[:] = np.frombuffer(plane.tobytes().translate(table.tobytes()), np.uint8)
    return result


def _move(name: str, group: Pixels, amount: float, fill: int) -> Pixels:
    """Return a group whose pixels are taken from the nearest pixels of a movement."""
    height, width = group.shape[-2:]
    numbers, is_outside = _number_pixels(name, amount, height, width)
    moved = group.reshape(*group.shape[:2], -1).take(numbers, axis=2)
    moved[..., is_outside] = fill
    return moved.reshape(group.shape)


@lru_cache(maxsize=1024)
def _number_pixels(
    name: str, amount: float, height: int, width: int
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Return the number of the pixel that a movement takes to each place, and what is outside.

    Pillow moves a picture of pixel numbers, so its rounding decides.
    """
    numbers = np.arange(height * width, dtype=np.int32).reshape(height, width)
    picture = Image.fromarray(numbers)
    if name == "Rotate":
        moved = picture.rotate(amount, fillcolor=OUTSIDE)
    else:
        matrix = MATRICES[name](amount)
        affine, nearest = Image.Transform.AFFINE, Image.Resampling.NEAREST
        moved = picture.transform(picture.size, affine, matrix, nearest, fillcolor=OUTSIDE)
    taken = np.asarray(moved).ravel().astype(np.int64)
    is_outside = taken == OUTSIDE
    return np.where(is_outside, 0, taken), is_outside


def _shear_smoothly(
    name: str, group: Pixels, amount: float, fill: int, by: Image.Resampling
) -> Pixels:
    """Return a group of sheared images, one after the other: new colours are interpolated."""
    channels = group.shape[1]
    sheared = np.empty_like(group)
    for image, target in zip(group, sheared, strict=True):
        pixels = image.transpose(1, 2, 0) if channels > 1 else image[0]
        picture = Image.fromarray(np.ascontiguousarray(pixels))
        moved = picture.transform(
            picture.size,
            Image.Transform.AFFINE,
            MATRICES[name](amount),
            by,
            fillcolor=(fill,) * channels,
        )
        result = np.asarray(moved).reshape(*picture.size[::-1], channels)
        target[:] = result.transpose(2, 0, 1)
    return sheared
