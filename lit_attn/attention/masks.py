"""Who may attend to whom, as a whole or for a chunk of queries.

Shapes: B batch, n keys, H heads, c queries of a chunk, m keys that they can see.
"""

from typing import NamedTuple

import torch
from torch import Tensor

# Queries handled at a time where logits have to be formed.
CHUNK = 128


class Masks(NamedTuple):
    """Who may attend to whom; `attn_mask` as scaled-dot-product attention takes it.

    `offset` keys stand before the first query's own: 0 but where the keys of earlier tokens are
    cached. There are n - offset queries.
    """

    attn_mask: Tensor | None
    is_causal: bool
    window: int | None
    without_self: bool
    offset: int = 0

    @property
    def only_causal(self) -> bool:
        """Whether nothing is hidden but, where it `is_causal`, what follows."""
        return (
            self.attn_mask is None
            and self.window is None
            and not self.without_self
            and not self.offset
        )

    def chunk(self, rows: slice, columns: slice, n: int, device: torch.device) -> Tensor | None:
        """True where a query of `rows` may see a key of `columns`; broadcasts to (B, H, c, m)."""
        first, last = rows.start + self.offset, rows.stop + self.offset
        i = torch.arange(first, last, device=device).unsqueeze(1)
        j = torch.arange(columns.start, columns.stop, device=device)
        seen = None
        if self.is_causal:
            seen = i >= j
        if self.window is not None:
            near = (i - j).abs() < self.window
            seen = near if seen is None else seen & near
        if self.without_self:
            seen = i != j if seen is None else seen & (i != j)
        if self.attn_mask is not None and self.attn_mask.dtype == torch.bool:
            given = _cut(self.attn_mask, rows, columns, n)
            seen = given if seen is None else seen & given
        return seen

    def bias(self, rows: slice, columns: slice, n: int) -> Tensor | None:
        """What is added to the logits of a chunk."""
        if self.attn_mask is None or self.attn_mask.dtype == torch.bool:
            return None
        return _cut(self.attn_mask, rows, columns, n)

    def visible(self, rows: slice, n: int) -> slice:
        """The keys that some query of `rows` can see: nothing outside is computed."""
        first, last = rows.start + self.offset, rows.stop + self.offset
        start = 0 if self.window is None else max(0, first - self.window + 1)
        stop = n if self.window is None else min(n, last + self.window - 1)
        return slice(start, min(stop, last) if self.is_causal else stop)

    def whole(self, n: int, device: torch.device) -> Tensor | None:
        """The mask of one call, (..., n - offset, n), boolean or additive; None: all see all."""
        rows, columns = slice(0, n - self.offset), slice(0, n)
        seen = self.chunk(rows, columns, n, device)
        bias = self.bias(rows, columns, n)
        if bias is None or seen is None:
            return seen if bias is None else bias
        return bias.masked_fill(~seen, float("-inf"))


def in_chunks(n: int, size: int) -> list[slice]:
    """0..n in runs of `size`, the last one shorter where it has to be."""
    return [slice(start, min(start + size, n)) for start in range(0, n, size)]


def _cut(mask: Tensor, rows: slice, columns: slice, n: int) -> Tensor:
    """The part of a mask that is broadcastable to (B, H, n, n)."""
    if mask.shape[-1] == n:
        mask = mask[..., columns]
    return mask[..., rows, :] if mask.ndim > 1 and mask.shape[-2] == n else mask
