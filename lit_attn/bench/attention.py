"""Time and memory of a transformer block with each preset, forward + backward.

The baseline is timm's block with timm's attention on torch's scaled-dot-product call. The FFN width
of every other block is solved so that its parameter count is nearest to the baseline's. Nothing is
measured if a layer's values or gradients differ from the reference.

The block `mgk/materialised` computes the preset mgk with all n x n weights.
"""

import argparse
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import timm.layers
import torch
from timm.models.vision_transformer import Block
from torch import Tensor, nn

from lit_attn.attention import reference
from lit_attn.attention.cache import Cache
from lit_attn.attention.layer import Attention, attn_layer
from lit_attn.attention.rotary import Rotary
from lit_attn.attention.spec import PRESETS
from lit_attn.bench import measure
from lit_attn.bench.measure import (
    DisagreementError,
    Setup,
    Spread,
    Table,
    summarize,
    summarize_ratios,
)
from lit_attn.models.factory import count

BASELINE = "timm attention"
MATERIALISED = "/materialised"

# Width of the baseline's FFN over the width of the block.
FFN_RATIO = 3


class Shape(NamedTuple):
    """Shape of the input, and the number of heads."""

    batch: int = 128
    tokens: int = 65
    dim: int = 192
    heads: int = 12
    causal: bool = False


class Materialised(Attention):
    """Layer with the same parameters and output that keeps all n x n weights of all heads."""

    def forward(
        self,
        x: Tensor,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
        rotary: Rotary | None = None,
        cache: Cache | None = None,
    ) -> Tensor:
        """Return the layer's output (B, n, d); raise ValueError for a cache."""
        if cache is not None:
            raise ValueError("the materialised form supports no cache")
        _, heads, values = self.record(x, attn_mask, is_causal, rotary)
        return self.proj_drop(self.residual(x, heads, values, self.proj))


def add_materialised(names: Iterable[str]) -> list[str]:
    """Return the names, and after each unusual formula the name of its materialised form."""
    all_names = []
    for name in names:
        all_names.append(name)
        spec = PRESETS[name]
        if spec.similarity.has_logits and (spec.similarity.kind != "dot" or spec.compose.places()):
            all_names.append(name + MATERIALISED)
    return all_names


def build_layer(name: str, shape: Shape) -> Attention:
    """Return the attention layer of the block called `name`."""
    layer_class = attn_layer(name.removesuffix(MATERIALISED))
    if name.endswith(MATERIALISED):
        layer_class = type("Materialised", (Materialised,), {"spec": layer_class.spec})
    return layer_class(shape.dim, shape.heads)


def build_block(name: str, shape: Shape, width: int) -> nn.Module:
    """Return a pre-norm block with the layer called `name`, or timm's, and an FFN of `width`."""
    block = Block(shape.dim, shape.heads)
    if name != BASELINE:
        block.attn = build_layer(name, shape)
    # timm's Block takes the FFN's width as a ratio of d, which cannot express every integer.
    block.mlp = timm.layers.Mlp(shape.dim, width)
    return block


def match_width(name: str, shape: Shape, target: int) -> int:
    """Return the FFN width with which the block's parameter count is nearest to `target`."""
    one, two = (count(build_block(name, shape, width)) for width in (1, 2))
    return max(1, round((target - one) / (two - one)) + 1)


def agrees(name: str, shape: Shape) -> bool:
    """Return True if the layer has the values and gradients of the reference, in float64."""
    compared = build_layer(name, shape).double().eval()
    x = torch.randn(2, min(shape.tokens, 33), shape.dim, dtype=torch.double, requires_grad=True)
    inputs = [x, *compared.parameters()]
    out = compared(x, is_causal=shape.causal)
    expected = reference.attention(compared, x, is_causal=shape.causal)
    direction = torch.randn_like(out)
    pairs = zip(
        torch.autograd.grad(out, inputs, direction, materialize_grads=True),
        torch.autograd.grad(expected, inputs, direction, materialize_grads=True),
        strict=True,
    )
    return torch.allclose(out, expected) and all(torch.allclose(a, b) for a, b in pairs)


class Step:
    """Forward and backward pass of a module on fixed random tokens; it leaves no gradient."""

    def __init__(self, module: nn.Module, x: Tensor, causal: bool, mode: str = "eager") -> None:
        """`mode`: "eager" or "compiled"."""
        self.module = module.train()
        # A graph break is an error: without it a part would be timed uncompiled.
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


class Row(NamedTuple):
    """Measurements of one block in one mode; None without a materialised form to compare with."""

    name: str
    mode: str
    parameters: int
    ffn_width: int
    seconds: Spread
    ratio: Spread
    beside: Spread | None
    peak: int
    peak_ratio: float
    peak_beside: float | None


def make_tables(options: argparse.Namespace, setup: Setup) -> Iterator[Table]:
    """Yield the table of each number of tokens."""
    for tokens in options.tokens:
        shape = Shape(options.batch, tokens, options.dim, options.heads, options.causal)
        causal = ", causal" if shape.causal else ""
        title = (
            f"Transformer block, forward + backward, {options.dtype}: batch {shape.batch}, "
            f"{tokens} tokens{causal}, width {shape.dim}, {shape.heads} heads, {setup.rounds} "
            "interleaved rounds; parameters matched through ffn_width. seconds: median ± "
            "interquartile range. ratio, beside: seconds over those of the baseline and of the "
            "materialised form in the same round. peak: most bytes; peak_ratio, peak_beside: over "
            "those of the baseline and of the materialised form."
        )
        name = f"attention-{setup.device}-{tokens}{'-causal' if shape.causal else ''}"
        yield Table(name, title, run(options.presets, shape, options.modes, setup))


def run(names: Sequence[str], shape: Shape, modes: Sequence[str], setup: Setup) -> list[Row]:
    """Return a row for every block and mode ("eager", "compiled"), the baseline first.

    Raises DisagreementError if a layer disagrees with its reference.
    """
    torch.manual_seed(0)
    width = FFN_RATIO * shape.dim
    blocks = {BASELINE: (build_block(BASELINE, shape, width), width)}
    target = count(blocks[BASELINE][0])
    for name in add_materialised(names):
        if not agrees(name, shape):
            raise DisagreementError(f"'{name}' disagrees with the reference")
        width = match_width(name, shape, target)
        blocks[name] = build_block(name, shape, width), width
    x = torch.randn(shape.batch, shape.tokens, shape.dim, device=setup.device, dtype=setup.dtype)
    rows = []
    for mode in modes:
        torch.compiler.reset()
        # All blocks share timm's forward; beyond dynamo's limit of graphs it would run uncompiled.
        with torch._dynamo.config.patch(recompile_limit=len(blocks) + 1):
            steps = {
                name: Step(module.to(x), x, shape.causal, mode)
                for name, (module, _) in blocks.items()
            }
            seconds = measure.measure_seconds(steps, setup.rounds, setup.device, setup.clock)
            peak = {name: measure.measure_memory(steps[name], setup.device).peak for name in steps}
        for name, (module, width) in blocks.items():
            plain = name + MATERIALISED
            rows.append(
                Row(
                    name,
                    mode,
                    count(module),
                    width,
                    seconds=summarize(seconds[name]),
                    ratio=summarize_ratios(seconds[name], seconds[BASELINE]),
                    beside=summarize_ratios(seconds[name], seconds[plain])
                    if plain in blocks
                    else None,
                    peak=peak[name],
                    peak_ratio=peak[name] / peak[BASELINE],
                    peak_beside=peak[name] / peak[plain] if plain in blocks else None,
                )
            )
    return rows
