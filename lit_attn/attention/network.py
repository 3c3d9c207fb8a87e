"""Places of the attention layers of a network: their numbers, and the channel to the first one."""

from collections.abc import Sequence

from torch import nn

from lit_attn.attention.first_values import FirstValues
from lit_attn.attention.layer import Attention, TokenLayer


def number_layers(network: nn.Module) -> None:
    """Give every layer of `network` its number, in the order of the network's modules.

    Layers that mix the values of the first layer with their own are connected to it.
    """
    layers = [module for module in network.modules() if isinstance(module, TokenLayer)]
    for number, layer in enumerate(layers):
        layer.set_depth(number)
    connect_first_values(layers)


def connect_first_values(layers: Sequence[TokenLayer]) -> None:
    """Bring the values of the first of `layers` to those that mix them with their own.

    Raises ValueError, which begins with `values`, if these layers differ in the sizes of values.
    """
    attentions = [layer for layer in layers if isinstance(layer, Attention)]
    readers = [layer for layer in attentions if layer.spec.values.reads_first]
    if not readers:
        return
    first = layers[0]
    if not isinstance(first, Attention):
        raise ValueError("values: the first layer is of `kind: module` and has no values")
    channel = FirstValues()
    for layer in [first, *readers]:
        if (layer.key_heads, layer.head_dim) != (first.key_heads, first.head_dim):
            raise ValueError(
                f"values: a layer has {layer.key_heads} key heads of width {layer.head_dim}, and "
                f"the first layer {first.key_heads} of width {first.head_dim}; "
                "only values of equal sizes can be mixed"
            )
        layer.first_values = channel
