"""MixUp (Zhang et al. 2018) and CutMix (Yun et al. 2019): one lambda for the whole batch.

Shapes: images (N, C, H, W) float; labels (N,) indices, mixed targets (N, classes).
"""

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from lit_attn.config import data as config


def mix(
    images: Tensor, labels: Tensor, part: config.Mix, num_classes: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """The batch mixed with a shuffled copy of itself, with probability `part.p`."""
    draws = torch.rand(4, generator=generator, device=generator.device).tolist()
    order = torch.randperm(len(images), generator=generator, device=generator.device)
    seed = int(torch.randint(2**31, (), generator=generator, device=generator.device))
    targets = F.one_hot(labels, num_classes).to(images.dtype)
    if draws[0] >= part.p or not (part.mixup or part.cutmix):
        return images, targets
    cut = part.cutmix > 0 and (part.mixup == 0 or draws[1] < part.switch)
    lam = beta(part.cutmix if cut else part.mixup, seed)
    if cut:
        images, lam = cutmix(images, images[order], lam, draws[2], draws[3])
    else:
        images = mixup(images, images[order], lam)
    return images, lam * targets + (1 - lam) * targets[order]


def mixup(images: Tensor, others: Tensor, lam: float) -> Tensor:
    """lambda times the image plus the rest of the other."""
    return lam * images + (1 - lam) * others


def cutmix(images: Tensor, others: Tensor, lam: float, x: float, y: float) -> tuple[Tensor, float]:
    """A box of 1 - lambda of the area from the other image, about the relative centre (x, y).

    The box is cut at the edges; the lambda that comes back is the share of pixels that stayed.
    """
    height, width = images.shape[-2:]
    ratio = math.sqrt(1 - lam)
    tall, wide = int(height * ratio), int(width * ratio)
    row, column = int(y * height), int(x * width)
    top, bottom = max(0, row - tall // 2), min(height, row + tall // 2)
    left, right = max(0, column - wide // 2), min(width, column + wide // 2)
    mixed = images.clone()
    mixed[..., top:bottom, left:right] = others[..., top:bottom, left:right]
    return mixed, 1 - (bottom - top) * (right - left) / (height * width)


def beta(alpha: float, seed: int) -> float:
    """One draw of Beta(alpha, alpha); torch's own sampler takes no generator."""
    import numpy as np

    return float(np.random.default_rng(seed).beta(alpha, alpha))
