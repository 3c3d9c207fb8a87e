"""Time of forward and backward of a transformer block with each preset, relative to the standard.

The baseline is timm's block with timm's attention, which uses torch's scaled dot-product attention.
The FFN width of every other block is chosen so that its parameter count is as close as possible to
the baseline's. A block is not timed if its values or gradients differ from the reference.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import nn

from lit_attn.bench.blocks import (
    BASELINE,
    MATERIALISED,
    Shape,
    Step,
    agrees,
    block,
    matched_width,
    parameters,
    with_materialised,
)
from lit_attn.bench.footprint import footprint
from lit_attn.bench.report import mebibytes
from lit_attn.bench.timing import Spread, interleaved, ratios, spread

HEADER = (
    "| block | mode | parameters | FFN | ms (median ± IQR) | x baseline (± IQR) "
    "| x materialised (± IQR) | peak MiB | x baseline | x materialised |\n"
    "|---|---|---:|---:|---:|---:|---:|---:|---:|---:|"
)

SPREADS = ("seconds", "ratio", "beside")


class Row(NamedTuple):
    """Measurements of one block in one mode; None if it differs from the reference.

    Ratios of times are taken within a round. `beside` and `peak_beside` are ratios to the
    materialised form of the same block, or None if there is none.
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


def run(
    names: Sequence[str],
    shape: Shape,
    modes: Sequence[str],
    device: str,
    dtype: torch.dtype,
    rounds: int,
    clock: str = "wall",
) -> list[Row]:
    """Measure every block in every mode ("eager", "compiled"); the baseline comes first."""
    torch.manual_seed(0)
    width = shape.ratio * shape.dim
    blocks: dict[str, tuple[nn.Module, int]] = {BASELINE: (block(BASELINE, shape, width), width)}
    target = parameters(blocks[BASELINE][0])
    agreeing = {BASELINE}
    for name in with_materialised(names):
        width = matched_width(name, shape, target)
        blocks[name] = block(name, shape, width), width
        if agrees(name, shape):
            agreeing.add(name)
    x = torch.randn(shape.batch, shape.tokens, shape.dim, device=device, dtype=dtype)
    rows = []
    for mode in modes:
        torch.compiler.reset()
        # All blocks share timm's forward. Beyond dynamo's limit of graphs it would not be compiled.
        with torch._dynamo.config.patch(recompile_limit=len(blocks) + 1):
            rows += _measure(blocks, agreeing, x, shape.causal, mode, device, rounds, clock)
    return rows


def _measure(
    blocks: dict[str, tuple[nn.Module, int]],
    agreeing: set[str],
    x: torch.Tensor,
    causal: bool,
    mode: str,
    device: str,
    rounds: int,
    clock: str,
) -> list[Row]:
    steps = {
        name: Step(module.to(x), x, causal, mode)
        for name, (module, _) in blocks.items()
        if name in agreeing
    }
    seconds = interleaved(steps, rounds, device, clock)
    peak = {name: footprint(step, device).peak for name, step in steps.items()}
    rows = []
    for name, (module, width) in blocks.items():
        row = Row(name, mode, parameters(module), width)
        if name in agreeing:
            row = row._replace(
                seconds=spread(seconds[name]),
                ratio=ratios(seconds[name], seconds[BASELINE]),
                peak=peak[name],
                peak_ratio=peak[name] / peak[BASELINE],
            )
            beside = name + MATERIALISED
            if beside in agreeing:
                row = row._replace(
                    beside=ratios(seconds[name], seconds[beside]),
                    peak_beside=peak[name] / peak[beside],
                )
        rows.append(row)
    return rows


def table(rows: list[Row]) -> str:
    """Return the rows as a Markdown table."""
    lines = [HEADER]
    for row in rows:
        cells = [row.name, row.mode, f"{row.parameters:,}", str(row.ffn_width)]
        if row.seconds is None:
            cells += ["disagrees with the reference: no number", *[""] * 5]
        else:
            cells += [
                f"{1e3 * row.seconds.median:.2f} ± {1e3 * row.seconds.iqr:.2f}",
                *("" if s is None else f"{s.median:.2f} ± {s.iqr:.2f}" for s in row[5:7]),
                mebibytes(row.peak),
                *("" if ratio is None else f"{ratio:.2f}" for ratio in row[8:10]),
            ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)
