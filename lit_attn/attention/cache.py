"""Caches of incremental decoding: what a layer keeps of the tokens before.

Shapes: B batch, n tokens of this call, m cached tokens, H heads, H' key heads, M keys for every
token, D head width.

A new token attends to the cached tokens and to itself. Of a cached token, it needs the keys, the
value, z and the composition map as a key. It does not need the query, the map as a query or the
residual part, which takes the token's own value.
"""

from typing import Any

import torch
from torch import Tensor


class Cache:
    """Base of the caches: `seen` tokens have passed the layer, the last `kept` are stored."""

    def __init__(self) -> None:
        self.seen = 0
        self.kept = 0

    @property
    def first(self) -> int:
        """Position of the first stored token."""
        return self.seen - self.kept

    def advance(self, n: int) -> None:
        """Count `n` tokens, after the layer has processed them."""
        self.seen += n

    def tensors(self) -> list[Tensor]:
        """Return all stored tensors."""
        raise NotImplementedError


class KeyValues(Cache):
    """Key/value cache of the tokens that later tokens can see: all, or the last `window` - 1.

    Keys (B, H', M, m, D) are stored after their norm and rotation, before `features`; values are
    (B, H', m, D), z is (B, H, m, D), maps are as in lit_attn.attention.compose.
    """

    def __init__(self, window: int | None) -> None:
        super().__init__()
        self.limit = None if window is None else window - 1
        self.stored: dict[str, Tensor] = {}

    def extend(self, name: str, new: Tensor, axis: int = -2) -> Tensor:
        """Append `new` to the stored tensor `name` along the token axis and return the result."""
        stored = self.stored.get(name)
        joined = new if stored is None else torch.cat([stored, new], axis)
        excess = 0 if self.limit is None else max(0, joined.shape[axis] - self.limit)
        rest = joined.narrow(axis, excess, joined.shape[axis] - excess)
        # A view would keep the memory of the tokens that it leaves out.
        self.stored[name] = rest.clone() if excess else joined
        return joined

    def extend_maps(self, place: str, new: Any) -> Any:
        """Append the maps of keys at `place`, a NamedTuple, and return the maps of all keys."""
        return new._make(
            None if part is None else self.extend(f"{place} {name}", part, axis=1)
            for name, part in new._asdict().items()
        )

    def advance(self, n: int) -> None:
        super().advance(n)
        self.kept = self.seen if self.limit is None else min(self.seen, self.limit)

    def tensors(self) -> list[Tensor]:
        return list(self.stored.values())


class RunningSums(Cache):
    """Cache of linear attention: sum_j phi(k_j) v_j^T (B, H, D, D), sum_j phi(k_j) (B, H, 1, D)."""

    def __init__(self) -> None:
        super().__init__()
        self.products: Tensor | None = None
        self.keys: Tensor | None = None

    def add(self, k: Tensor, v: Tensor) -> None:
        """Add the tokens of k and v (B, H, n, D)."""
        products, keys = k.transpose(-1, -2) @ v, k.sum(-2, keepdim=True)
        self.products = products if self.products is None else self.products + products
        self.keys = keys if self.keys is None else self.keys + keys

    def tensors(self) -> list[Tensor]:
        return [part for part in (self.products, self.keys) if part is not None]
