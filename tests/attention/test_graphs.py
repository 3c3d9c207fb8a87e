"""Layers of many tokens compile into one graph (tests/attention/test_shapes.py has few tokens)."""

import pytest
import torch
from helpers.flex_on_cpu import flex_of_torch, use_flex
from torch import Tensor

from lit_attn.attention import flex
from lit_attn.attention.layer import attn_layer
from lit_attn.attention.network import number_layers
from lit_attn.attention.statistics import leave_steps_to_loop

# Beyond 384 tokens weights are formed in chunks, and kernels have their own masks.
TOKENS = 1024
NAMES = ["mgk-soft-e", "mgk-hard", "linear", "dcmha", "differential", "forgetting"]


def count_breaks(layer: torch.nn.Module, x: Tensor) -> int:
    """Return the number of graphs that the forward pass is cut into, less one."""
    torch._dynamo.reset()
    graphs = []

    def keep(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    torch.compile(layer, backend=keep, fullgraph=True)(x, is_causal=True)
    return len(graphs) - 1


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_training_step_is_one_graph(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With flex_attention as on a GPU; the loop of training ends the steps, as in this package."""
    use_flex(monkeypatch, flex_of_torch, flex.weighted_sums)
    layer = attn_layer(name)(32, 2).train()
    number_layers(layer)
    leave_steps_to_loop(layer)
    assert count_breaks(layer, torch.randn(1, TOKENS, 32)) == 0
