"""MixUp (Zhang et al. 2018) and CutMix (Yun et al. 2019): one lambda for the whole batch.

Shapes: images (N, C, H, W) float; labels (N,) indices, mixed targets (N, classes).
"""

import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from lit_attn.config.data import images as config


class Drawn(NamedTuple):
    """What happens to one batch, and the other image (N,) that each is mixed with.

    `centre` is (row, column) of CutMix's box, relative to the image's size.
    """

    kind: str
    weight: float
    centre: tuple[float, float]
    others: Tensor


class Mix:
    """MixUp or CutMix of the batch with a shuffled copy of itself, or neither."""

    def __init__(self, part: config.Mix, num_classes: int) -> None:
        self.part = part
        self.num_classes = num_classes

    def draw(self, n: int, generator: torch.Generator) -> Drawn:
        """`kind` is "none", "mixup" or "cutmix"; `weight` is lambda before CutMix corrects it."""
        part = self.part
        happens, switch, row, column = torch.rand(4, generator=generator).tolist()
        others = torch.randperm(n, generator=generator)
        # torch's own sampler of the beta distribution takes no generator.
        seed = int(torch.randint(2**31, (), generator=generator))
        kind = "none"
        if happens < part.p and (part.mixup or part.cutmix):
            cut = part.cutmix > 0 and (part.mixup == 0 or switch < part.switch)
            kind = "cutmix" if cut else "mixup"
        alpha = part.cutmix if kind == "cutmix" else part.mixup
        weight = 1.0 if kind == "none" else float(np.random.default_rng(seed).beta(alpha, alpha))
        return Drawn(kind, weight, (row, column), others)

    def apply(self, images: Tensor, labels: Tensor, drawn: Drawn) -> tuple[Tensor, Tensor]:
        """The mixed images and their targets: probabilities, even where nothing is mixed."""
        targets = F.one_hot(labels, self.num_classes).to(images.dtype)
        if drawn.kind == "none":
            return images, targets
        others, weight = drawn.others.to(images.device, non_blocking=True), drawn.weight
        if drawn.kind == "cutmix":
            images, weight = cutmix(images, images[others], weight, *drawn.centre)
        else:
            images = weight * images + (1 - weight) * images[others]
        return images, weight * targets + (1 - weight) * targets[others]


def cutmix(
    images: Tensor, others: Tensor, weight: float, row: float, column: float
) -> tuple[Tensor, float]:
    """A box of 1 - weight of the area from the other image, about the relative centre.

    The box is cut at the edges; the weight that comes back is the share of pixels that stayed.
    """
    height, width = images.shape[-2:]
    ratio = math.sqrt(1 - weight)
    tall, wide = int(height * ratio), int(width * ratio)
    y, x = int(row * height), int(column * width)
    top, bottom = max(0, y - tall // 2), min(height, y + tall // 2)
    left, right = max(0, x - wide // 2), min(width, x + wide // 2)
    mixed = images.clone()
    mixed[..., top:bottom, left:right] = others[..., top:bottom, left:right]
    return mixed, 1 - (bottom - top) * (right - left) / (height * width)
