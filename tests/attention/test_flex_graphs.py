"""Graphs of flex_attention that inductor compiles on a GPU, traced on a CPU.

PyTorch 2.15 cannot compile the gradient of a score function that asks for a size: a node `sym_size`
fails on a GPU as soon as the compiled code sees a second shape.
"""

from typing import Any

import pytest
import torch
from helpers import attention_cases
from helpers.flex_on_cpu import flex_of_torch
from helpers.traced_graphs import TracedGraphs
from torch import Tensor, nn

from lit_attn.attention import flex, flex_support
from lit_attn.attention.layer import attn_layer
from lit_attn.attention.masks import Masks
from lit_attn.attention.spec import AttentionSpec

DIM, HEADS = 24, 2

HARD = {"kind": "mixture", "assignment": "hard", "keys": 3}
POSITIONS = {"kind": "mixture", "prior_scope": "position", "positions": 64}
CROSSES: list[dict[str, Any]] = [
    {"similarity": HARD, "zz": True, "window": 4},
    {"similarity": POSITIONS, "window": 3},
    {"preset": "mgk", "bias": "forgetting"},
    {"preset": "smgk", "kv_heads": 1, "normaliser": "offset-softmax"},
]
# tests/attention/test_shapes.py has the presets, in a compiled layer.
EVERY = [AttentionSpec.model_validate(choice) for choice in CROSSES]


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> TracedGraphs:
    """Trace the path FLEX of every layer into the returned graphs."""
    torch.compiler.reset()
    kept = TracedGraphs()
    compiled = torch.compile(flex.weighted_sums, backend=kept.compile, fullgraph=True)
    monkeypatch.setattr(flex, "flex_attention", flex_of_torch)
    monkeypatch.setattr(flex, "_compiled", lambda: compiled)
    monkeypatch.setattr(flex_support, "supports", lambda q, features, width: q.shape[-2] > 1)
    return kept


def train_step(network: nn.Module, batch: int, n: int, **masks: Any) -> None:
    network(torch.randn(batch, n, DIM, requires_grad=True), **masks).sum().backward()


def assert_sizes_are_inputs(graphs: TracedGraphs) -> None:
    """Check that no gradient of a score function has a node that asks for a size."""
    gradients = graphs.score_gradients()
    assert len(gradients) == 2
    # The first graph has fixed sizes, and the second one is for all batches and lengths.
    placeholders = graphs.backward[1].graph.find_nodes(op="placeholder")
    assert any(isinstance(node.meta["val"], torch.SymInt) for node in placeholders)
    assert not graphs.sizes_in_score_gradients()


@pytest.mark.slow
@pytest.mark.parametrize("spec", EVERY, ids=attention_cases.label)
def test_the_gradient_of_a_score_function_asks_for_no_size(
    spec: AttentionSpec, graphs: TracedGraphs
) -> None:
    layer = attn_layer(spec)(DIM, HEADS)
    for batch, n in ((2, 9), (3, 17), (5, 12)):
        train_step(layer, batch, n, is_causal=True)
    assert_sizes_are_inputs(graphs)


def test_the_keys_of_mgk_get_their_gradient_without_a_size(graphs: TracedGraphs) -> None:
    layer = attn_layer("mgk")(DIM, HEADS)
    for batch, n in ((2, 9), (3, 17)):
        train_step(layer, batch, n, is_causal=True)
    assert_sizes_are_inputs(graphs)


@pytest.mark.slow
def test_a_compiled_layer_with_padding_asks_for_no_size(graphs: TracedGraphs) -> None:
    layer = attn_layer("mgk")(DIM, HEADS)
    compiled = torch.compile(layer, backend=graphs.compile, fullgraph=True)
    for batch, n in ((2, 9), (3, 17)):
        mask = torch.ones(batch, 1, 1, n, dtype=torch.bool)
        train_step(compiled, batch, n, attn_mask=mask)
    assert_sizes_are_inputs(graphs)


def make_scores(scale: float, window: int, offset: int) -> flex.Scores:
    masks = Masks(None, None, is_causal=True, window=window, without_self=False, offset=offset)
    q = torch.randn(2, HEADS, 7, 4, requires_grad=True)
    k = torch.randn(2, HEADS, 2, 9, 4, requires_grad=True)
    key_bias = torch.randn(2, HEADS, 2, 9, requires_grad=True)
    return flex.Scores(q, k, key_bias, masks, scale, dropout=0.0, sink=None)


def test_numbers_of_a_layer_are_constants_of_its_graph(graphs: TracedGraphs) -> None:
    """A number that changes would become an input, for some of which PyTorch fails in a mask."""
    # The first numbers, then another scale, another window and another offset.
    for numbers in ((0.5, 3, 0), (0.25, 3, 0), (0.5, 4, 0), (0.5, 3, 2)):
        scores = make_scores(*numbers)
        flex.attend(scores, torch.randn(2, HEADS, 9, 4, requires_grad=True))
    assert len(graphs.forward) == 4
    for graph in graphs.forward[1:]:
        for node in graph.graph.find_nodes(op="placeholder"):
            value = node.meta["val"]
            assert isinstance(value, Tensor)
            assert value.ndim > 0
