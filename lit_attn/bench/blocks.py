"""The transformer blocks that are compared: matched in parameters, held to the reference.

A block's name is a preset's, with what is different about it behind: `mgk/half-heads` has half as
many heads of the same width (as MGK counts), `mgk/materialised` computes mgk with all n x n logits.
"""

from collections.abc import Iterable
from typing import NamedTuple

import timm.layers
import torch
from timm.models.vision_transformer import Block
from torch import Tensor, nn

from lit_attn.attention import reference
from lit_attn.attention.layer import Attention, attn_layer
from lit_attn.attention.parts import DotConfig
from lit_attn.attention.spec import PRESETS
from lit_attn.bench.arguments import HALF_HEADS
from lit_attn.bench.materialised import Materialised, covers

BASELINE = "timm attention"
MATERIALISED = "/materialised"


class Shape(NamedTuple):
    """B samples of n tokens of width d in H heads; the baseline's FFN is `ratio` x d wide."""

    batch: int = 128
    tokens: int = 65
    dim: int = 192
    heads: int = 12
    ratio: int = 3
    causal: bool = False


def with_materialised(names: Iterable[str]) -> list[str]:
    """The names, behind each the materialised form where its formula is not the standard one's."""
    found = []
    for name in names:
        chosen = PRESETS[name.removesuffix(HALF_HEADS)]
        found.append(name)
        is_standard = isinstance(chosen.similarity, DotConfig) and not chosen.compose.places()
        if covers(chosen) and not is_standard:
            found.append(name + MATERIALISED)
    return found


def layer(name: str, shape: Shape) -> Attention:
    """The attention layer of a block called `name`."""
    base = name.removesuffix(MATERIALISED)
    made = attn_layer(base.removesuffix(HALF_HEADS))
    if base != name:
        made = type("Materialised", (Materialised,), {"spec": made.spec})
    heads = shape.heads // 2 if base.endswith(HALF_HEADS) else shape.heads
    return made(shape.dim, heads, attn_head_dim=shape.dim // shape.heads)


def block(name: str, shape: Shape, width: int) -> nn.Module:
    """A pre-norm block with the layer called `name`, or timm's own, and an FFN of that width."""
    built = Block(shape.dim, shape.heads)
    if name != BASELINE:
        built.attn = layer(name, shape)
    # Block takes its FFN's width as a ratio of d, which cannot say every integer.
    built.mlp = timm.layers.Mlp(shape.dim, width)
    return built


def matched_width(name: str, shape: Shape, target: int) -> int:
    """The FFN width that brings the block's parameter count nearest `target`."""
    one, two = (parameters(block(name, shape, width)) for width in (1, 2))
    return max(1, round((target - one) / (two - one)) + 1)


def parameters(module: nn.Module) -> int:
    """How many scalars train."""
    return sum(p.numel() for p in module.parameters())


def agrees(name: str, shape: Shape) -> bool:
    """Whether the layer gives the reference's values and gradients, in float64."""
    compared = layer(name, shape).double().eval()
    x = torch.randn(2, min(shape.tokens, 33), shape.dim, dtype=torch.double, requires_grad=True)
    wanted = [x, *compared.parameters()]
    out = compared(x, is_causal=shape.causal)
    plain = reference.attention(compared, x, is_causal=shape.causal)
    direction = torch.randn_like(out)
    pairs = zip(
        torch.autograd.grad(out, wanted, direction, materialize_grads=True),
        torch.autograd.grad(plain, wanted, direction, materialize_grads=True),
        strict=True,
    )
    return torch.allclose(out, plain) and all(torch.allclose(a, b) for a, b in pairs)


class Step:
    """Forward and backward of a module on the same random tokens; no gradient is left behind."""

    def __init__(self, module: nn.Module, x: Tensor, causal: bool, mode: str = "eager") -> None:
        """`mode`: "eager" or "compiled"."""
        self.module = module.train()
        # Whole graphs or an error: a part that fell back would be timed uncompiled.
        self.call = torch.compile(module, fullgraph=True) if mode == "compiled" else module
        self.x = x.clone().requires_grad_()
        self.gradient = torch.randn_like(x)
        self.causal = causal

    def forward(self) -> Tensor:
        out: Tensor = self.call(self.x, is_causal=self.causal)
        return out

    def backward(self, out: Tensor) -> None:
        out.backward(self.gradient)
        self.x.grad = None
        self.module.zero_grad(set_to_none=True)

    def __call__(self) -> None:
        self.backward(self.forward())
