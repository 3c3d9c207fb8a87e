"""What the attention layers of a network are called with.

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

# Attention weights formed at once, over samples, heads and keys: a quarter of a gigabyte.
AT_ONCE = 2**25


class Call(NamedTuple):
    """What a layer was called with, and what its output is added to, (B, n, d)."""

    arguments: dict[str, Any]
    stream: Tensor


def calls_of(
    network: nn.Module, layers: list[Attention], inputs: tuple[Any, ...]
) -> list[list[Call]]:
    """What every layer is called with as `network` computes `inputs`."""
    calls: list[list[Call]] = [[] for _ in layers]
    entered: dict[nn.Module, Tensor] = {}
    names = {module: name for name, module in network.named_modules()}

    def enter(block: nn.Module, arguments: tuple[Any, ...]) -> None:
        if arguments and isinstance(arguments[0], Tensor):
            entered[block] = arguments[0]

    def arrive(
        own: list[Call], block: nn.Module, layer: nn.Module, given: tuple[Any, ...], named: Any
    ) -> None:
        arguments = inspect.signature(layer.forward).bind(*given, **named).arguments
        arguments.pop("cache", None)
        x = arguments["x"]
        stream = entered.get(block, x)
        own.append(Call(arguments, stream if stream.shape == x.shape else x))

    with ExitStack() as stack:
        for layer, own in zip(layers, calls, strict=True):
            # What enters the block goes around the layer: x itself, before its norm.
            block = network.get_submodule(names[layer].rpartition(".")[0])
            hooks = [
                block.register_forward_pre_hook(enter),
                layer.register_forward_pre_hook(partial(arrive, own, block), with_kwargs=True),
            ]
            for hook in hooks:
                stack.callback(hook.remove)
        # Compiled code calls no hook that it was not compiled with.
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(_evaluating(network))
        network(*inputs)
    return calls


@contextmanager
def _evaluating(network: nn.Module) -> Iterator[None]:
    training = [module for module in network.modules() if module.training]
    network.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def in_parts(layer: Attention, calls: list[Call]) -> Iterator[tuple[Call, Tensor]]:
    """Calls in float64 of as many samples as fit, and which of their tokens are there, (B, n)."""
    for call in calls:
        x = call.arguments["x"]
        batch, n = x.shape[:2]
        keys = getattr(layer.spec.similarity, "keys", 1)
        size = max(1, AT_ONCE // (layer.num_heads * keys * n * n))
        for start in range(0, batch, size):
            part = slice(start, start + size)
            arguments = call.arguments | {"x": x[part].double()}
            if (mask := arguments.get("attn_mask")) is not None:
                mask = mask[part] if mask.ndim == 4 and mask.shape[0] == batch else mask
                arguments["attn_mask"] = mask.double() if mask.is_floating_point() else mask
            yield Call(arguments, call.stream[part].double()), _present(arguments)


def _present(arguments: dict[str, Any]) -> Tensor:
    """True where a token is attended to by some token, (B, n)."""
    x, mask = arguments["x"], arguments.get("attn_mask")
    present = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device)
    if mask is None or mask.dtype != torch.bool:
        return present
    whole = mask.reshape((1,) * (4 - mask.ndim) + mask.shape)
    return present & whole.any(2).any(1)
