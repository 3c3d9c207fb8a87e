"""Operations on groups of images have the bits of Pillow's operations on one image."""

import math
from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image, ImageEnhance, ImageOps

from lit_attn.data.augment import operations

BICUBIC = Image.Resampling.BICUBIC
NEAREST = Image.Resampling.NEAREST
SHAPES = [(3, 32, 32), (1, 32, 32), (3, 5, 7), (1, 9, 2), (3, 1, 1)]

AMOUNTS = {
    "Identity": [0.0],
    "AutoContrast": [0.0],
    "Equalize": [0.0],
    "Invert": [0.0],
    "Posterize": [1.0, 3.0, 8.0],
    "Solarize": [0.0, 119.4667, 256.0],
    "Brightness": [0.0, 0.94, 1.0, 1.9],
    "Color": [0.0, 0.31, 1.9],
    "Contrast": [0.0, 0.7, 1.9],
    "Sharpness": [0.0, 0.5, 1.9],
    "Rotate": [0.0, 90.0, -13.3, 180.0, 29.9],
    "ShearX": [-0.3, 0.14],
    "ShearY": [0.3, -0.07],
    "TranslateX": [-2.5, 1.0, 46.67],
    "TranslateY": [-46.67, 0.5, 3.0],
}


def with_pillow(
    name: str, amount: float, fill: int, shear: Image.Resampling
) -> Callable[[Image.Image], Image.Image]:
    """Return the operation of Pillow on one picture."""

    def move(picture: Image.Image) -> Image.Image:
        colour = (fill,) * len(picture.getbands())
        if name == "Rotate":
            return picture.rotate(amount, fillcolor=colour)
        by = shear if name.startswith("Shear") else NEAREST
        matrix = operations.MATRICES[name](amount)
        affine = Image.Transform.AFFINE
        return picture.transform(picture.size, affine, matrix, by, fillcolor=colour)

    simple: dict[str, Callable[[Image.Image], Image.Image]] = {
        "Identity": lambda picture: picture,
        "AutoContrast": ImageOps.autocontrast,
        "Equalize": ImageOps.equalize,
        "Invert": ImageOps.invert,
        "Posterize": lambda picture: ImageOps.posterize(picture, int(amount)),
        "Solarize": lambda picture: ImageOps.solarize(picture, math.ceil(amount)),
    }
    if name in simple:
        return simple[name]
    if name in operations.DEGENERATES:
        return lambda picture: getattr(ImageEnhance, name)(picture).enhance(amount)
    return move


def make_group(shape: tuple[int, int, int]) -> NDArray[np.uint8]:
    """Return noise, a flat image, one of two levels, and noise of few dark levels."""
    generator = np.random.default_rng(math.prod(shape))
    group = generator.integers(256, size=(6, *shape), dtype=np.uint8)
    group[1] = 77
    group[2] = np.where(group[2] > 99, 200, 3)
    group[3] //= 16
    return group


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", AMOUNTS)
def test_a_group_has_the_bits_of_single_images(name: str, shape: tuple[int, int, int]) -> None:
    group = make_group(shape)
    before = group.copy()
    channels, height, width = shape
    for amount in AMOUNTS[name]:
        for shear in (NEAREST, BICUBIC):
            changed = operations.operate(name, group, amount, 128, shear)
            assert np.array_equal(group, before)
            for image, out in zip(group, changed, strict=True):
                pixels = image.transpose(1, 2, 0) if channels == 3 else image[0]
                picture = Image.fromarray(np.ascontiguousarray(pixels))
                expected = np.asarray(with_pillow(name, amount, 128, shear)(picture))
                expected = expected.reshape(height, width, channels).transpose(2, 0, 1)
                assert np.array_equal(out, expected), (amount, shear)


@pytest.mark.parametrize("name", AMOUNTS)
def test_the_order_of_a_group_in_memory_changes_no_bit(name: str) -> None:
    """A view of pictures with their channels last, and one of mirrored pictures."""
    images = make_group((3, 10, 12)).transpose(0, 2, 3, 1).copy()
    views = [images.transpose(0, 3, 1, 2), make_group((3, 10, 12))[..., ::-1]]
    for view in views:
        amount = AMOUNTS[name][-1]
        changed = operations.operate(name, view, amount, 128, BICUBIC)
        ordered = np.ascontiguousarray(view)
        assert np.array_equal(changed, operations.operate(name, ordered, amount, 128, BICUBIC))
