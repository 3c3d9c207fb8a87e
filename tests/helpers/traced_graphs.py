"""Graphs of forward and backward passes that torch.compile traces, and computes uncompiled."""

from typing import Any

import torch
from torch import Tensor, fx
from torch._decomp import get_decompositions
from torch._dynamo.backends.common import aot_autograd


class TracedGraphs:
    """Backend of torch.compile that keeps the graphs of forward and backward passes."""

    def __init__(self) -> None:
        self.forward: list[fx.GraphModule] = []
        self.backward: list[fx.GraphModule] = []
        self.compile = aot_autograd(
            fw_compiler=self._keep_forward,
            bw_compiler=self._keep_backward,
            decompositions=get_decompositions([torch.ops.aten.elu_backward]),
        )

    def _keep_forward(self, graph: fx.GraphModule, inputs: Any) -> Any:
        self.forward.append(graph)
        return _boxed(graph)

    def _keep_backward(self, graph: fx.GraphModule, inputs: Any) -> Any:
        self.backward.append(graph)
        compute = _boxed(graph)

        def call(inputs: list[Any]) -> Any:
            # PyTorch 2.11 computes the gradient of a score function's tensors only if they ask
            # for one, which tensors that a compiled forward pass has saved do not.
            return compute([_ask_for_gradient(value) for value in inputs])

        call._boxed_call = True  # type: ignore[attr-defined]
        return call

    def score_gradients(self) -> list[fx.GraphModule]:
        """Return the gradients of the score functions in all backward graphs."""
        gradients = []
        for graph in self.backward:
            for name, module in graph.named_children():
                if name.startswith("joint_graph"):
                    assert isinstance(module, fx.GraphModule)
                    gradients.append(module)
        return gradients

    def sizes_in_score_gradients(self) -> list[str]:
        """Return the operators in gradients of score functions that ask for a size."""
        targets = [
            str(node.target) for graph in self.score_gradients() for node in graph.graph.nodes
        ]
        return [target for target in targets if "sym_size" in target]


def _boxed(graph: fx.GraphModule) -> Any:
    def call(inputs: list[Any]) -> Any:
        return graph(*inputs)

    call._boxed_call = True  # type: ignore[attr-defined]
    return call


def _ask_for_gradient(value: Any) -> Any:
    """Return floating-point tensors as leaves that require a gradient, and other values as is."""
    if isinstance(value, Tensor) and value.is_floating_point():
        return value.detach().requires_grad_()
    return value
