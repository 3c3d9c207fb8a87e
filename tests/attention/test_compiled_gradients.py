"""Gradients of compiled layers are those of uncompiled ones, at sizes that are constants.

With PyTorch 2.15 two tensors that the forward pass saves can be views of one memory. AOTAutograd
then gives both away as buffers of the backward pass, and inductor may overwrite one of them before
it has read the other (LOG.md).
"""

from typing import Any

import pytest
import torch
from helpers import attention_cases
from helpers.attention_checks import DIM, make, tokens
from torch import Tensor, fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.decomposition import select_decomp_table

from lit_attn.attention.first_values import FirstValues
from lit_attn.attention.layer import Attention
from lit_attn.attention.spec import AttentionSpec

# Its compiled gradient of `normaliser.vectors` was -7.678 times the right one.
CROSS: dict[str, Any] = {
    "residual": {"kind": "perpendicular", "scope": "head", "strength": "tanh"},
    "similarity": "mixture",
    "compose": "static",
    "normaliser": "differential",
    "gate": "head",
    "bias": "t5",
    "window": 3,
    "values": {"kind": "first", "learned": True},
}
CHOICES: list[Any] = [
    CROSS,
    "dcmha-all",
    "multi-token",
    "selective",
    "mgk-hard",
    {"preset": "differential-2", "compose": "static", "residual": "split"},
]


class WithFirstValues(nn.Module):
    """Layer after the first one, whose values of the first layer are an argument."""

    def __init__(self, layer: Attention) -> None:
        super().__init__()
        self.layer = layer
        layer.set_depth(1)
        layer.first_values = FirstValues()

    def forward(self, x: Tensor, first_values: Tensor, mask: Tensor) -> Tensor:
        assert self.layer.first_values is not None
        self.layer.first_values.write(first_values)
        out: Tensor = self.layer(x, attn_mask=mask)
        return out


def make_call(choice: Any, n: int) -> tuple[WithFirstValues, tuple[Tensor, Tensor, Tensor]]:
    """Return a layer and its arguments: two sequences, of which the second one has padding."""
    network = WithFirstValues(make(AttentionSpec.model_validate(choice)))
    first_values = tokens(n, seed=3).unflatten(-1, (network.layer.num_heads, -1))
    mask = torch.ones(2, 1, 1, n, dtype=torch.bool)
    mask[1, ..., n - 2 :] = False
    return network, (tokens(n), first_values, mask)


def name_choice(choice: Any) -> str:
    return attention_cases.label(AttentionSpec.model_validate(choice))


def list_shared_memory(graph: fx.GraphModule) -> list[str]:
    """Return the results of a forward graph that are views of the memory of an earlier one."""
    (output,) = graph.graph.find_nodes(op="output")
    inputs = graph.graph.find_nodes(op="placeholder")
    kept_by_caller = {node.meta["val"].untyped_storage()._cdata for node in inputs}
    known: set[int] = set()
    shared = []
    for node in output.args[0]:
        storage = node.meta["val"].untyped_storage()._cdata
        # Inductor takes an alias for the tensor itself.
        if storage in kept_by_caller or node.target is torch.ops.aten.alias.default:
            continue
        if storage in known:
            shared.append(node.name)
        known.add(storage)
    return shared


@pytest.mark.slow
@pytest.mark.parametrize("choice", CHOICES, ids=name_choice)
def test_saved_tensors_share_no_memory(choice: Any) -> None:
    forward_graphs: list[fx.GraphModule] = []

    def keep(graph: fx.GraphModule, inputs: Any) -> Any:
        forward_graphs.append(graph)

        def call(values: list[Any]) -> Any:
            return graph(*values)

        call._boxed_call = True  # type: ignore[attr-defined]
        return call

    def run(graph: fx.GraphModule, inputs: Any) -> Any:
        def call(values: list[Any]) -> Any:
            return graph(*values)

        call._boxed_call = True  # type: ignore[attr-defined]
        return call

    torch.compiler.reset()
    backend = aot_autograd(
        fw_compiler=keep,
        bw_compiler=run,
        partition_fn=min_cut_rematerialization_partition,
        decompositions=select_decomp_table(),
    )
    network, arguments = make_call(choice, 7)
    torch.compile(network, backend=backend, fullgraph=True)(*arguments)
    assert [list_shared_memory(graph) for graph in forward_graphs] == [[]]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("choice", "n"),
    [(CROSS, 7), ("differential", 4)],
    ids=str,
)
def test_compiled_gradients_equal_uncompiled_ones(choice: Any, n: int) -> None:
    torch.compiler.reset()
    network, (x, first_values, mask) = make_call(choice, n)
    direction = torch.randn(2, n, DIM, dtype=torch.double)
    parameters = dict(network.named_parameters())
    results = []
    for call in (network, torch.compile(network, fullgraph=True)):
        inputs = x.clone().requires_grad_()
        out = call(inputs, first_values, mask)
        gradients = torch.autograd.grad(
            (out * direction).sum(), [inputs, *parameters.values()], allow_unused=True
        )
        results.append([out, *gradients])
    for name, plain, compiled in zip(["out", "x", *parameters], *results, strict=True):
        assert (plain is None) == (compiled is None), name
        if plain is not None:
            torch.testing.assert_close(compiled, plain, rtol=1e-9, atol=1e-10, msg=name)
