"""Time and memory of a transformer block or a single layer with each preset, forward + backward.

The baseline is timm's block with timm's attention on torch's scaled-dot-product call. The FFN width
of every other block is solved so that its parameter count is nearest to the baseline's.
"""

import argparse
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import timm.layers
import torch
from timm.models.vision_transformer import Block
from torch import Tensor, nn

from lit_attn.attention.layer import Attention, attn_layer
from lit_attn.attention.network import number_layers
from lit_attn.attention.spec import PRESETS
from lit_attn.bench import measure
from lit_attn.bench.measure import TITLES, Setup, Spread, Step, Table, summarize, summarize_ratios
from lit_attn.models.factory import count
from lit_attn.private_names.of_torch import compiler_counters, compiler_limits

BASELINE = "timm attention"
FFN_RATIO = 3  # Width of the baseline's FFN over the width of the block.

# Default lengths of the memory benchmark; linear keys grow with n in time too.
LENGTHS = [2**power for power in range(10, 14)]
LINEAR_LENGTHS = [2**power for power in range(10, 17)]


class Shape(NamedTuple):
    """Shape of the input, and the number of heads."""

    batch: int = 128
    tokens: int = 65
    dim: int = 192
    heads: int = 12
    causal: bool = False


def build_layer(name: str, shape: Shape) -> Attention:
    """Return the attention layer of the block called `name`."""
    layer = attn_layer(name)(shape.dim, shape.heads)
    number_layers(layer)
    return layer


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
    smallest = count(build_block(name, shape, 1))
    per_unit = count(build_block(name, shape, 2)) - smallest
    added_units = round((target - smallest) / per_unit)
    return max(1, 1 + added_units)


class Row(NamedTuple):
    """Measurements of one block in one mode."""

    name: str
    mode: str
    parameters: int
    ffn_width: int
    seconds: Spread
    ratio: Spread
    peak: int
    peak_ratio: float


def make_attention_tables(options: argparse.Namespace, setup: Setup) -> Iterator[Table]:
    """Yield the table of each number of tokens."""
    for tokens in options.tokens:
        shape = Shape(
            options.batch,
            tokens,
            options.dim,
            options.heads,
            options.causal,
        )
        name = f"attention-{setup.device}-{tokens}"
        causal = ""
        if shape.causal:
            name += "-causal"
            causal = ", causal"
        title = TITLES["attention"].format(options=options, shape=shape, setup=setup, causal=causal)
        yield (name, title, run(options.presets, shape, options.modes, setup))


def run(names: Sequence[str], shape: Shape, modes: Sequence[str], setup: Setup) -> list[Row]:
    """Return a row for every block and mode ("eager", "compiled"), the baseline first."""
    torch.manual_seed(0)
    baseline_width = FFN_RATIO * shape.dim
    widths = {BASELINE: baseline_width}
    blocks = {BASELINE: build_block(BASELINE, shape, baseline_width)}
    target = count(blocks[BASELINE])
    for name in names:
        widths[name] = match_width(name, shape, target)
        blocks[name] = build_block(name, shape, widths[name])
    x = torch.randn(shape.batch, shape.tokens, shape.dim, device=setup.device, dtype=setup.dtype)
    for block in blocks.values():
        block.to(x)
    rows = []
    for mode in modes:
        seconds, peaks = _measure_blocks(blocks, x, shape.causal, mode, setup)
        for name, block in blocks.items():
            rows.append(
                Row(
                    name=name,
                    mode=mode,
                    parameters=count(block),
                    ffn_width=widths[name],
                    seconds=summarize(seconds[name]),
                    ratio=summarize_ratios(seconds[name], seconds[BASELINE]),
                    peak=peaks[name],
                    peak_ratio=peaks[name] / peaks[BASELINE],
                )
            )
    return rows


def _measure_blocks(
    blocks: dict[str, nn.Module], x: Tensor, causal: bool, mode: str, setup: Setup
) -> tuple[dict[str, list[float]], dict[str, int]]:
    """Return the seconds of every round and the peak bytes of each block in one mode."""
    torch.compiler.reset()
    compiler_counters().clear()
    # All blocks share timm's forward and the function of a piece; dynamo compiles each anew.
    limits = {"recompile_limit": 2 * len(blocks) + 1, "fail_on_recompile_limit_hit": True}
    with compiler_limits(**limits):
        steps = {name: Step(block, x, causal, mode) for name, block in blocks.items()}
        calls = {}
        for name, step in steps.items():
            # A step that counts finds the memory that one of its block released, as in training.
            calls[f"before {name}"] = step
            calls[name] = step
        seconds = measure.measure_seconds(calls, setup.rounds, setup.device, setup.clock)
        peaks = {}
        for name, step in steps.items():
            peaks[name] = measure.measure_memory(step, setup.device).peak
    measure.check_graphs()
    return seconds, peaks


class LayerRow(NamedTuple):
    """Measurements of one layer at one length."""

    name: str
    causal: bool
    tokens: int
    seconds: Spread
    held: int
    peak: int
    logits: int


def make_memory_tables(options: argparse.Namespace, setup: Setup) -> Iterator[Table]:
    """Yield the table of every layer, bidirectional and causal, at each length."""
    torch.manual_seed(0)
    rows = []
    for name in options.presets:
        default = LENGTHS if PRESETS[name].similarity.has_logits else LINEAR_LENGTHS
        for causal in (False, True):
            for n in options.tokens or default:
                shape = Shape(1, n, options.dim, options.heads, causal)
                rows.append(measure_layer(name, shape, setup))
    title = TITLES["memory"].format(options=options, setup=setup)
    yield (f"memory-{setup.device}", title, rows)


def measure_layer(name: str, shape: Shape, setup: Setup) -> LayerRow:
    """Return the measurements of one layer at one length."""
    module = build_layer(name, shape).to(setup.device, setup.dtype)
    x = torch.randn(shape.batch, shape.tokens, shape.dim, device=setup.device, dtype=setup.dtype)
    step = Step(module, x, shape.causal)
    used = measure.measure_memory(step, setup.device)
    seconds = measure.measure_seconds({name: step}, setup.rounds, setup.device, setup.clock)
    return LayerRow(
        name=name,
        causal=shape.causal,
        tokens=shape.tokens,
        seconds=summarize(seconds[name]),
        held=used.held,
        peak=used.peak,
        logits=shape.batch * shape.heads * shape.tokens**2 * x.element_size(),
    )
