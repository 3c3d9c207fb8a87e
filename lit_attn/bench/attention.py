"""Time and memory of a transformer block with each preset, forward + backward.

The baseline is timm's block with timm's attention on torch's scaled-dot-product call. The FFN width
of every other block is solved so that its parameter count is nearest to the baseline's. A block
whose values or gradients differ from the reference gets no number.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import nn

from lit_attn.bench import blocks, measure
from lit_attn.bench.blocks import BASELINE, MATERIALISED, Shape, Step
from lit_attn.bench.measure import Setup, Spread, summarize, summarize_ratios
from lit_attn.bench.report import format_mebibytes

HEADER = (
    "| block | mode | parameters | FFN | ms (median ± IQR) | x baseline (± IQR) "
    "| x materialised (± IQR) | peak MiB | x baseline | x materialised |\n"
    "|---|---|---:|---:|---:|---:|---:|---:|---:|---:|"
)

SPREADS = ("seconds", "ratio", "beside")


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


def run(
    names: Sequence[str],
    shape: Shape,
    modes: Sequence[str],
    setup: Setup,
) -> list[Row]:
    """Return a row for every block and mode ("eager", "compiled"), the baseline first."""
    torch.manual_seed(0)
    width = shape.ratio * shape.dim
    modules: dict[str, tuple[nn.Module, int]] = {
        BASELINE: (blocks.build_block(BASELINE, shape, width), width)
    }
    target = blocks.count_parameters(modules[BASELINE][0])
    agreeing = {BASELINE}
    for name in blocks.add_materialised(names):
        width = blocks.match_width(name, shape, target)
        modules[name] = blocks.build_block(name, shape, width), width
        if blocks.agrees(name, shape):
            agreeing.add(name)
    x = torch.randn(shape.batch, shape.tokens, shape.dim, device=setup.device, dtype=setup.dtype)
    rows = []
    for mode in modes:
        torch.compiler.reset()
        # All blocks share timm's forward; beyond dynamo's limit of graphs it would run uncompiled.
        with torch._dynamo.config.patch(recompile_limit=len(modules) + 1):
            rows += _measure(modules, agreeing, x, shape.causal, mode, setup)
    return rows


def _measure(
    modules: dict[str, tuple[nn.Module, int]],
    agreeing: set[str],
    x: torch.Tensor,
    causal: bool,
    mode: str,
    setup: Setup,
) -> list[Row]:
    steps = {
        name: Step(module.to(x), x, causal, mode)
        for name, (module, _) in modules.items()
        if name in agreeing
    }
    seconds = measure.measure_seconds(steps, setup.rounds, setup.device, setup.clock)
    peak = {name: measure.measure_memory(step, setup.device).peak for name, step in steps.items()}
    rows = []
    for name, (module, width) in modules.items():
        row = Row(name, mode, blocks.count_parameters(module), width)
        if name in agreeing:
            row = row._replace(
                seconds=summarize(seconds[name]),
                ratio=summarize_ratios(seconds[name], seconds[BASELINE]),
                peak=peak[name],
                peak_ratio=peak[name] / peak[BASELINE],
            )
            materialised = name + MATERIALISED
            if materialised in agreeing:
                row = row._replace(
                    beside=summarize_ratios(seconds[name], seconds[materialised]),
                    peak_beside=peak[name] / peak[materialised],
                )
        rows.append(row)
    return rows


def format_table(rows: list[Row]) -> str:
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
                format_mebibytes(row.peak),
                *("" if ratio is None else f"{ratio:.2f}" for ratio in row[8:10]),
            ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)
