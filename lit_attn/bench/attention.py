"""Time and memory of a transformer block with each preset, forward + backward.

The baseline is timm's block with timm's attention on torch's scaled-dot-product call. The FFN width
of every other block is solved so that its parameter count is nearest to the baseline's. A block
whose values or gradients differ from the reference gets no number.

The name of a block is a preset, with a suffix for a difference: `mgk/half-heads` has half as many
heads of the same width (as MGK counts), `mgk/materialised` computes mgk with all n x n logits.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import timm.layers
import torch
from timm.models.vision_transformer import Block
from torch import Tensor, nn

from lit_attn.attention import reference
from lit_attn.attention.layer import Attention, attn_layer
from lit_attn.attention.spec import PRESETS
from lit_attn.bench import HALF_HEADS, measure
from lit_attn.bench.materialised import Materialised, covers
from lit_attn.bench.measure import (
    Setup,
    Spread,
    format_mebibytes,
    format_spread,
    summarize,
    summarize_ratios,
)
from lit_attn.models.factory import count

BASELINE = "timm attention"
MATERIALISED = "/materialised"

HEADER = (
    "| block | mode | parameters | FFN | ms (median ± IQR) | x baseline (± IQR) "
    "| x materialised (± IQR) | peak MiB | x baseline | x materialised |\n"
    "|---|---|---:|---:|---:|---:|---:|---:|---:|---:|"
)

SPREADS = ("seconds", "ratio", "beside")


class Shape(NamedTuple):
    """Shape of the input, and the width of the baseline's FFN as `ratio` x `dim`."""

    batch: int = 128
    tokens: int = 65
    dim: int = 192
    heads: int = 12
    ratio: int = 3
    causal: bool = False


def add_materialised(names: Iterable[str]) -> list[str]:
    """Return the names, and after each unusual formula the name of its materialised form."""
    all_names = []
    for name in names:
        spec = PRESETS[name.removesuffix(HALF_HEADS)]
        all_names.append(name)
        is_standard = spec.similarity.kind == "dot" and not spec.compose.places()
        if covers(spec) and not is_standard:
            all_names.append(name + MATERIALISED)
    return all_names


def build_layer(name: str, shape: Shape) -> Attention:
    """Return the attention layer of the block called `name`."""
    base = name.removesuffix(MATERIALISED)
    layer_class = attn_layer(base.removesuffix(HALF_HEADS))
    if base != name:
        layer_class = type("Materialised", (Materialised,), {"spec": layer_class.spec})
    heads = shape.heads // 2 if base.endswith(HALF_HEADS) else shape.heads
    return layer_class(shape.dim, heads, attn_head_dim=shape.dim // shape.heads)


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
    """Measurements of one block in one mode; they are None if it disagrees with the reference.

    `ratio` and `peak_ratio` are relative to the baseline, `beside` and `peak_beside` to the block's
    materialised form (None without one). Time ratios are within a round; `peak` is in bytes.
    """

    name: str
    mode: str
    parameters: int
    ffn_width: int
    seconds: Spread | None = None
    ratio: Spread | None = None
    beside: Spread | None = None
    peak: int = 0
    peak_ratio: float | None = None
    peak_beside: float | None = None


def run(names: Sequence[str], shape: Shape, modes: Sequence[str], setup: Setup) -> list[Row]:
    """Return a row for every block and mode ("eager", "compiled"), the baseline first."""
    torch.manual_seed(0)
    width = shape.ratio * shape.dim
    modules = {BASELINE: (build_block(BASELINE, shape, width), width)}
    target = count(modules[BASELINE][0])
    agreeing = {BASELINE}
    for name in add_materialised(names):
        width = match_width(name, shape, target)
        modules[name] = build_block(name, shape, width), width
        if agrees(name, shape):
            agreeing.add(name)
    x = torch.randn(shape.batch, shape.tokens, shape.dim, device=setup.device, dtype=setup.dtype)
    rows = []
    for mode in modes:
        torch.compiler.reset()
        # All blocks share timm's forward; beyond dynamo's limit of graphs it would run uncompiled.
        with torch._dynamo.config.patch(recompile_limit=len(modules) + 1):
            steps = {
                name: Step(module.to(x), x, shape.causal, mode)
                for name, (module, _) in modules.items()
                if name in agreeing
            }
            seconds = measure.measure_seconds(steps, setup.rounds, setup.device, setup.clock)
            peak = {name: measure.measure_memory(steps[name], setup.device).peak for name in steps}
        rows += [
            _make_row(Row(name, mode, count(module), width), seconds, peak)
            for name, (module, width) in modules.items()
        ]
    return rows


def _make_row(row: Row, seconds: dict[str, list[float]], peak: dict[str, int]) -> Row:
    """Return `row` with the measurements of its block, if there are any."""
    if row.name not in seconds:
        return row
    row = row._replace(
        seconds=summarize(seconds[row.name]),
        ratio=summarize_ratios(seconds[row.name], seconds[BASELINE]),
        peak=peak[row.name],
        peak_ratio=peak[row.name] / peak[BASELINE],
    )
    if (materialised := row.name + MATERIALISED) not in seconds:
        return row
    return row._replace(
        beside=summarize_ratios(seconds[row.name], seconds[materialised]),
        peak_beside=peak[row.name] / peak[materialised],
    )


def format_row(row: Row) -> list[str]:
    """Return the cells of a row under HEADER."""
    cells = [row.name, row.mode, f"{row.parameters:,}", str(row.ffn_width)]
    if row.seconds is None:
        return [*cells, "disagrees with the reference: no number", *[""] * 5]
    return [
        *cells,
        format_spread(row.seconds, 1e3),
        *(format_spread(spread) for spread in (row.ratio, row.beside)),
        format_mebibytes(row.peak),
        *("" if ratio is None else f"{ratio:.2f}" for ratio in (row.peak_ratio, row.peak_beside)),
    ]
