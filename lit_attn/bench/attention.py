"""Forward + backward of a whole transformer block with each preset, against the standard block.

The baseline is timm's own block with timm's attention on torch's scaled-dot-product call. Every
other block has its FFN width solved so that its parameter count is nearest the baseline's. A preset
that does not agree with the reference, value and gradient, gets no number.
"""

from collections.abc import Callable, Iterable
from typing import NamedTuple

import timm.layers
import torch
from timm.models.vision_transformer import Block
from torch import nn

from lit_attn.attention import reference
from lit_attn.attention.layer import Attention, attn_layer
from lit_attn.bench.timing import Timing, interleaved, peak_memory

BASELINE = "timm attention"


class Shape(NamedTuple):
    """B samples of n tokens of width d in H heads; the baseline's FFN is `ratio` x d wide."""

    batch: int = 128
    tokens: int = 65
    dim: int = 192
    heads: int = 12
    ratio: int = 3
    causal: bool = False


class Row(NamedTuple):
    """One preset in one mode; `timing` is None where it disagrees with the reference."""

    name: str
    mode: str
    parameters: int
    ffn_width: int
    timing: Timing | None
    memory_ratio: float


def run(
    names: Iterable[str],
    shape: Shape,
    modes: Iterable[str],
    device: str,
    dtype: torch.dtype,
    rounds: int,
) -> list[Row]:
    """One row for every preset and mode ("eager", "compiled"), the baseline's first."""
    torch.manual_seed(0)
    baseline = block(None, shape, shape.ratio * shape.dim)
    target = parameters(baseline)
    blocks: dict[str, tuple[nn.Module, int]] = {BASELINE: (baseline, shape.ratio * shape.dim)}
    agreeing = {BASELINE: True}
    for name in names:
        width = matched_width(name, shape, target)
        blocks[name] = block(name, shape, width), width
        agreeing[name] = agrees(name, shape)
    x = torch.randn(shape.batch, shape.tokens, shape.dim, device=device, dtype=dtype)
    rows = []
    for mode in modes:
        calls = {
            name: step(module.to(device, dtype), x, shape.causal, mode)
            for name, (module, _) in blocks.items()
            if agreeing[name]
        }
        timings = interleaved(calls, BASELINE, rounds, device)
        memory = {name: peak_memory(call, device) for name, call in calls.items()}
        rows += [
            Row(
                name,
                mode,
                parameters(module),
                width,
                timings.get(name),
                memory.get(name, 0) / memory[BASELINE],
            )
            for name, (module, width) in blocks.items()
        ]
    return rows


def block(name: str | None, shape: Shape, width: int) -> nn.Module:
    """A pre-norm block with the preset's attention, or timm's own where `name` is None."""
    layer = timm.layers.Attention if name is None else attn_layer(name)
    built = Block(shape.dim, shape.heads, attn_layer=layer)
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
    """Whether the fast layer gives the reference's values and gradients, in float64."""
    layer: Attention = attn_layer(name)(shape.dim, shape.heads).double().eval()
    x = torch.randn(2, min(shape.tokens, 33), shape.dim, dtype=torch.double, requires_grad=True)
    wanted = [x, *layer.parameters()]
    out = layer(x, is_causal=shape.causal)
    plain = reference.attention(layer, x, is_causal=shape.causal)
    direction = torch.randn_like(out)
    pairs = zip(
        torch.autograd.grad(out, wanted, direction),
        torch.autograd.grad(plain, wanted, direction),
        strict=True,
    )
    return torch.allclose(out, plain) and all(torch.allclose(a, b) for a, b in pairs)


def step(module: nn.Module, x: torch.Tensor, causal: bool, mode: str) -> Callable[[], None]:
    """Forward and backward of the block, compiled where `mode` says so."""
    module.train()
    call = torch.compile(module) if mode == "compiled" else module
    given = x.clone().requires_grad_()
    gradient = torch.randn_like(x)

    def forward_backward() -> None:
        given.grad = None
        module.zero_grad(set_to_none=True)
        call(given, is_causal=causal).backward(gradient)

    return forward_backward


def table(rows: list[Row], title: str) -> str:
    """The rows as a Markdown table under `title`."""
    lines = [
        title,
        "",
        "| preset | mode | parameters | FFN | ms (median ± IQR) | x baseline (± IQR) | memory |",
        "|---|---|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        head = f"| {row.name} | {row.mode} | {row.parameters:,} | {row.ffn_width} |"
        if row.timing is None:
            lines.append(f"{head} disagrees with the reference: no number | | |")
            continue
        time = f"{1e3 * row.timing.median:.2f} ± {1e3 * row.timing.iqr:.2f}"
        ratio = f"{row.timing.ratio:.2f} ± {row.timing.ratio_iqr:.2f}"
        lines.append(f"{head} {time} | {ratio} | {row.memory_ratio:.2f}x |")
    return "\n".join(lines)
