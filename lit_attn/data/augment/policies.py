"""AutoAugment and RandAugment: random operations of random strength for every image.

Images are uint8 (N, C, H, W). The parameters of a batch are three CPU tensors: for every image and
round an operation (an index into the policy's names; (N, rounds)), a magnitude (N, rounds), and two
uniform numbers (N, rounds, 2). Images with the same operation are processed together.
"""

from collections.abc import Callable
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor
from torchvision.transforms import AutoAugment as TorchvisionAutoAugment
from torchvision.transforms import AutoAugmentPolicy
from torchvision.transforms.v2 import functional

from lit_attn.config.augment import AutoAugmentConfig, RandAugmentConfig
from lit_attn.data.augment import operations

PIXELS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "Identity": lambda images, _: images,
    "AutoContrast": operations.autocontrast,
    "Brightness": operations.brightness,
    "Color": operations.color,
    "Contrast": operations.contrast,
    # These two of torchvision equal Pillow's to the last bit.
    "Equalize": lambda images, _: functional.equalize(images),
    "Invert": lambda images, _: functional.invert(images),
    "Posterize": operations.posterize,
    "Sharpness": operations.sharpness,
    "Solarize": operations.solarize,
    "SolarizeAdd": operations.solarize_add,
}

# Operations whose factor is 1 plus or minus the magnitude.
ENHANCEMENTS = ("Brightness", "Color", "Contrast", "Sharpness")

# Colour of the cutout in the ViT-small CIFAR set-up (docs/setups.md).
CUTOUT_FILL = (125, 123, 114)


class Policy:
    """Base of the policies: a list of operation names, and rounds of operations."""

    names: list[str]
    fill = 0
    shapes: ClassVar[dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]]] = {
        "Rotate": operations.rotate,
        "ShearX": operations.shear_x,
        "ShearY": operations.shear_y,
        "TranslateX": operations.translate_x,
        "TranslateY": operations.translate_y,
    }

    def draw(self, n: int, generator: torch.Generator) -> tuple[Tensor, ...]:
        """Draw the operations (with replacement), magnitudes and places of `n` images."""
        raise NotImplementedError

    def apply(self, images: Tensor, drawn: tuple[Tensor, ...]) -> Tensor:
        """Return the images after all rounds."""
        fill = torch.full((images.shape[1],), self.fill, dtype=torch.uint8, device=images.device)
        for operation, magnitude, place in zip(*(part.unbind(1) for part in drawn), strict=True):
            # Sorting on the CPU avoids a wait for the GPU.
            order = operation.argsort(stable=True)
            counts = operation.bincount(minlength=len(self.names)).tolist()
            amounts, places = (
                part[order].to(images.device, non_blocking=True).split(counts)
                for part in (magnitude, place)
            )
            order = order.to(images.device, non_blocking=True)
            groups = zip(self.names, images[order].split(counts), amounts, places, strict=True)
            changed = [self._perform(*group, fill) for group in groups if len(group[1])]
            images = torch.empty_like(images)
            images[order] = torch.cat(changed)
        return images

    def _perform(
        self, name: str, images: Tensor, amount: Tensor, place: Tensor, fill: Tensor
    ) -> Tensor:
        if name == "CutoutAbs":
            return _cutout(images, amount, place)
        if name in PIXELS:
            return PIXELS[name](images, amount)
        return self.shapes[name](images, amount, fill)


class AutoAugment(Policy):
    """One of 25 sub-policies of two operations, each with its probability (Cubuk et al. 2019).

    The variant of the CIFAR-100 set-up (docs/setups.md, section 2) differs from torchvision's:
    shears are bicubic, rotations turn one way only, translations are not rounded to pixels, and
    pixels from outside the image are grey.
    """

    shapes: ClassVar = Policy.shapes | {
        "ShearX": operations.shear_x_bicubic,
        "ShearY": operations.shear_y_bicubic,
    }
    SIGNED = (*ENHANCEMENTS, "ShearX", "ShearY", "TranslateX", "TranslateY")

    def __init__(self, config: AutoAugmentConfig, size: int) -> None:
        self.fill = config.fill
        table = TorchvisionAutoAugment(AutoAugmentPolicy.CIFAR10).policies
        self.names = ["Identity", *sorted({name for pair in table for name, _, _ in pair})]
        self.operation = torch.tensor([[self.names.index(name) for name, _, _ in p] for p in table])
        self.p = torch.tensor([[p for _, p, _ in pair] for pair in table])
        self.magnitude = torch.tensor(
            [[_autoaugment_bin(name, m or 0, size) for name, _, m in pair] for pair in table],
            dtype=torch.double,
        )
        self.signed = torch.tensor([name in self.SIGNED for name in self.names])
        self.centre = _centre(self.names)

    def draw(self, n: int, generator: torch.Generator) -> tuple[Tensor, ...]:
        # An operation that does not happen is Identity.
        policy = torch.randint(len(self.p), (n,), generator=generator)
        happens = torch.rand(n, 2, generator=generator) < self.p[policy]
        operation = torch.where(happens, self.operation[policy], 0)
        amount = self.magnitude[policy] * _signs((n, 2), self.signed[operation], generator)
        return operation, self.centre[operation] + amount, torch.zeros(n, 2, 2)


class BlankingRandAugment(Policy):
    """RandAugment of the ViT-small CIFAR set-up: 16 operations with the ranges of its code.

    Magnitude m of 30 maps linearly onto each range. Colour operations only weaken (factor 0.94 at
    m = 14), and translations reach 100 pixels, more than the image's width.
    """

    RANGES: ClassVar = {
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

    def __init__(self, config: RandAugmentConfig) -> None:
        self.rounds = config.ops
        self.names = list(self.RANGES)
        share = config.magnitude / 30
        amounts = {name: share * (high - low) + low for name, (low, high) in self.RANGES.items()}
        amounts["Posterize"] = max(1, int(amounts["Posterize"]))
        self.magnitude = torch.tensor(list(amounts.values()), dtype=torch.double)
        self.signed = torch.tensor([name in self.shapes for name in self.names])

    def draw(self, n: int, generator: torch.Generator) -> tuple[Tensor, ...]:
        operation = torch.randint(len(self.names), (n, self.rounds), generator=generator)
        signs = _signs(operation.shape, self.signed[operation], generator)
        place = torch.rand(n, self.rounds, 2, generator=generator, dtype=torch.double)
        return operation, self.magnitude[operation] * signs, place


class TorchvisionRandAugment(Policy):
    """Torchvision's RandAugment: 14 operations, magnitudes from 31 bins."""

    SIGNED = (*ENHANCEMENTS, *Policy.shapes)

    def __init__(self, config: RandAugmentConfig, size: int) -> None:
        self.rounds = config.ops

        def bin_of(most: float) -> float:
            return float(torch.linspace(0.0, most, 31)[config.magnitude])

        # Torchvision translates by whole operations.
        move = int(bin_of(150 / 331 * size))
        amounts = {
            "Identity": 0.0,
            "ShearX": bin_of(0.3),
            "ShearY": bin_of(0.3),
            "TranslateX": move,
            "TranslateY": move,
            "Rotate": bin_of(30.0),
            **dict.fromkeys(ENHANCEMENTS, bin_of(0.9)),
            "Posterize": 8 - round(config.magnitude / 7.5),
            "Solarize": float(torch.linspace(255.0, 0.0, 31)[config.magnitude]),
            "AutoContrast": 0.0,
            "Equalize": 0.0,
        }
        self.names = list(amounts)
        self.magnitude = torch.tensor(list(amounts.values()), dtype=torch.double)
        self.signed = torch.tensor([name in self.SIGNED for name in self.names])
        self.centre = _centre(self.names)

    def draw(self, n: int, generator: torch.Generator) -> tuple[Tensor, ...]:
        operation = torch.randint(len(self.names), (n, self.rounds), generator=generator)
        amount = self.magnitude[operation]
        amount = amount * _signs(operation.shape, self.signed[operation], generator)
        return operation, self.centre[operation] + amount, torch.zeros(n, self.rounds, 2)


def _autoaugment_bin(name: str, index: int, size: int) -> float:
    """Return magnitude `index` of 0 (none) to 9 (strongest) for images of `size` operations."""
    shear, move = np.linspace(0, 0.3, 10), np.linspace(0, 150 / 331, 10) * size
    bins = {
        **{"ShearX": shear, "ShearY": shear, "TranslateX": move, "TranslateY": move},
        "Rotate": np.linspace(0, 30, 10),
        "Posterize": np.linspace(8, 4, 10).round(),
        "Solarize": np.linspace(256, 0, 10),
    }
    return float(bins.get(name, np.linspace(0, 0.9, 10))[index])


def _signs(
    shape: torch.Size | tuple[int, int], signed: Tensor, generator: torch.Generator
) -> Tensor:
    """Draw +1 or -1 with equal probability where `signed` is True, and return 1 elsewhere."""
    signs = torch.randint(2, shape, generator=generator, dtype=torch.double) * 2 - 1
    return torch.where(signed, signs, 1)


def _centre(names: list[str]) -> Tensor:
    """Return the number to which the signed magnitude is added: 1 for enhancements, else 0."""
    return torch.tensor([float(name in ENHANCEMENTS) for name in names], dtype=torch.double)


def _cutout(images: Tensor, side: Tensor, place: Tensor) -> Tensor:
    """Cut out squares. The set-up draws centres "from 32 to 1", that is in (1, 32], not [0, 32)."""
    height, width = images.shape[-2:]
    fill = torch.tensor(CUTOUT_FILL[: images.shape[1]], dtype=torch.uint8, device=images.device)
    x, y = width + (1 - width) * place[:, 0], height + (1 - height) * place[:, 1]
    return operations.cutout(images, side, x, y, fill)
