"""Masks: which query may attend to which key, for all queries or for a chunk.

Shapes: B batch, n keys, H heads, c queries of a chunk, m keys that they can see.
"""

import functools
from typing import NamedTuple

import torch
from torch import Tensor

# Number of queries in a chunk where logits are formed.
CHUNK = 128

# Largest value of an additive mask that hides its key: half of float16's lowest finite number.
# Masks hide keys by -inf, by the lowest finite number of their precision, or by -1e9. A mask can be
# converted to another precision, and a position bias can be added to it; half of the lowest number
# of the narrowest precision is above all of these sums. Values above it, such as -1e4, are biases.
HIDES_FROM = torch.finfo(torch.float16).min / 2


class TokenTerms(NamedTuple):
    """Bias of pairs of tokens that is a sum of a term of the query and a term of the key.

    `of_queries` (B or 1, H, queries) and `of_keys` (B or 1, H, n) are in float32 or wider.
    """

    of_queries: Tensor
    of_keys: Tensor


class Masks(NamedTuple):
    """All masks of one call.

    `visibility` is boolean, True where a query may attend to a key, and `bias` is finite and is
    added to the logits; both are broadcastable to (B, H, queries, n), and None if there is none.
    `split_mask` makes them from a mask of scaled-dot-product attention. `window`: a query sees the
    keys at a distance below it. `without_self`: no token attends to itself. `offset` is the number
    of cached keys before the first query's own key, so there are n - offset queries. In
    cross-attention (`is_cross`) queries have no keys of their own. `terms` are a further bias of
    the pairs that are visible, without a tensor of all pairs.
    """

    visibility: Tensor | None
    bias: Tensor | None
    is_causal: bool
    window: int | None
    without_self: bool
    offset: int = 0
    is_cross: bool = False
    terms: TokenTerms | None = None

    @property
    def is_causal_only(self) -> bool:
        """True in self-attention if the causal mask, if any, is the only mask."""
        return (
            self.visibility is None
            and self.bias is None
            and self.window is None
            and not self.without_self
            and not self.offset
            and not self.is_cross
        )

    def chunk(self, rows: slice, columns: slice, n: int, device: torch.device) -> Tensor | None:
        """Return (B, H, c, m) or smaller, True where a query of `rows` may attend to a key.

        The keys are those of `columns`. None means that every query may attend to every key.
        """
        first, last = rows.start + self.offset, rows.stop + self.offset
        is_ordered = self.is_causal or self.window is not None
        if is_ordered and first == n - 1:
            # The last token alone can attend to all keys of its window.
            is_near = self.window is None or first - columns.start < self.window
            is_ordered = not is_near
        conditions = []
        if is_ordered or self.without_self:
            i = torch.arange(first, last, device=device).unsqueeze(1)
            j = torch.arange(columns.start, columns.stop, device=device)
            if is_ordered and self.is_causal:
                conditions.append(i >= j)
            if is_ordered and self.window is not None:
                conditions.append((i - j).abs() < self.window)
            if self.without_self:
                conditions.append(i != j)
        if self.visibility is not None:
            conditions.append(_cut(self.visibility, rows, columns, n))
        if not conditions:
            return None
        return functools.reduce(torch.logical_and, conditions)

    def with_bias(self, bias: Tensor | None) -> "Masks":
        """Return the masks with a further bias, broadcastable to (B, H, queries, n), or None."""
        if bias is None:
            return self
        return self._replace(bias=bias if self.bias is None else self.bias + bias)

    def present_queries(self, rows: slice) -> Tensor | None:
        """Return (B, H, c, 1) or smaller, False where a query of `rows` is padding.

        A token of self-attention is padding if `visibility` hides it from all queries. None means
        that no token is known to be padding.
        """
        if self.is_cross or self.visibility is None or self.visibility.ndim < 2:
            return None
        present = self.visibility.any(-2).unsqueeze(-1)
        if present.shape[-2] == 1:
            return present
        return present[..., rows, :]

    def present_keys(self) -> Tensor | None:
        """Return (B, H, n) or smaller, False where a key is hidden from all queries, or None."""
        if self.visibility is None or self.visibility.ndim < 2:
            return None
        return self.visibility.any(-2)

    def present_tokens(self, queries: int) -> Tensor | None:
        """Return (B or 1, queries), False where a token of this call is padding, or None.

        A token is padding if it is hidden from all queries in every head.
        """
        present = self.present_keys()
        if present is None or self.is_cross:
            return None
        if present.ndim > 1:
            present = present.any(-2)
        return present.reshape(-1, present.shape[-1])[:, -queries:]

    def count_visible(self, queries: int, n: int, device: torch.device) -> Tensor:
        """Return how many keys each query sees, at least 1: (B, H, queries, 1) or smaller."""
        if self.visibility is None and not self.without_self:
            position = torch.arange(self.offset, self.offset + queries, device=device)
            first = torch.zeros_like(position)
            last = torch.full_like(position, n - 1)
            if self.window is not None:
                first = (position - self.window + 1).clamp_min(0)
                last = torch.minimum(last, position + self.window - 1)
            if self.is_causal:
                last = torch.minimum(last, position)
            return (last - first + 1).unsqueeze(-1)
        visible = self.chunk(slice(0, queries), slice(0, n), n, device)
        assert visible is not None
        shown = visible.expand(*visible.shape[:-1], n)
        return shown.sum(-1, keepdim=True).clamp_min(1)

    def bias_of_chunk(self, rows: slice, columns: slice, n: int) -> Tensor | None:
        """Return the finite bias of a chunk, or None."""
        bias = None if self.bias is None else _cut(self.bias, rows, columns, n)
        if self.terms is None:
            return bias
        of_queries = self.terms.of_queries[..., rows].unsqueeze(-1)
        of_pairs = of_queries + self.terms.of_keys[..., columns].unsqueeze(-2)
        return of_pairs if bias is None else bias + of_pairs

    def visible(self, rows: slice, n: int) -> slice:
        """Return the smallest slice of keys with all keys that the queries of `rows` can see."""
        first, last = rows.start + self.offset, rows.stop + self.offset
        start = 0
        stop = n
        if self.window is not None:
            start = max(0, first - self.window + 1)
            stop = min(n, last + self.window - 1)
        if self.is_causal:
            stop = min(stop, last)
        return slice(start, stop)

    def combined(
        self, rows: slice, columns: slice, n: int, device: torch.device, dtype: torch.dtype
    ) -> Tensor | None:
        """Return all masks of a chunk as one mask of scaled-dot-product attention, or None.

        The mask is boolean or additive, (..., c, m). `dtype` is the precision of the queries: on a
        CPU torch accepts an additive mask in this precision and in float32. On a GPU the efficient
        kernel refuses float32 beside half precision, and cuDNN reads it as half precision without a
        word (https://github.com/pytorch/pytorch/pull/191612). A CPU reads float32 beside float64 as
        other numbers without a word.
        """
        visible = self.chunk(rows, columns, n, device)
        bias = self.bias_of_chunk(rows, columns, n)
        if bias is None:
            return visible
        is_accepted = bias.dtype == torch.float32 and device.type == "cpu"
        if not is_accepted or dtype == torch.float64:
            bias = bias.to(dtype)
        if visible is None:
            return bias
        return bias.masked_fill(~visible, float("-inf"))


def split_mask(attn_mask: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """Return the visibility and the finite bias of a mask of scaled-dot-product attention.

    A boolean mask is True where a query may attend to a key, and has no bias. An additive mask
    hides a key by -inf or by any number up to `HIDES_FROM`, and its bias is 0 there. A mask of keys
    alone (m,) gets an axis of queries. Raises ValueError for a mask of integers, whose meaning is
    ambiguous.
    """
    if attn_mask is None:
        return None, None
    attn_mask = torch.atleast_2d(attn_mask)
    if attn_mask.dtype == torch.bool:
        return attn_mask, None
    if not attn_mask.is_floating_point():
        raise ValueError(
            f"attn_mask: {attn_mask.dtype} is neither boolean nor floating-point. "
            "Pass a boolean mask that is True where a query may attend, or an additive one."
        )
    hidden = attn_mask <= HIDES_FROM
    return ~hidden, attn_mask.masked_fill(hidden, 0.0)


def differs_between_heads(visible: Tensor) -> bool:
    """Return True if the heads of a query can see different keys, for (B, H, c, m) or smaller."""
    return visible.ndim > 2 and visible.shape[-3] > 1


def in_chunks(n: int, size: int) -> list[slice]:
    """Return slices of at most `size` that cover 0 to n."""
    return [slice(start, min(start + size, n)) for start in range(0, n, size)]


def _cut(mask: Tensor, rows: slice, columns: slice, n: int) -> Tensor:
    """Return the rows and columns of a mask that is broadcastable to (B, H, queries, n)."""
    if mask.shape[-1] == n:
        mask = mask[..., columns]
    if mask.ndim > 1 and mask.shape[-2] > 1:
        mask = mask[..., rows, :]
    return mask
