"""AutoAugment and RandAugment: random operations of random strength for every image.

Images are uint8 (N, C, H, W) with one or three channels. The parameters of a batch are three CPU
tensors: for every image and round an operation (an index into the policy's names; (N, rounds)), a
magnitude (N, rounds), and two uniform numbers (N, rounds, 2). Pillow applies the operations to one
image after the other on the CPU, as the published set-ups do.
"""

import math
from collections.abc import Callable, Collection
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageEnhance, ImageOps
from torch import Tensor
from torchvision.transforms import AutoAugment as TorchvisionAutoAugment
from torchvision.transforms import AutoAugmentPolicy
from torchvision.transforms import RandAugment as TorchvisionRandAugment

from lit_attn.config.augment import AutoAugmentConfig, ImageFormat, RandAugmentConfig

CUTOUT_FILL = (125, 123, 114)  # In the ViT-small CIFAR set-up (docs/setups.md).

# Operations whose factor is 1 plus or minus the magnitude.
ENHANCEMENTS = ("Brightness", "Color", "Contrast", "Sharpness")

PIXELS: dict[str, Callable[[Image.Image, float], Image.Image]] = {
    "Identity": lambda image, _: image,
    "AutoContrast": lambda image, _: ImageOps.autocontrast(image),
    "Equalize": lambda image, _: ImageOps.equalize(image),
    "Invert": lambda image, _: ImageOps.invert(image),
    "Posterize": lambda image, bits: ImageOps.posterize(image, int(bits)),
    "Solarize": lambda image, threshold: ImageOps.solarize(image, math.ceil(threshold)),
    "SolarizeAdd": lambda image, addition: ImageOps.solarize(
        image.point(lambda value: min(255, value + int(addition))), 128
    ),
}

# Pillow's coefficients a to f: output pixel (x, y) is input pixel (a x + b y + c, d x + e y + f).
MATRICES: dict[str, Callable[[float], tuple[float, ...]]] = {
    "ShearX": lambda amount: (1, amount, 0, 0, 1, 0),
    "ShearY": lambda amount: (1, 0, 0, amount, 1, 0),
    "TranslateX": lambda pixels: (1, 0, pixels, 0, 1, 0),
    "TranslateY": lambda pixels: (1, 0, 0, 0, 1, pixels),
}


class Policy:
    """Base of the policies: names of the operations, and which magnitudes have a random sign."""

    fill = 0
    """Grey level outside the image."""
    shear: ClassVar[Image.Resampling] = Image.Resampling.NEAREST

    def __init__(self, names: list[str], signed: Collection[str]) -> None:
        self.names = names
        self.signed = torch.tensor([name in signed for name in names])
        centre = [float(name in ENHANCEMENTS and name in signed) for name in names]
        self.centre = torch.tensor(centre, dtype=torch.double)

    def apply(self, images: Tensor, drawn: tuple[Tensor, ...]) -> Tensor:
        """Return the images after all rounds."""
        samples = zip(images.cpu().numpy(), *(part.tolist() for part in drawn), strict=True)
        changed = np.ascontiguousarray([self._change(*sample) for sample in samples])
        return torch.from_numpy(changed).to(images.device)

    def _change(self, pixels: NDArray[np.uint8], *rounds: list[Any]) -> NDArray[np.uint8]:
        channels, height, width = pixels.shape
        image = Image.fromarray(pixels.transpose(1, 2, 0) if channels > 1 else pixels[0])
        for operation, amount, place in zip(*rounds, strict=True):
            image = self._perform(self.names[operation], image, amount, place)
        return np.asarray(image).reshape(height, width, channels).transpose(2, 0, 1)

    def _perform(
        self, name: str, image: Image.Image, amount: float, place: list[float]
    ) -> Image.Image:
        fill = (self.fill,) * len(image.getbands())
        if name == "Rotate":
            return image.rotate(amount, fillcolor=fill)
        if name in MATRICES:
            by = self.shear if name.startswith("Shear") else Image.Resampling.NEAREST
            matrix = MATRICES[name](amount)
            return image.transform(image.size, Image.Transform.AFFINE, matrix, by, fillcolor=fill)
        if name == "CutoutAbs":
            return _cutout(image, amount, place)
        if name in ENHANCEMENTS:
            return getattr(ImageEnhance, name)(image).enhance(amount)
        return PIXELS[name](image, amount)

    def _magnitudes(self, operation: Tensor, amount: Tensor, generator: torch.Generator) -> Tensor:
        """Give `amount` a sign of equal probability where the operation has one."""
        signs = torch.randint(2, amount.shape, generator=generator, dtype=torch.double) * 2 - 1
        return self.centre[operation] + amount * torch.where(self.signed[operation], signs, 1)


class AutoAugment(Policy):
    """One of 25 sub-policies of two operations, as in the CIFAR-100 set-up (docs/setups.md)."""

    shear = Image.Resampling.BICUBIC

    def __init__(self, config: AutoAugmentConfig, images: ImageFormat) -> None:
        self.fill = config.fill
        table = TorchvisionAutoAugment(AutoAugmentPolicy.CIFAR10).policies
        names = ["Identity", *sorted({name for pair in table for name, _, _ in pair})]
        super().__init__(names, {*ENHANCEMENTS, *MATRICES})
        places = [[names.index(name) for name, _, _ in pair] for pair in table]
        self.operation = torch.tensor(places)
        self.p = torch.tensor([[p for _, p, _ in pair] for pair in table])
        size = images.shape[2]
        bins = [[_autoaugment_bin(name, m or 0, size) for name, _, m in pair] for pair in table]
        self.magnitude = torch.tensor(bins, dtype=torch.double)

    def draw(self, n: int, generator: torch.Generator) -> tuple[Tensor, ...]:
        # An operation that does not happen is Identity.
        policy = torch.randint(len(self.p), (n,), generator=generator)
        happens = torch.rand(n, 2, generator=generator) < self.p[policy]
        operation = torch.where(happens, self.operation[policy], 0)
        magnitude = self._magnitudes(operation, self.magnitude[policy], generator)
        return operation, magnitude, torch.zeros(n, 2, 2)


class RandAugment(Policy):
    """Operations with the same strength and equal probability (Cubuk et al. 2020)."""

    def __init__(self, config: RandAugmentConfig, images: ImageFormat) -> None:
        self.rounds = config.ops
        if config.flavour == "blanking":
            amounts, signed = _blanking_amounts(config.magnitude), {"Rotate", *MATRICES}
        else:
            amounts = _torchvision_amounts(config.magnitude, images.shape[2])
            signed = {"Rotate", *MATRICES, *ENHANCEMENTS}
        super().__init__(list(amounts), signed)
        self.magnitude = torch.tensor(list(amounts.values()), dtype=torch.double)

    def draw(self, n: int, generator: torch.Generator) -> tuple[Tensor, ...]:
        shape = (n, self.rounds)
        operation = torch.randint(len(self.names), shape, generator=generator)
        magnitude = self._magnitudes(operation, self.magnitude[operation], generator)
        if "CutoutAbs" not in self.names:
            return operation, magnitude, torch.zeros(*shape, 2)
        return operation, magnitude, torch.rand(*shape, 2, generator=generator, dtype=torch.double)


def _blanking_amounts(magnitude: int) -> dict[str, float]:
    """Return the strengths of the ViT-small CIFAR set-up: `magnitude` of 30 on the code's ranges.

    Colour operations only weaken (factor 0.94 at magnitude 14), and translations reach 100 pixels,
    more than the image's width.
    """
    ranges = {
        **dict.fromkeys(("AutoContrast", "Equalize", "Invert"), (0.0, 1.0)),
        "Rotate": (0.0, 30.0),
        "Posterize": (0.0, 4.0),
        "Solarize": (0.0, 256.0),
        "SolarizeAdd": (0.0, 110.0),
        **dict.fromkeys(("Color", "Contrast", "Brightness", "Sharpness"), (0.1, 1.9)),
        **dict.fromkeys(("ShearX", "ShearY"), (0.0, 0.3)),
        "CutoutAbs": (0.0, 40.0),
        **dict.fromkeys(("TranslateX", "TranslateY"), (0.0, 100.0)),
    }
    share = magnitude / 30
    amounts = {name: share * (high - low) + low for name, (low, high) in ranges.items()}
    return amounts | {"Posterize": max(1, int(amounts["Posterize"]))}


def _torchvision_amounts(magnitude: int, size: int) -> dict[str, float]:
    """Return the strengths of torchvision: bin `magnitude` of 31 for images of `size` pixels."""
    table = TorchvisionRandAugment()._augmentation_space(31, (size, size))
    amounts = {n: float(bins[magnitude] if bins.ndim else bins) for n, (bins, _) in table.items()}
    # Torchvision translates by whole pixels.
    return amounts | {name: int(amounts[name]) for name in ("TranslateX", "TranslateY")}


def _autoaugment_bin(name: str, index: int, size: int) -> float:
    """Return magnitude `index` of 0 (none) to 9 (strongest) for images of `size` pixels."""
    shear, move = np.linspace(0, 0.3, 10), np.linspace(0, 150 / 331, 10) * size
    bins = {
        **{"ShearX": shear, "ShearY": shear, "TranslateX": move, "TranslateY": move},
        "Rotate": np.linspace(0, 30, 10),
        "Posterize": np.linspace(8, 4, 10).round(),
        "Solarize": np.linspace(256, 0, 10),
    }
    return float(bins.get(name, np.linspace(0, 0.9, 10))[index])


def _cutout(image: Image.Image, side: float, place: list[float]) -> Image.Image:
    """Fill a square. The set-up draws centres "from 32 to 1", that is in (1, 32], not [0, 32)."""
    x, y = (length + (1 - length) * part for length, part in zip(image.size, place, strict=True))
    left, top = int(max(0, x - side / 2)), int(max(0, y - side / 2))
    box = (left, top, min(image.width, left + side), min(image.height, top + side))
    image = image.copy()
    ImageDraw.Draw(image).rectangle(box, CUTOUT_FILL[: len(image.getbands())])
    return image
