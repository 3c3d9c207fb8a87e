"""Operations of AutoAugment and RandAugment with Pillow, one image after the other."""

from collections.abc import Callable

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageEnhance, ImageOps
from torch import Tensor

from lit_attn.data.augment.policies import Policy


def affine(fill: int, by: Image.Resampling, *matrix: float) -> Callable[[Image.Image], Image.Image]:
    return lambda image: image.transform(
        image.size, Image.Transform.AFFINE, matrix, by, fillcolor=(fill,) * 3
    )


def published(
    name: str, m: float, place: list[float], fill: int, shear: Image.Resampling
) -> Callable[[Image.Image], Image.Image]:
    """Apply the operation with Pillow to the drawn parameters (docs/setups.md)."""
    plain = Image.Resampling.NEAREST

    def cutout(image: Image.Image) -> Image.Image:
        x, y = (side + (1 - side) * u for side, u in zip(image.size, place, strict=True))
        left = int(max(0, x - m / 2))
        top = int(max(0, y - m / 2))
        box = (left, top, min(image.width, left + m), min(image.height, top + m))
        ImageDraw.Draw(image).rectangle(box, (125, 123, 114))
        return image

    def solarize_add(image: Image.Image) -> Image.Image:
        added = np.clip(np.array(image).astype(int) + m, 0, 255).astype(np.uint8)
        return ImageOps.solarize(Image.fromarray(added), 128)

    return {
        "Identity": lambda image: image,
        "AutoContrast": ImageOps.autocontrast,
        "Equalize": ImageOps.equalize,
        "Invert": ImageOps.invert,
        "Posterize": lambda image: ImageOps.posterize(image, int(m)),
        "Solarize": lambda image: ImageOps.solarize(image, m),
        "SolarizeAdd": solarize_add,
        "Brightness": lambda image: ImageEnhance.Brightness(image).enhance(m),
        "Color": lambda image: ImageEnhance.Color(image).enhance(m),
        "Contrast": lambda image: ImageEnhance.Contrast(image).enhance(m),
        "Sharpness": lambda image: ImageEnhance.Sharpness(image).enhance(m),
        "Rotate": lambda image: image.rotate(m, fillcolor=(fill,) * 3),
        "ShearX": affine(fill, shear, 1, m, 0, 0, 1, 0),
        "ShearY": affine(fill, shear, 1, 0, 0, m, 1, 0),
        "TranslateX": affine(fill, plain, 1, 0, m, 0, 1, 0),
        "TranslateY": affine(fill, plain, 1, 0, 0, 0, 1, m),
        "CutoutAbs": cutout,
    }[name]


def assert_equals_pillow(policy: Policy, images: Tensor, generator: torch.Generator) -> None:
    """Check that a policy gives the images that Pillow gives for the same draws.

    The draws must contain every operation of the policy.
    """
    drawn = policy.draw(len(images), generator)
    augmented = policy.apply(images, drawn)
    used = set()
    draws = zip(*(part.tolist() for part in drawn), strict=True)
    for image, changed, rounds in zip(images, augmented, draws, strict=True):
        expected = Image.fromarray(image.permute(1, 2, 0).numpy())
        for operation, magnitude, place in zip(*rounds, strict=True):
            name = policy.names[operation]
            used.add(name)
            expected = published(name, magnitude, place, policy.fill, policy.shear)(expected)
        assert np.array_equal(changed.permute(1, 2, 0).numpy(), np.array(expected)), rounds
    assert used == set(policy.names)
