"""How memory and time of an attention layer grow with the number of tokens, forward + backward.

The layer alone, one sample, uncompiled. A layer that keeps or forms an n x n x H tensor shows as a
peak of at least that tensor and as growth with n^2; one that works by chunks of queries grows with
n, and so do linear keys, in time too.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from lit_attn.attention.parts import LinearConfig
from lit_attn.attention.spec import PRESETS
from lit_attn.bench.blocks import Shape, Step, layer
from lit_attn.bench.footprint import footprint
from lit_attn.bench.report import mebibytes
from lit_attn.bench.timing import Spread, once, spread

LENGTHS = [2**power for power in range(10, 14)]
LINEAR_LENGTHS = [2**power for power in range(10, 17)]

HEADER = (
    "| preset | causal | tokens | s (median ± IQR) | held MiB | peak MiB | n x n x H MiB "
    "| peak grows as | time grows as |\n"
    "|---|---|---:|---:|---:|---:|---:|---:|---:|"
)

SPREADS = ("seconds",)


class Row(NamedTuple):
    """One layer at one length; `whole` is one tensor of n x n x H logits, all in bytes.

    `peak_power` p says that the peak grew with n^p since the row before, likewise `time_power`;
    None in a layer's first row.
    """

    name: str
    causal: bool
    tokens: int
    seconds: Spread
    held: int
    peak: int
    whole: int
    peak_power: float | None = None
    time_power: float | None = None


def run(
    names: Sequence[str],
    lengths: Sequence[int] | None,
    dim: int,
    heads: int,
    device: str,
    dtype: torch.dtype,
    rounds: int,
    clock: str = "wall",
) -> list[Row]:
    """Every layer, bidirectional and causal, at `lengths`, or at those it is shown at."""
    torch.manual_seed(0)
    rows: list[Row] = []
    for name in names:
        linear = isinstance(PRESETS[name].similarity, LinearConfig)
        for causal in (False, True):
            before = None
            for n in lengths or (LINEAR_LENGTHS if linear else LENGTHS):
                shape = Shape(1, n, dim, heads, causal=causal)
                row = measure(name, shape, device, dtype, rounds, clock)
                if before is not None:
                    row = _grown(before, row)
                before = row
                rows.append(row)
    return rows


def measure(
    name: str, shape: Shape, device: str, dtype: torch.dtype, rounds: int, clock: str = "wall"
) -> Row:
    """One layer at one length."""
    module = layer(name, shape).to(device, dtype)
    x = torch.randn(shape.batch, shape.tokens, shape.dim, device=device, dtype=dtype)
    step = Step(module, x, shape.causal)
    taken = footprint(step, device)
    seconds = spread(once(step, device, clock) for _ in range(rounds))
    whole = shape.batch * shape.heads * shape.tokens**2 * x.element_size()
    return Row(name, shape.causal, shape.tokens, seconds, taken.held, taken.peak, whole)


def table(rows: list[Row]) -> str:
    """The rows as a Markdown table."""
    lines = [HEADER]
    for row in rows:
        cells = [row.name, "yes" if row.causal else "no", str(row.tokens)]
        cells.append(f"{row.seconds.median:.3g} ± {row.seconds.iqr:.2g}")
        cells += [mebibytes(count) for count in (row.held, row.peak, row.whole)]
        powers = (row.peak_power, row.time_power)
        cells += ["" if power is None else f"n^{power:.2f}" for power in powers]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _grown(before: Row, row: Row) -> Row:
    """`row` with the powers of n by which it is more than `before`."""
    longer = math.log(row.tokens / before.tokens)
    return row._replace(
        peak_power=math.log(row.peak / before.peak) / longer,
        time_power=math.log(row.seconds.median / before.seconds.median) / longer,
    )
