"""Compiled code of every mechanism computes other batches and other numbers of tokens.

PyTorch's tracer makes the graphs of forward and backward passes, with flex_attention as on a GPU.
PyTorch 2.11 could not compile graphs whose gradients of score functions asked for a size.
"""

import pytest
import torch
from helpers.attention_checks import make, tokens
from helpers.flex_on_cpu import flex_of_torch, use_flex
from helpers.traced_graphs import TracedGraphs
from torch import Tensor, nn

from lit_attn.attention import flex, reference
from lit_attn.attention.layer import Attention
from lit_attn.attention.spec import PRESETS
from lit_attn.attention.statistics import leave_steps_to_loop

SHAPES = [(2, 9), (3, 17)]
# Torch's default treats sizes as constants until they change, so it compiles two graphs: once for
# each path and each form of logits.
STATIC_FIRST = ["standard", "mgk-soft-e", "linear", "dcmha-all"]
# Presets that leave out a part of another one, have another number of the same computation, or
# differ in what they compute of each token alone.
INCLUDED = {"belief", "belief-star", "xsa", "attentionx", "value-residual", "gated", "gated-heads"}
INCLUDED |= {"mgk", "smgk", "smgk-hard", "softmax-mgk", "softmax-smgk", "gaussian", "mlk", "smlk"}
INCLUDED |= {"talking-heads", "static-projection", "knocking-heads", "off-by-one", "alibi"}
INCLUDED |= {name for name in PRESETS if name.startswith("dcmha")}
CASES = [
    pytest.param(name, None, [True, False], id=f"{name}-static-first") for name in STATIC_FIRST
]
# A graph for every size, of all other presets in causal order.
CASES += [
    pytest.param(name, True, [True], id=name)
    for name in PRESETS
    if name not in INCLUDED.union(STATIC_FIRST)
]


def compute(network: nn.Module, x: Tensor, is_causal: bool) -> list[Tensor]:
    """Return the output of a layer and its gradient with respect to x."""
    inputs = x.clone().requires_grad_()
    out = network(inputs, is_causal=is_causal)
    return [out, *torch.autograd.grad(out.square().sum(), inputs)]


def compute_reference(layer: Attention, x: Tensor, is_causal: bool) -> list[Tensor]:
    inputs = x.clone().requires_grad_()
    out = reference.attention(layer, inputs, is_causal=is_causal)
    return [out, *torch.autograd.grad(out.square().sum(), inputs)]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "is_dynamic", "orders"), CASES)
def test_two_batches_and_two_lengths_compile(
    name: str, is_dynamic: bool | None, orders: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.compiler.reset()
    use_flex(monkeypatch, flex_of_torch, flex.weighted_sums)
    graphs = TracedGraphs()
    layer = make(PRESETS[name])
    leave_steps_to_loop(layer)
    compiled = torch.compile(layer, backend=graphs.compile, fullgraph=True, dynamic=is_dynamic)
    for is_causal in orders:
        for batch, n in SHAPES:
            x = tokens(n, batch)
            expected = compute_reference(layer, x, is_causal)
            torch.testing.assert_close(compute(compiled, x, is_causal), expected)
    assert not graphs.sizes_in_score_gradients()
