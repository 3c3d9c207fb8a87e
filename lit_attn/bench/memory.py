"""Growth of an attention layer's memory and time with the number of tokens, forward + backward.

The layer runs alone and uncompiled, on one sample. With an n x n x H tensor its peak is at least
that tensor and grows with n^2. In chunks of queries it grows with n; linear keys grow with n in
time too.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from lit_attn.attention.spec import PRESETS
from lit_attn.bench.attention import Shape, Step, build_layer
from lit_attn.bench.measure import (
    Setup,
    Spread,
    format_mebibytes,
    measure_memory,
    summarize,
    time_call,
)

LENGTHS = [2**power for power in range(10, 14)]
LINEAR_LENGTHS = [2**power for power in range(10, 17)]

HEADER = (
    "| preset | causal | tokens | s (median ± IQR) | held MiB | peak MiB | n x n x H MiB "
    "| peak grows as | time grows as |\n"
    "|---|---|---:|---:|---:|---:|---:|---:|---:|"
)

SPREADS = ("seconds",)


class Row(NamedTuple):
    """Measurements of one layer at one length, in seconds and bytes.

    `logits` is the size of one tensor of n x n x H logits. The peak grew with n^`peak_power` since
    the previous row and the time with n^`time_power`; both are None in the first row of a layer.
    """

    name: str
    causal: bool
    tokens: int
    seconds: Spread
    held: int
    peak: int
    logits: int
    peak_power: float | None = None
    time_power: float | None = None


def run(
    names: Sequence[str], lengths: Sequence[int] | None, dim: int, heads: int, setup: Setup
) -> list[Row]:
    """Return rows of every layer, bidirectional and causal, at `lengths` or default lengths."""
    torch.manual_seed(0)
    rows = []
    for name in names:
        is_linear = not PRESETS[name].similarity.has_logits
        for causal in (False, True):
            previous = None
            for n in lengths or (LINEAR_LENGTHS if is_linear else LENGTHS):
                shape = Shape(1, n, dim, heads, causal=causal)
                row = measure(name, shape, setup)
                if previous is not None:
                    growth = math.log(row.tokens / previous.tokens)
                    row = row._replace(
                        peak_power=math.log(row.peak / previous.peak) / growth,
                        time_power=math.log(row.seconds.median / previous.seconds.median) / growth,
                    )
                previous = row
                rows.append(row)
    return rows


def measure(name: str, shape: Shape, setup: Setup) -> Row:
    """Return the measurements of one layer at one length."""
    module = build_layer(name, shape).to(setup.device, setup.dtype)
    x = torch.randn(shape.batch, shape.tokens, shape.dim, device=setup.device, dtype=setup.dtype)
    step = Step(module, x, shape.causal)
    used = measure_memory(step, setup.device)
    seconds = summarize(time_call(step, setup.device, setup.clock) for _ in range(setup.rounds))
    logits = shape.batch * shape.heads * shape.tokens**2 * x.element_size()
    return Row(name, shape.causal, shape.tokens, seconds, used.held, used.peak, logits)


def format_row(row: Row) -> list[str]:
    """Return the cells of a row under HEADER."""
    cells = [row.name, "yes" if row.causal else "no", str(row.tokens)]
    cells.append(f"{row.seconds.median:.3g} ± {row.seconds.iqr:.2g}")
    cells += [format_mebibytes(count) for count in (row.held, row.peak, row.logits)]
    powers = (row.peak_power, row.time_power)
    return cells + ["" if power is None else f"n^{power:.2f}" for power in powers]
