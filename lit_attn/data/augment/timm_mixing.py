"""MixUp and CutMix of whole batches, with the random numbers of timm's `Mixup`.

The first image is mixed with the last one, the second with the last but one, and so on.

Shapes: images (B, C, H, W) float, labels (B,), targets (B, classes).
"""

import math

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from lit_attn.data.augment.timm_transform import TimmAugmentation


def mix_batch(
    images: Tensor, labels: Tensor, classes: int, augment: TimmAugmentation, seed: int
) -> tuple[Tensor, Tensor]:
    """Mix `images` in place by MixUp or CutMix; return them and their targets.

    The draws are in the order of timm: whether to mix (always), MixUp or CutMix with equal
    probability where both have an alpha, the weight, and the box of CutMix.
    """
    generator = np.random.RandomState(seed)
    # timm draws whether a batch is mixed. Its probability is 1 here.
    generator.rand()
    is_cutmix = augment.cutmix > 0
    if augment.mixup > 0 and augment.cutmix > 0:
        is_cutmix = generator.rand() < 0.5
    alpha = augment.cutmix if is_cutmix else augment.mixup
    weight = float(generator.beta(alpha, alpha))
    if weight < 1 and is_cutmix:
        weight = _replace_box(images, weight, generator)
    elif weight < 1:
        others = images.flip(0).mul_(1 - weight)
        images.mul_(weight).add_(others)
    targets = F.one_hot(labels, classes).to(torch.get_default_dtype())
    return images, targets * weight + targets.flip(0) * (1 - weight)


def _replace_box(images: Tensor, weight: float, generator: np.random.RandomState) -> float:
    """Replace a box of every image by that of its partner; return the share that stays."""
    top, bottom, left, right = draw_box(images.shape, weight, generator)
    images[..., top:bottom, left:right] = images.flip(0)[..., top:bottom, left:right]
    height, width = images.shape[-2:]
    return 1 - (bottom - top) * (right - left) / (height * width)


def draw_box(
    shape: torch.Size | tuple[int, ...], weight: float, generator: np.random.RandomState
) -> tuple[int, int, int, int]:
    """Draw CutMix's box (top, bottom, left, right) of a share 1 - `weight` of the image's area.

    The box is that of timm 0.3.2; later versions cover a pixel more of an odd side.
    """
    height, width = shape[-2:]
    top, bottom = _draw_edges(height, weight, generator)
    left, right = _draw_edges(width, weight, generator)
    return top, bottom, left, right


def _draw_edges(side: int, weight: float, generator: np.random.RandomState) -> tuple[int, int]:
    half = int(side * math.sqrt(1 - weight)) // 2
    centre = int(generator.randint(side))
    return max(0, centre - half), min(side, centre + half)
