"""AutoAugment and RandAugment: which operation each image gets, and how much of it.

Images are uint8 (N, C, H, W). A policy draws, for every round, one operation and one magnitude per
image; images with the same operation are then handled together.
"""

from collections.abc import Callable
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor
from torchvision.transforms import AutoAugment as TorchvisionAutoAugment

from lit_attn.config import data as config
from lit_attn.data.augment import pixels, shapes

PIXELS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "AutoContrast": pixels.autocontrast,
    "Brightness": pixels.brightness,
    "Color": pixels.color,
    "Contrast": pixels.contrast,
    "Equalize": pixels.equalize,
    "Invert": pixels.invert,
    "Posterize": pixels.posterize,
    "Sharpness": pixels.sharpness,
    "Solarize": pixels.solarize,
    "SolarizeAdd": pixels.solarize_add,
}
SHAPES: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "Rotate": shapes.rotate,
    "ShearX": shapes.shear_x,
    "ShearY": shapes.shear_y,
    "TranslateX": shapes.translate_x,
    "TranslateY": shapes.translate_y,
}

# Operations that ignore their magnitude.
PLAIN = ("AutoContrast", "Equalize", "Identity", "Invert")

CUTOUT_FILL = (125, 123, 114)


class Draw(NamedTuple):
    """One round: an index into the policy's operations and a magnitude for every image.

    `place` holds two uniform numbers per image, for an operation that needs a position.
    """

    operation: Tensor
    magnitude: Tensor
    place: Tensor


class Policy:
    """A list of operation names and how to draw rounds of them."""

    names: list[str]
    fill: int

    def draw(self, n: int, size: int, generator: torch.Generator) -> list[Draw]:
        """The rounds for `n` images of `size` pixels a side."""
        raise NotImplementedError

    def apply(self, images: Tensor, rounds: list[Draw]) -> Tensor:
        """Carry the rounds out."""
        fill = torch.full((images.shape[1],), self.fill, dtype=torch.uint8, device=images.device)
        for round_ in rounds:
            images = images.clone()
            for index, name in enumerate(self.names):
                chosen = (round_.operation == index).nonzero().squeeze(1)
                if name == "Identity" or not len(chosen):
                    continue
                part, amount = images[chosen], round_.magnitude[chosen]
                if name in PIXELS:
                    images[chosen] = PIXELS[name](part, amount)
                elif name in SHAPES:
                    images[chosen] = SHAPES[name](part, amount, fill)
                else:
                    images[chosen] = _cutout(part, amount, round_.place[chosen])
        return images


class AutoAugment(Policy):
    """One of 25 sub-policies of two operations, each with its probability (Cubuk et al. 2019)."""

    def __init__(self, chosen: config.AutoAugment) -> None:
        self.fill = chosen.fill
        table = TorchvisionAutoAugment(_cifar10_policy()).policies
        self.names = ["Identity", *sorted({op for pair in table for op, _, _ in pair})]
        shape = (len(table), 2)
        self.operation = torch.tensor([[self.names.index(op) for op, _, _ in p] for p in table])
        self.p = torch.tensor([[p for _, p, _ in pair] for pair in table])
        self.bin = torch.tensor([[m or 0 for _, _, m in pair] for pair in table])
        assert self.operation.shape == self.p.shape == self.bin.shape == shape

    def draw(self, n: int, size: int, generator: torch.Generator) -> list[Draw]:
        device = generator.device
        policy = torch.randint(len(self.p), (n,), generator=generator, device=device)
        table = torch.stack([_autoaugment_bins(name, size) for name in self.names]).to(device)
        rounds = []
        for position in range(2):
            happens = torch.rand(n, generator=generator, device=device)
            sign = torch.randint(2, (n,), generator=generator, device=device) * 2 - 1
            operation = self.operation.to(device)[policy, position]
            amount = table[operation, self.bin.to(device)[policy, position]]
            signed = _signed(self.names).to(device)[operation]
            centred = _centred_on_one(self.names).to(device)[operation]
            magnitude = centred + torch.where(signed, amount * sign, amount)
            operation = torch.where(happens < self.p.to(device)[policy, position], operation, 0)
            rounds.append(Draw(operation, magnitude, torch.zeros(n, 2, device=device)))
        return rounds


class BlankingRandAugment(Policy):
    """RandAugment of the ViT-small CIFAR set-up: 16 operations, ranges as they stand there.

    Magnitude m of 30 maps linearly onto each range. Colour operations only weaken (factor 0.94 at
    m = 14), and translations are in absolute pixels up to 100: more than the image is wide.
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
    fill = 0

    def __init__(self, chosen: config.RandAugment) -> None:
        self.rounds = chosen.ops
        self.share = chosen.magnitude / 30
        self.names = list(self.RANGES)

    def draw(self, n: int, size: int, generator: torch.Generator) -> list[Draw]:
        device = generator.device
        ranges = torch.tensor(list(self.RANGES.values()), device=device)
        amounts = ranges[:, 0] + self.share * (ranges[:, 1] - ranges[:, 0])
        amounts[self.names.index("Posterize")] = max(1, int(4 * self.share))
        moves = torch.tensor([name in SHAPES for name in self.names], device=device)
        found = []
        for _ in range(self.rounds):
            operation = torch.randint(len(self.names), (n,), generator=generator, device=device)
            sign = torch.randint(2, (n,), generator=generator, device=device) * 2 - 1
            amount = amounts[operation]
            place = torch.rand(n, 2, generator=generator, device=device)
            found.append(
                Draw(operation, torch.where(moves[operation], amount * sign, amount), place)
            )
        return found


class TorchvisionRandAugment(Policy):
    """Torchvision's RandAugment: 14 operations, magnitudes from 31 bins."""

    fill = 0

    def __init__(self, chosen: config.RandAugment) -> None:
        self.rounds = chosen.ops
        self.bin = chosen.magnitude
        self.names = [
            "Identity",
            "ShearX",
            "ShearY",
            "TranslateX",
            "TranslateY",
            "Rotate",
            "Brightness",
            "Color",
            "Contrast",
            "Sharpness",
            "Posterize",
            "Solarize",
            "AutoContrast",
            "Equalize",
        ]

    def draw(self, n: int, size: int, generator: torch.Generator) -> list[Draw]:
        device, share = generator.device, self.bin / 30
        amounts = {
            "ShearX": 0.3 * share,
            "ShearY": 0.3 * share,
            "TranslateX": 150 / 331 * size * share,
            "TranslateY": 150 / 331 * size * share,
            "Rotate": 30 * share,
            "Posterize": 8 - round(4 * share),
            "Solarize": 255 - 255 * share,
        }
        table = torch.tensor([amounts.get(name, 0.9 * share) for name in self.names]).to(device)
        found = []
        for _ in range(self.rounds):
            operation = torch.randint(len(self.names), (n,), generator=generator, device=device)
            sign = torch.randint(2, (n,), generator=generator, device=device) * 2 - 1
            amount = table[operation]
            signed = _signed(self.names).to(device)[operation]
            centred = _centred_on_one(self.names).to(device)[operation]
            magnitude = centred + torch.where(signed, amount * sign, amount)
            found.append(Draw(operation, magnitude, torch.zeros(n, 2, device=device)))
        return found


def _cutout(images: Tensor, side: Tensor, place: Tensor) -> Tensor:
    height, width = images.shape[-2:]
    fill = torch.tensor(CUTOUT_FILL, dtype=torch.uint8, device=images.device)
    fill = fill if images.shape[1] == 3 else fill[:1]
    x, y = place[:, 0] * width, place[:, 1] * height
    return shapes.cutout(images, float(side[0]), x, y, fill)


def _autoaugment_bins(name: str, size: int) -> Tensor:
    """Ten magnitudes from none to most."""
    most = {"ShearX": 0.3, "ShearY": 0.3, "Rotate": 30.0}
    if name in ("TranslateX", "TranslateY"):
        return torch.linspace(0, 150 / 331, 10) * size
    if name == "Posterize":
        return (8 - torch.arange(10) * 4 / 9).round()
    if name == "Solarize":
        return torch.linspace(256, 0, 10)
    return torch.linspace(0, most.get(name, 0.9), 10)


def _signed(names: list[str]) -> Tensor:
    """Operations whose direction is drawn."""
    return torch.tensor(
        [n in SHAPES or bool(c) for n, c in zip(names, _centred_on_one(names), strict=True)]
    )


def _centred_on_one(names: list[str]) -> Tensor:
    """1 for the operations whose factor is one plus or minus the magnitude, else 0."""
    return torch.tensor(
        [float(name in ("Brightness", "Color", "Contrast", "Sharpness")) for name in names]
    )


def _cifar10_policy() -> "object":
    from torchvision.transforms import AutoAugmentPolicy

    return AutoAugmentPolicy.CIFAR10
