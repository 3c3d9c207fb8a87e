"""Growth of an attention layer's memory and time with the number of tokens, forward + backward.

The layer runs alone and uncompiled, on one sample. With an n x n x H tensor its peak is at least
that tensor and grows with n^2. In chunks of queries it grows with n; linear keys grow with n in
time too.
"""

import argparse
from collections.abc import Iterator
from typing import NamedTuple

import torch

from lit_attn.attention.spec import PRESETS
from lit_attn.bench.attention import Shape, Step, build_layer
from lit_attn.bench.measure import Setup, Spread, Table, measure_memory, summarize, time_call

LENGTHS = [2**power for power in range(10, 14)]
LINEAR_LENGTHS = [2**power for power in range(10, 17)]


class Row(NamedTuple):
    """Measurements of one layer at one length."""

    name: str
    causal: bool
    tokens: int
    seconds: Spread
    held: int
    peak: int
    logits: int


def make_tables(options: argparse.Namespace, setup: Setup) -> Iterator[Table]:
    """Yield the table of every layer, bidirectional and causal, at each length."""
    torch.manual_seed(0)
    rows = []
    for name in options.presets:
        default = LENGTHS if PRESETS[name].similarity.has_logits else LINEAR_LENGTHS
        for causal in (False, True):
            for n in options.tokens or default:
                shape = Shape(1, n, options.dim, options.heads, causal)
                rows.append(measure(name, shape, setup))
    title = (
        f"Attention layer, forward + backward, uncompiled, {options.dtype}: one sample, width "
        f"{options.dim}, {options.heads} heads, {setup.rounds} rounds. seconds: median ± "
        "interquartile range. held: bytes kept from forward to backward. peak: most bytes in "
        "either, without parameters and input. logits: bytes of one n x n x H tensor."
    )
    yield Table(f"memory-{setup.device}", title, rows)


def measure(name: str, shape: Shape, setup: Setup) -> Row:
    """Return the measurements of one layer at one length."""
    module = build_layer(name, shape).to(setup.device, setup.dtype)
    x = torch.randn(shape.batch, shape.tokens, shape.dim, device=setup.device, dtype=setup.dtype)
    step = Step(module, x, shape.causal)
    used = measure_memory(step, setup.device)
    seconds = summarize(time_call(step, setup.device, setup.clock) for _ in range(setup.rounds))
    logits = shape.batch * shape.heads * shape.tokens**2 * x.element_size()
    return Row(name, shape.causal, shape.tokens, seconds, used.held, used.peak, logits)
