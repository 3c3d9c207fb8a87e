"""Parameters and FLOPs of a model, and the FFN width that matches one model's count to another's.

Everything is measured on the meta device: nothing is allocated, nothing is computed.
"""

from typing import NamedTuple

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from lit_attn.config.data.base import Data
from lit_attn.config.models.base import Model
from lit_attn.models.factory import _named, build, sample
from lit_attn.schema.errors import ConfigError


class Budget(NamedTuple):
    """What one model costs; `flops` is one forward pass of one sample, multiply-add = 2.

    They are those of matrix products, attention's among them, and of convolutions, as torch counts
    them: softmax, norms, epilogues and other element-wise work are left out.
    """

    parameters: int
    flops: int
    ffn_width: int | None


def describe(model: Model, data: Data) -> Budget:
    """Count the parameters and FLOPs of `model` on one sample of `data`.

    Raises ConfigError where the model's parts do not go together.
    """
    network = build(model, data, device="meta").eval()
    counter = FlopCounterMode(display=False)
    with torch.no_grad(), counter, _named():
        network(*sample(data))
    width = None if model.ffn is None else model.ffn.width
    return Budget(count(network), counter.get_total_flops(), width)


def resolve(model: Model, match_to: Model | None, data: Data) -> Model:
    """`model` with the FFN width that brings its parameter count nearest `match_to`'s.

    The count is affine in the width, so two builds say where the target lies. Raises ConfigError
    where there is no FFN to widen, or where even a width of 1 is too much.
    """
    if match_to is None:
        return model
    if model.ffn is None:
        raise ConfigError("match: parameters: there is no FFN whose width could be solved for")

    def parameters(candidate: Model) -> int:
        return count(build(candidate, data, device="meta"))

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
