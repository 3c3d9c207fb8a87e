"""The inputs of a network's attention layers, recorded from one forward pass.

Shapes: B batch, n tokens, d width, H heads.
"""

import inspect
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lit_attn.attention.layer import Attention

MAX_WEIGHTS = 2**25
"""Attention weights computed at once, over samples, heads and keys (0.25 GiB in float64)."""


class LayerCall(NamedTuple):
    """One call of a layer: its arguments, and the residual stream that its output is added to.

    The stream has shape (B, n, d).
    """

    arguments: dict[str, Any]
    stream: Tensor


def record_calls(
    network: nn.Module, layers: list[Attention], inputs: tuple[Any, ...]
) -> list[list[LayerCall]]:
    """Run `network` on `inputs` in evaluation mode and return the calls of each layer."""
    calls: list[list[LayerCall]] = [[] for _ in layers]
    block_inputs: dict[nn.Module, Tensor] = {}
    names = {module: name for name, module in network.named_modules()}

    def record_block(block: nn.Module, arguments: tuple[Any, ...]) -> None:
        if arguments and isinstance(arguments[0], Tensor):
            block_inputs[block] = arguments[0]

    def record_layer(
        layer_calls: list[LayerCall],
        block: nn.Module,
        layer: nn.Module,
        positional: tuple[Any, ...],
        keywords: Any,
    ) -> None:
        arguments = inspect.signature(layer.forward).bind(*positional, **keywords).arguments
        arguments.pop("cache", None)
        x = arguments["x"]
        stream = block_inputs.get(block, x)
        layer_calls.append(LayerCall(arguments, stream if stream.shape == x.shape else x))

    with ExitStack() as stack:
        for layer, layer_calls in zip(layers, calls, strict=True):
            # The input of the block is the residual stream: it is x before the block's norm.
            block = network.get_submodule(names[layer].rpartition(".")[0])
            record = partial(record_layer, layer_calls, block)
            hooks = [
                block.register_forward_pre_hook(record_block),
                layer.register_forward_pre_hook(record, with_kwargs=True),
            ]
            for hook in hooks:
                stack.callback(hook.remove)
        # Compiled code only calls the hooks that existed when it was compiled.
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(_evaluation_mode(network))
        network(*inputs)
    return calls


@contextmanager
def _evaluation_mode(network: nn.Module) -> Iterator[None]:
    training = [module for module in network.modules() if module.training]
    network.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def split_calls(layer: Attention, calls: list[LayerCall]) -> Iterator[tuple[LayerCall, Tensor]]:
    """Split `calls` into float64 calls whose weights fit in memory.

    Yields each call with a boolean (B, n) that is True for tokens that are not padding.
    """
    for call in calls:
        x = call.arguments["x"]
        batch, n = x.shape[:2]
        keys = getattr(layer.spec.similarity, "keys", 1)
        size = max(1, MAX_WEIGHTS // (layer.num_heads * keys * n * n))
        for start in range(0, batch, size):
            part = slice(start, start + size)
            arguments = call.arguments | {"x": x[part].double()}
            if (mask := arguments.get("attn_mask")) is not None:
                mask = mask[part] if mask.ndim == 4 and mask.shape[0] == batch else mask
                arguments["attn_mask"] = mask.double() if mask.is_floating_point() else mask
            yield LayerCall(arguments, call.stream[part].double()), _attended_tokens(arguments)


def _attended_tokens(arguments: dict[str, Any]) -> Tensor:
    """Return a boolean (B, n) that is True for tokens that some token attends to."""
    x, mask = arguments["x"], arguments.get("attn_mask")
    attended = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device)
    if mask is None or mask.dtype != torch.bool:
        return attended
    full_mask = mask.reshape((1,) * (4 - mask.ndim) + mask.shape)
    return attended & full_mask.any(2).any(1)
