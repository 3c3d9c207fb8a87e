"""What incremental decoding keeps of the tokens so far: one cache for every layer.

Shapes: B batch, n tokens of this call, m tokens kept, H heads, H' key heads, M keys for every
token, D head width.

A new token attends to what the cache holds and to itself. Of a token gone by, later ones need the
keys, the value, z, and its composition map as a key. Its query, its map as a query and its residual
part, which takes the token's own value, concern nobody else.
"""

import torch
from torch import Tensor

from lit_attn.attention.compose import Maps


class Cache:
    """A layer's past: `seen` tokens have gone through it, the last `kept` of them lie here."""

    def __init__(self) -> None:
        self.seen = 0
        self.kept = 0

    @property
    def first(self) -> int:
        """Position of the first token kept."""
        return self.seen - self.kept

    def advance(self, n: int) -> None:
        """Count `n` tokens, once the layer is through with them."""
        self.seen += n

    def tensors(self) -> list[Tensor]:
        """All that is held."""
        raise NotImplementedError


class KeyValues(Cache):
    """Of every token that a later one may see: all of them, or the last `window` - 1.

    Keys (B, H', M, m, D) are normalised and turned by position, but no features yet; values are
    (B, H', m, D), those of key heads too; z is (B, H, m, D), maps as in `compose`.
    """

    def __init__(self, window: int | None) -> None:
        super().__init__()
        self.most = None if window is None else window - 1
        self.held: dict[str, Tensor] = {}

    def extend(self, name: str, new: Tensor, axis: int = -2) -> Tensor:
        """What is held as `name`, then `new`, along the axis of tokens."""
        held = self.held.get(name)
        whole = new if held is None else torch.cat([held, new], axis)
        spare = 0 if self.most is None else max(0, whole.shape[axis] - self.most)
        # A view would keep the memory of what it leaves out.
        rest = whole.narrow(axis, spare, whole.shape[axis] - spare)
        self.held[name] = rest.clone() if spare else whole
        return whole

    def extend_maps(self, place: str, new: Maps) -> Maps:
        """The same of the key-wise maps at `place`."""
        return Maps(
            *(
                None if part is None else self.extend(f"{place} {name}", part, axis=1)
                for name, part in new._asdict().items()
            )
        )

    def advance(self, n: int) -> None:
        super().advance(n)
        self.kept = self.seen if self.most is None else min(self.seen, self.most)

    def tensors(self) -> list[Tensor]:
        return list(self.held.values())


class RunningSums(Cache):
    """Of linear keys: sum_j phi(k_j) v_j (B, H, D, D) and sum_j phi(k_j) (B, H, 1, D), no more."""

    def __init__(self) -> None:
        super().__init__()
        self.products: Tensor | None = None
        self.keys: Tensor | None = None

    def add(self, k: Tensor, v: Tensor) -> None:
        """Add tokens, k and v (B, H, n, D)."""
        products, keys = k.transpose(-1, -2) @ v, k.sum(-2, keepdim=True)
        self.products = products if self.products is None else self.products + products
        self.keys = keys if self.keys is None else self.keys + keys

    def tensors(self) -> list[Tensor]:
        return [part for part in (self.products, self.keys) if part is not None]
