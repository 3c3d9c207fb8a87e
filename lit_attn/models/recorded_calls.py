"""Record of how a network calls its layers of one class."""

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

from torch import nn

Layer = TypeVar("Layer", bound=nn.Module)
Call = TypeVar("Call")


@contextmanager
def recorded_calls(
    network: nn.Module,
    layer_class: type[Layer],
    describe: Callable[[Layer, Mapping[str, Any]], Call],
) -> Iterator[list[Call]]:
    """Record the calls of the layers of `layer_class` in this context, in their order.

    `describe` makes the entry of a call from the layer and the arguments of its forward pass by
    name; arguments with default values may be missing.
    """
    calls: list[Call] = []

    def record(layer: Any, positional: tuple[Any, ...], named: dict[str, Any]) -> None:
        arguments = inspect.signature(layer.forward).bind(*positional, **named).arguments
        calls.append(describe(layer, arguments))

    handles = [
        module.register_forward_pre_hook(record, with_kwargs=True)
        for module in network.modules()
        if isinstance(module, layer_class)
    ]
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()
