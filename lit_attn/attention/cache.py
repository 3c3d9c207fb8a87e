"""Caches of incremental decoding: what a layer stores of earlier tokens.

Shapes: B batch, n tokens of this call, m cached tokens, H heads, H' key heads, M keys for every
token, D head width, E width of the features.

A new token attends to the cached tokens and to itself. It needs the keys, the value,
z and the composition map as a key of a cached token, but not the query, the map as a query or the
residual part, which takes the token's own value.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

# Tokens for which a growing buffer has spare memory, so that most new tokens need no copy.
SPARE = 64


class Cache(ABC):
    """Base of the caches: `position` tokens have passed the layer, the last `length` are stored."""

    def __init__(self) -> None:
        self.position = 0
        self.length = 0
        # Sums over all earlier tokens by name, with the batch first; they need no window.
        self.totals: dict[str, Tensor] = {}

    def total_of_keys(self, name: str, new_tokens: int, further: int = 0) -> Tensor | None:
        """Return the total `name`, whose last axis has an entry for each key, for a call.

        Entries of tokens that are not stored any more are left out, but for the last `further` of
        them, and `new_tokens` zeros follow. None means that there is no such total yet.
        """
        total = self.totals.get(name)
        if total is None:
            return None
        first = max(0, total.shape[-1] - self.length - further)
        return F.pad(total[..., first:], (0, new_tokens))

    def advance(self, n: int) -> None:
        """Count `n` tokens, after the layer has processed them."""
        self.position += n

    @abstractmethod
    def tensors(self) -> list[Tensor]:
        """Return all stored tensors."""

    def select(self, rows: Tensor) -> None:
        """Replace the batch by its `rows` (B,), in place: the beams that a search continues."""
        for tensor in self.tensors():
            tensor.copy_(tensor[rows])


def count_bytes(caches: Iterable[Cache]) -> int:
    """Return the bytes that `caches` store of each sequence of their batch.

    Spare memory for later tokens does not count.
    """
    total = 0
    for cache in caches:
        for tensor in cache.tensors():
            total += tensor.element_size() * tensor[0].numel()
    return total


class Buffer:
    """Tensor with the tokens `start` to `stop` along `axis`, and spare memory after them."""

    def __init__(self, axis: int) -> None:
        self.axis = axis
        self.start = self.stop = 0
        self.tensor: Tensor | None = None

    @property
    def tokens(self) -> Tensor:
        """View of the stored tokens."""
        assert self.tensor is not None
        return self.tensor.narrow(self.axis, self.start, self.stop - self.start)

    def append(self, new: Tensor) -> Tensor:
        """Append the tokens of `new` and return a view of all tokens."""
        n = new.shape[self.axis]
        if self.tensor is None:
            self.tensor = new
        elif new.requires_grad or self.tensor.requires_grad:
            # Autograd does not allow that a tensor changes after its use.
            self.tensor = torch.cat([self.tokens, new], self.axis)
            self.start, self.stop = 0, self.stop - self.start
        else:
            is_frozen = self.tensor.is_inference() and not torch.is_inference_mode_enabled()
            if is_frozen or self.stop + n > self.tensor.shape[self.axis]:
                self._reallocate(n + SPARE)
            self.tensor.narrow(self.axis, self.stop, n).copy_(new)
        self.stop += n
        return self.tokens

    def drop(self, limit: int) -> None:
        """Remove all tokens but the last `limit`."""
        self.start = max(self.start, self.stop - limit)
        if self.start > SPARE:
            self._reallocate(SPARE)

    def _reallocate(self, spare: int) -> None:
        """Copy the tokens into a new tensor with memory for `spare` more."""
        tokens = self.tokens
        shape = list(tokens.shape)
        shape[self.axis] += spare
        # Maps of tokens (axis 1) have their tokens last in memory: lit_attn.attention.compose.
        if self.axis == 1:
            shape.append(shape.pop(1))
            self.tensor = tokens.new_empty(shape).movedim(-1, 1)
        else:
            self.tensor = tokens.new_empty(shape)
        self.start, self.stop = 0, tokens.shape[self.axis]
        self.tokens.copy_(tokens)


class KeyValues(Cache):
    """Key/value cache of the tokens that later tokens can see: all, or the last `window` - 1.

    Keys are stored after their norm and rotation: as features joined with z, (B, H, M, m, E), or
    without features and z, (B, H', M, m, D), if heads share them. Values are (B, H', m, D), z of
    shared keys is (B, H, m, D), maps are as in lit_attn.attention.compose.
    """

    def __init__(self, window: int | None) -> None:
        super().__init__()
        self.limit = None if window is None else window - 1
        self.buffers: dict[str, Buffer] = {}

    def extend(self, name: str, new: Tensor, axis: int = -2) -> Tensor:
        """Append `new` to the stored tensor `name` along the token axis and return the result."""
        return self.buffers.setdefault(name, Buffer(axis)).append(new)

    def extend_maps(self, place: str, new: Any) -> Any:
        """Append the maps of keys at `place`, a NamedTuple, and return the maps of all keys."""
        extended = {}
        for name, part in new._asdict().items():
            if part is not None:
                extended[name] = self.extend(f"{place} {name}", part, axis=1)
        return new._replace(**extended)

    def advance(self, n: int) -> None:
        super().advance(n)
        self.length = self.position
        if self.limit is not None:
            self.length = min(self.position, self.limit)
            for buffer in self.buffers.values():
                buffer.drop(self.limit)

    def tensors(self) -> list[Tensor]:
        tokens = [buffer.tokens for buffer in self.buffers.values()]
        return tokens + list(self.totals.values())


class RunningSums(Cache):
    """Cache of linear attention: sum_j phi(k_j) v_j^T (B, H, E, D), sum_j phi(k_j) (B, H, 1, E)."""

    def __init__(self) -> None:
        super().__init__()
        self.products: Tensor | None = None
        self.keys: Tensor | None = None

    def add(self, k: Tensor, v: Tensor) -> None:
        """Add the tokens of the features k (B, H, n, E) and of v (B, H, n, D)."""
        products = k.transpose(-1, -2) @ v
        keys = k.sum(-2, keepdim=True)
        self.products = products if self.products is None else self.products + products
        self.keys = keys if self.keys is None else self.keys + keys

    def tensors(self) -> list[Tensor]:
        sums = [part for part in (self.products, self.keys) if part is not None]
        return sums + list(self.totals.values())
