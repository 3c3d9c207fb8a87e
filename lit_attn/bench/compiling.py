"""Seconds until a model is compiled, as a whole and block by block, and its number of graphs.

A cell on a GPU compiles before its first step. Blocks that differ only in their tensors share one
graph (lit_attn.models.blocks), so their time does not grow with the depth. The model is that of
`bench decoding`, in training: the forward and the backward pass of one batch.
"""

import argparse
from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import torch
from torch import nn

from lit_attn.bench.decoding import Shape, configure
from lit_attn.bench.measure import TITLES, Setup, Spread, Table, summarize, time_call
from lit_attn.models.blocks import compile_blocks
from lit_attn.models.language import GPT
from lit_attn.private_names.of_torch import compiler_counters, empty_compiler_cache

WAYS = ("network", "blocks")
"""Input of torch.compile: the whole network, or each block alone."""


class Row(NamedTuple):
    """Graphs of one model, and the seconds of the first step beyond those of the second one."""

    name: str
    depth: int
    compiled: str
    graphs: int
    seconds: Spread


def make_compiling_tables(options: argparse.Namespace, setup: Setup) -> Iterator[Table]:
    """Yield the table of all presets and depths."""
    rows = []
    for name in options.presets:
        for depth in options.depth:
            shape = Shape(
                batch=options.batch,
                generate=0,
                dim=options.dim,
                depth=depth,
                heads=options.heads,
                vocabulary=options.vocabulary,
                windows=(None,),
            )
            rows += [measure(name, shape, way, options.tokens, setup) for way in WAYS]
    title = TITLES["compiling"].format(options=options, setup=setup)
    yield f"compiling-{setup.device}", title, rows


def measure(name: str, shape: Shape, way: str, tokens: int, setup: Setup) -> Row:
    """Return the measurements of one model that is compiled in one of WAYS."""
    seconds = []
    for _ in range(setup.rounds):
        torch.compiler.reset()
        compiler_counters().clear()
        network = GPT(configure(name, shape), shape.vocabulary, tokens, setup.device)
        network.to(setup.dtype).train()
        if way == "blocks":
            compile_blocks(network)
        else:
            network.trunk.compile()
        batch = torch.randint(shape.vocabulary, (shape.batch, tokens), device=setup.device)
        step = partial(make_step, network, batch)
        with empty_compiler_cache():
            first = time_call(step, setup.device, setup.clock)
        second = time_call(step, setup.device, setup.clock)
        seconds.append(first - second)
    graphs = compiler_counters()["stats"]["unique_graphs"]
    return Row(name, shape.depth, way, graphs, summarize(seconds))


def make_step(network: nn.Module, batch: torch.Tensor) -> None:
    """Make the forward and the backward pass of one batch."""
    network(batch).float().square().mean().backward()
    network.zero_grad()
