"""AutoAugment and RandAugment: random operations of random strength for every image.

Images are uint8 (N, C, H, W) with one or three channels. The parameters of a batch are three CPU
tensors: for every image and round an operation (an index into the policy's names; (N, rounds)), a
magnitude (N, rounds), and two uniform numbers (N, rounds, 2) for operations at a random place,
which only policies of plug-ins have. The operations are those of Pillow, on the CPU, as in the
published set-ups. The images with one operation and one magnitude are changed together
(`operations`).
"""

from collections import defaultdict
from collections.abc import Collection
from typing import ClassVar

import numpy as np
import torch
from PIL import Image
from pydantic import Field, PositiveInt
from torch import Tensor

from lit_attn.data.augment.base import Augmentation, ImageFormat
from lit_attn.data.augment.operations import MATRICES, Pixels, operate

# Operations whose factor is 1 plus or minus the magnitude.
ENHANCEMENTS = ("Brightness", "Color", "Contrast", "Sharpness")

LARGEST_MOVE = 150 / 331
"""Largest translation, as a share of the image's size."""

RANDAUGMENT = {
    "Identity": (0.0, 0.0),
    "ShearX": (0.0, 0.3),
    "ShearY": (0.0, 0.3),
    "TranslateX": (0.0, LARGEST_MOVE),
    "TranslateY": (0.0, LARGEST_MOVE),
    "Rotate": (0.0, 30.0),
    "Brightness": (0.0, 0.9),
    "Color": (0.0, 0.9),
    "Contrast": (0.0, 0.9),
    "Sharpness": (0.0, 0.9),
    "Posterize": (8.0, 4.0),
    "Solarize": (255.0, 0.0),
    "AutoContrast": (0.0, 0.0),
    "Equalize": (0.0, 0.0),
}
"""Weakest and strongest magnitude of torchvision's RandAugment by operation, in its order.

Translations are shares of the image's size; Posterize keeps a number of bits.
"""


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
        operations, magnitudes, places = drawn
        pixels = images.cpu().numpy().copy()
        for number in range(operations.shape[1]):
            groups: dict[tuple[int, float], list[int]] = defaultdict(list)
            amounts = zip(
                operations[:, number].tolist(), magnitudes[:, number].tolist(), strict=True
            )
            for row, choice in enumerate(amounts):
                groups[choice].append(row)
            for (operation, amount), rows in groups.items():
                self.change(pixels, rows, self.names[operation], amount, places[:, number])
        return torch.from_numpy(pixels).to(images.device)

    def change(
        self, pixels: Pixels, rows: list[int], name: str, amount: float, places: Tensor
    ) -> None:
        """Apply one operation to some rows of `pixels` (N, C, H, W), in place.

        `places` (N, 2) are uniform numbers for operations at a random place.
        """
        if name != "Identity":
            pixels[rows] = operate(name, pixels[rows], amount, self.fill, self.shear)

    def _magnitudes(self, operation: Tensor, amount: Tensor, generator: torch.Generator) -> Tensor:
        """Give `amount` a sign of equal probability where the operation has one."""
        signs = torch.randint(2, amount.shape, generator=generator, dtype=torch.double) * 2 - 1
        return self.centre[operation] + amount * torch.where(self.signed[operation], signs, 1)


class AutoAugmentConfig(Augmentation, kind="autoaugment"):
    """AutoAugment with its CIFAR-10 policy of 25 sub-policies (Cubuk et al. 2019).

    In this variant (docs/setups.md, CIFAR-100) shears are bicubic and rotations turn one way only.
    """

    stage = "bytes"
    fill: int = Field(128, ge=0, le=255, description="grey level outside the image")

    def build(self, images: ImageFormat) -> "AutoAugment":
        return AutoAugment(self, images)


class AutoAugment(Policy):
    """One of 25 sub-policies of two operations, as in the CIFAR-100 set-up (docs/setups.md)."""

    shear = Image.Resampling.BICUBIC

    def __init__(self, config: AutoAugmentConfig, images: ImageFormat) -> None:
        from torchvision.transforms import autoaugment

        self.fill = config.fill
        table = autoaugment.AutoAugment(autoaugment.AutoAugmentPolicy.CIFAR10).policies
        # Each of the policies is a pair of operations (name, probability, magnitude).
        operations: set[str] = set()
        for pair in table:
            operations.update(name for name, _, _ in pair)
        names = ["Identity", *sorted(operations)]
        super().__init__(names, {*ENHANCEMENTS, *MATRICES})
        size = images.shape[2]
        places = []
        probabilities = []
        bins = []
        for pair in table:
            places.append([names.index(name) for name, _, _ in pair])
            probabilities.append([probability for _, probability, _ in pair])
            bins.append([_autoaugment_bin(name, bin_ or 0, size) for name, _, bin_ in pair])
        self.operation = torch.tensor(places)
        self.p = torch.tensor(probabilities)
        self.magnitude = torch.tensor(bins, dtype=torch.double)

    def draw(self, n: int, generator: torch.Generator) -> tuple[Tensor, ...]:
        # An operation that does not happen is Identity.
        policy = torch.randint(len(self.p), (n,), generator=generator)
        happens = torch.rand(n, 2, generator=generator) < self.p[policy]
        operation = torch.where(happens, self.operation[policy], 0)
        magnitude = self._magnitudes(operation, self.magnitude[policy], generator)
        return operation, magnitude, torch.zeros(n, 2, 2)


class RandAugmentConfig(Augmentation, kind="randaugment"):
    """RandAugment (Cubuk et al. 2020): `ops` operations, drawn with replacement.

    The operations and their ranges are those of torchvision.
    """

    stage = "bytes"
    ops: PositiveInt = Field(2, description="operations for each image")
    magnitude: int = Field(14, ge=0, le=30, description="strength of the operations")

    def build(self, images: ImageFormat) -> "RandAugment":
        return RandAugment(self.ops, self.magnitude, images)


class RandAugment(Policy):
    """Operations with the same strength and equal probability (Cubuk et al. 2020).

    The operations and their strengths are those of torchvision. A subclass can have others.
    """

    signed_names: ClassVar[frozenset[str]] = frozenset({"Rotate", *MATRICES, *ENHANCEMENTS})
    """Operations whose magnitude has a random sign."""

    def __init__(self, rounds: int, magnitude: int, images: ImageFormat) -> None:
        self.rounds = rounds
        strengths = self.strengths(magnitude, images.shape[2])
        super().__init__(list(strengths), self.signed_names)
        self.magnitude = torch.tensor(list(strengths.values()), dtype=torch.double)

    def strengths(self, magnitude: int, size: int) -> dict[str, float]:
        """Return the strength of each operation for images of `size` pixels: bin `magnitude` of 31.

        Torchvision translates by whole pixels.
        """
        strengths = {}
        for name, (weakest, strongest) in RANDAUGMENT.items():
            bins = torch.linspace(weakest, strongest, 31)
            strengths[name] = float(bins[magnitude])
        for name in ("TranslateX", "TranslateY"):
            bins = torch.linspace(0.0, LARGEST_MOVE * size, 31)
            strengths[name] = int(bins[magnitude])
        strengths["Posterize"] = round(strengths["Posterize"])
        return strengths

    def draw_places(self, shape: tuple[int, int], generator: torch.Generator) -> Tensor:
        """Return the numbers (N, rounds, 2) for operations at a random place: zeros without one."""
        return torch.zeros(*shape, 2)

    def draw(self, n: int, generator: torch.Generator) -> tuple[Tensor, ...]:
        shape = (n, self.rounds)
        operation = torch.randint(len(self.names), shape, generator=generator)
        magnitude = self._magnitudes(operation, self.magnitude[operation], generator)
        return operation, magnitude, self.draw_places(shape, generator)


def _autoaugment_bin(name: str, index: int, size: int) -> float:
    """Return magnitude `index` of 0 (none) to 9 (strongest) for images of `size` pixels."""
    shear, move = np.linspace(0, 0.3, 10), np.linspace(0, LARGEST_MOVE, 10) * size
    bins = {
        **{"ShearX": shear, "ShearY": shear, "TranslateX": move, "TranslateY": move},
        "Rotate": np.linspace(0, 30, 10),
        "Posterize": np.linspace(8, 4, 10).round(),
        "Solarize": np.linspace(256, 0, 10),
    }
    return float(bins.get(name, np.linspace(0, 0.9, 10))[index])
