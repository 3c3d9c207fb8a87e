"""Blocks are compiled alone, and blocks that differ only in their tensors share one graph."""

from typing import Any

import pytest
import torch
from helpers.graph_counter import GraphCounter
from helpers.training_cells import digits_cell, text_cell
from torch import Tensor, nn

from lit_attn.config.cell import Cell
from lit_attn.models import factory
from lit_attn.models.blocks import compile_blocks, is_mostly_blocks, recompute_blocks

VALUES = {"layers": [{"every": 2, "use": "belief2"}, {"last": 1, "use": "xsa"}]}
WINDOWED = {"preset": "standard", "window": 4}


def gpt(depth: int, attention: Any, **model: Any) -> Cell:
    return text_cell(model={"attention": attention, "depth": depth, **model})


def vit(depth: int, attention: Any, **model: Any) -> Cell:
    return digits_cell(model={"attention": attention, "depth": depth, "drop_path": 0.0, **model})


def build(cell: Cell) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """Return the network of a cell and two samples of zeros."""
    torch.manual_seed(0)
    network = factory.build(cell.experiment.model, cell.experiment.data)
    sample = cell.experiment.data.signature().sample()
    inputs = tuple(torch.zeros(2, *part.shape[1:], dtype=part.dtype) for part in sample)
    return network, inputs


def compute(network: nn.Module, inputs: tuple[Tensor, ...]) -> list[Tensor]:
    """Return the output of a training step and the gradients, with dropout of one seed."""
    torch.manual_seed(1)
    output = network.train()(*inputs)
    network.zero_grad()
    output.square().mean().backward()
    gradients = [p.grad.clone() for p in network.parameters() if p.grad is not None]
    return [output.detach(), *gradients]


@pytest.mark.slow
@pytest.mark.parametrize(("make", "attention"), [(vit, "mgk"), (gpt, "dcmha")])
def test_twelve_blocks_compile_one_graph(make: Any, attention: str, compiler: GraphCounter) -> None:
    network, inputs = build(make(12, attention))
    compile_blocks(network)
    network.train()(*inputs)
    assert compiler.graphs == 1


def test_blocks_share_a_graph_and_compute_the_same(compiler: GraphCounter) -> None:
    expected = compute(*build(gpt(3, "standard")))
    network, inputs = build(gpt(3, "standard"))
    compile_blocks(network)
    torch.testing.assert_close(compute(network, inputs), expected, rtol=1e-5, atol=1e-6)
    assert compiler.graphs == 1


@pytest.mark.parametrize(
    ("make", "attention", "graphs"),
    [
        # The first layer writes its values, and all others read them.
        (gpt, "value-residual", 2),
        # Its constant depends on the depth: a constant at first, and then an input.
        (vit, "differential", 2),
        (gpt, "differential-2", 1),
        (vit, VALUES, 3),
        (gpt, {"layers": [{"every": 3, "use": WINDOWED}]}, 2),
    ],
    ids=["value-residual", "differential", "differential-2", "three mechanisms", "windows"],
)
@pytest.mark.slow
def test_blocks_that_differ_have_their_own_graphs_and_the_same_values(
    make: Any, attention: Any, graphs: int, compiler: GraphCounter
) -> None:
    expected = compute(*build(make(6, attention)))
    network, inputs = build(make(6, attention))
    compile_blocks(network)
    torch.testing.assert_close(compute(network, inputs), expected, rtol=1e-5, atol=1e-6)
    assert compiler.graphs == graphs


@pytest.mark.slow
def test_many_kinds_of_blocks_do_not_reach_the_limit_of_the_compiler(
    compiler: GraphCounter,
) -> None:
    """Rates of stochastic depth are constants, and PyTorch's limit is eight variants."""
    network, inputs = build(vit(10, "standard", drop_path=0.1))
    compile_blocks(network)
    network.train()(*inputs)
    assert compiler.graphs == 10
    # In evaluation only the first block, whose rate is zero, differs.
    network.eval()(*inputs)
    assert compiler.graphs == 12


@pytest.mark.slow
def test_recomputed_blocks_share_their_graph_too(compiler: GraphCounter) -> None:
    expected = compute(*build(gpt(4, "belief2")))
    network, inputs = build(gpt(4, "belief2"))
    compile_blocks(network)
    recompute_blocks(network)
    torch.testing.assert_close(compute(network, inputs), expected, rtol=1e-5, atol=1e-6)
    assert compiler.graphs == 1


def test_a_network_whose_blocks_are_a_small_part_is_compiled_as_a_whole() -> None:
    network, _ = build(gpt(2, "standard"))
    assert is_mostly_blocks(network)
    network.head = nn.Linear(200, 200)
    assert not is_mostly_blocks(network)
    assert not is_mostly_blocks(nn.Sequential(nn.Linear(4, 4)))
