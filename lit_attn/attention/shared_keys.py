"""Keys and values that several layers of a network share (cross-layer attention).

Brandon et al. 2024, "Reducing Transformer Key-Value Cache Size with Cross-Layer Attention",
https://arxiv.org/abs/2405.12981, section 2.2: a layer with `kv_from: previous` projects queries
alone, and attends to the keys and values of the nearest layer before it that computes its own.

Shapes: B batch, m tokens (the cached tokens, and then those of the call), H' key heads, D head
width.
"""

from typing import NamedTuple

from torch import Tensor

from lit_attn.attention.cache import Cache, KeyValues
from lit_attn.attention.channel import Channel


class KeysValues(NamedTuple):
    """Keys (B, H', 1, m, D) after their norm and rotation, and values (B, H', m, D)."""

    keys: Tensor
    values: Tensor


class SharedKeys(Channel):
    """Channel that brings the keys and values of a layer to the layers that share them."""

    key = "kv_from"
    source = "layer with the shared keys"
    content = "keys and values"

    def read(self) -> KeysValues:
        """Return the keys and values of the running forward pass, with those in the cache."""
        return KeysValues(*self.take())


def extend_cache(new: KeysValues, cache: Cache | None) -> KeysValues:
    """Append the keys and values of a call to a cache, and return those of all tokens."""
    if cache is None:
        return new
    assert isinstance(cache, KeyValues)
    keys = cache.extend("keys", new.keys)
    return KeysValues(keys, cache.extend("values", new.values))
