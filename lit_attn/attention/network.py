"""Places of the attention layers of a network: their numbers, and the channels between them."""

from collections.abc import Sequence

from torch import nn

from lit_attn.attention.first_values import FirstValues
from lit_attn.attention.layer import Attention, TokenLayer
from lit_attn.attention.shared_keys import SharedKeys
from lit_attn.attention.spec import check_shared_keys


def number_layers(network: nn.Module) -> None:
    """Give every layer of `network` its number, in the order of the network's modules.

    Layers that read values or keys of an earlier layer are connected to it.
    """
    layers = [module for module in network.modules() if isinstance(module, TokenLayer)]
    for number, layer in enumerate(layers):
        layer.set_depth(number)
    connect_layers(layers)


def connect_layers(layers: Sequence[TokenLayer]) -> None:
    """Connect `layers`, in the order of their network, by the channels that some of them read."""
    connect_first_values(layers)
    connect_shared_keys(layers)


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


def connect_shared_keys(layers: Sequence[TokenLayer]) -> None:
    """Bring the keys and values of layers to the layers after them that share these.

    Raises ValueError, which begins with a key, if a layer cannot have those of the layer before it.
    """
    if not any(layer.spec.shares_keys for layer in layers):
        return
    check_shared_keys([layer.spec for layer in layers])
    source: Attention | None = None
    for layer in layers:
        if not isinstance(layer, Attention):
            continue
        if not layer.spec.shares_keys:
            source = layer
            continue
        assert source is not None
        if layer.head_dim != source.head_dim:
            raise ValueError(
                f"kv_from: a layer with heads of width {layer.head_dim} cannot have the keys of "
                f"a layer with heads of width {source.head_dim}"
            )
        if source.shared_keys is None:
            source.shared_keys = SharedKeys()
        layer.shared_keys = source.shared_keys
