"""Parameters and FLOPs of a model, and the FFN width that matches one model's count to another's.

Everything is measured on the meta device: nothing is allocated, nothing is computed.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from lit_attn.config.errors import ConfigError
from lit_attn.config.imagenet import ImageViT, JiT, LocalViT
from lit_attn.config.model import Model, ViT
from lit_attn.config.segmentation import Segmenter
from lit_attn.models import imagenet_vit, jit, local_vit, segmenter, vit

Shape = tuple[int, int, int]

BUILDERS: dict[type[Model], Callable[..., nn.Module]] = {
    ViT: vit.build,
    ImageViT: imagenet_vit.build,
    LocalViT: local_vit.build,
    JiT: jit.build,
    Segmenter: segmenter.build,
}


class Budget(NamedTuple):
    """What one model costs; `flops` is one forward pass of one sample, multiply-add = 2."""

    parameters: int
    flops: int
    ffn_width: int | None


def build(
    model: Model, image_shape: Shape, num_classes: int, device: str | None = None
) -> nn.Module:
    """The network of any kind of model for images, initialised except on the meta device."""
    return BUILDERS[type(model)](model, image_shape, num_classes, device)


def describe(model: Model, image_shape: Shape, num_classes: int) -> Budget:
    """Count the parameters and FLOPs of `model` on images of `image_shape` (C, H, W)."""
    network = build(model, image_shape, num_classes, device="meta").eval()
    counter = FlopCounterMode(display=False)
    with torch.no_grad(), counter:
        network(torch.empty(1, *image_shape, device="meta"))
    width = None if model.ffn is None else model.ffn.width
    return Budget(count(network), counter.get_total_flops(), width)


def resolve(model: Model, match_to: Model | None, image_shape: Shape, num_classes: int) -> Model:
    """`model` with the FFN width that brings its parameter count nearest `match_to`'s.

    The count is affine in the width, so two builds say where the target lies. Raises ConfigError
    where there is no FFN to widen, or where even a width of 1 is too much.
    """
    if match_to is None:
        return model
    if model.ffn is None:
        raise ConfigError("match: parameters: there is no FFN whose width could be solved for")

    def parameters(candidate: Model) -> int:
        return count(build(candidate, image_shape, num_classes, device="meta"))

    target = parameters(match_to)
    at_one, at_two = (parameters(with_width(model, width)) for width in (1, 2))
    width = 1 + round((target - at_one) / (at_two - at_one))
    if width < 1:
        raise ConfigError(
            f"match: parameters: {at_one:,} parameters with the narrowest FFN already exceed the "
            f"{target:,} to match"
        )
    return with_width(model, width)


def with_width(model: Model, width: int) -> Model:
    """`model` with an FFN of `width` hidden units."""
    assert model.ffn is not None
    return model.model_copy(update={"ffn": model.ffn.model_copy(update={"width": width})})


def count(network: nn.Module) -> int:
    """Trainable scalars."""
    return sum(p.numel() for p in network.parameters() if p.requires_grad)
