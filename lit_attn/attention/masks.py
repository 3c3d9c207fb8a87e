"""Masks: which query may attend to which key, for all queries or for a chunk.

Shapes: B batch, n keys, H heads, c queries of a chunk, m keys that they can see.
"""

import functools
from typing import NamedTuple

import torch
from torch import Tensor

# Number of queries in a chunk where logits are formed.
CHUNK = 128


class Masks(NamedTuple):
    """All masks of one call; `attn_mask` is a mask of scaled-dot-product attention.

    `window`: a query sees the keys at a distance below it. `without_self`: no token attends to
    itself. `offset` is the number of cached keys before the first query's own key, so there are
    n - offset queries. In cross-attention (`is_cross`) queries have no keys of their own.
    """

    attn_mask: Tensor | None
    is_causal: bool
    window: int | None
    without_self: bool
    offset: int = 0
    is_cross: bool = False

    @property
    def is_causal_only(self) -> bool:
        """True in self-attention if the causal mask, if any, is the only mask."""
        is_masked = self.attn_mask is not None or self.window is not None
        return not (is_masked or self.without_self or self.offset or self.is_cross)

    def chunk(self, rows: slice, columns: slice, n: int, device: torch.device) -> Tensor | None:
        """Return (B, H, c, m) or smaller, True where a query of `rows` may attend to a key.

        The keys are those of `columns`. None means that every query may attend to every key.
        """
        first, last = rows.start + self.offset, rows.stop + self.offset
        is_near = self.window is None or first - columns.start < self.window
        if first == n - 1 and is_near and not self.without_self and self.attn_mask is None:
            # The last token alone can attend to all keys of its window.
            return None
        i = torch.arange(first, last, device=device).unsqueeze(1)
        j = torch.arange(columns.start, columns.stop, device=device)
        conditions = [i >= j] if self.is_causal else []
        if self.window is not None:
            conditions.append((i - j).abs() < self.window)
        if self.without_self:
            conditions.append(i != j)
        if self.attn_mask is not None and self.attn_mask.dtype == torch.bool:
            conditions.append(_cut(self.attn_mask, rows, columns, n))
        return functools.reduce(torch.logical_and, conditions) if conditions else None

    def present_queries(self, rows: slice) -> Tensor | None:
        """Return (B, H, c, 1) or smaller, False where a query of `rows` is padding.

        A boolean mask with one row for all queries is a padding mask: it says which tokens exist.
        None means that no token is known to be padding.
        """
        mask = None if self.is_cross else self.attn_mask
        if mask is None or mask.dtype != torch.bool or mask.ndim < 2 or mask.shape[-2] != 1:
            return None
        return mask if mask.shape[-1] == 1 else mask.transpose(-1, -2)[..., rows, :]

    def bias(self, rows: slice, columns: slice, n: int) -> Tensor | None:
        """Return the additive mask of a chunk, or None."""
        if self.attn_mask is None or self.attn_mask.dtype == torch.bool:
            return None
        return _cut(self.attn_mask, rows, columns, n)

    def visible(self, rows: slice, n: int) -> slice:
        """Return the smallest slice of keys with all keys that the queries of `rows` can see."""
        first, last = rows.start + self.offset, rows.stop + self.offset
        start = 0 if self.window is None else max(0, first - self.window + 1)
        stop = n if self.window is None else min(n, last + self.window - 1)
        return slice(start, min(stop, last) if self.is_causal else stop)

    def combined(self, rows: slice, columns: slice, n: int, device: torch.device) -> Tensor | None:
        """Return the boolean and the additive mask of a chunk as one: (..., c, m), or None."""
        visible = self.chunk(rows, columns, n, device)
        bias = self.bias(rows, columns, n)
        if bias is None or visible is None:
            return visible if bias is None else bias
        return bias.masked_fill(~visible, float("-inf"))


def in_chunks(n: int, size: int) -> list[slice]:
    """Return slices of at most `size` that cover 0 to n."""
    return [slice(start, min(start + size, n)) for start in range(0, n, size)]


def _cut(mask: Tensor, rows: slice, columns: slice, n: int) -> Tensor:
    """Return the rows and columns of a mask that is broadcastable to (B, H, queries, n)."""
    if mask.shape[-1] == n:
        mask = mask[..., columns]
    return mask[..., rows, :] if mask.ndim > 1 and mask.shape[-2] > 1 else mask
