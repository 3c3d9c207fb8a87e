"""Filters of the matrix of logits, whose numbers depend on other pairs of tokens.

Selective attention: Leviathan et al. 2024, "Selective Attention Improves Transformer",
https://arxiv.org/abs/2410.02703, section 3.

Shapes: B batch, H heads, n queries, m keys: the cached tokens, and then those of the queries.
"""

from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from lit_attn.attention.cache import Cache, KeyValues
from lit_attn.attention.masks import Masks
from lit_attn.attention.parts import LayerChoices, LayerShape, Part
from lit_attn.schema.base import Kind

SELECTION = "selection"  # Name in a cache of the votes against each token.
FIRST = "first"  # Name in a cache of the tokens that no vote counts against.
STARTED = "started"  # Name in a cache of the sequences that have had such a token.


class KeyBlocks(NamedTuple):
    """Blocks of `size` neighbouring keys that queries attend to.

    `is_chosen` is (B, H, n, blocks).
    """

    is_chosen: Tensor
    size: int


class FilterConfig(Part, Kind):
    """Family of the filters of the matrix of logits, whose numbers depend on other pairs of tokens.

    A filter follows a composition and the biases, and sees all queries at once, so the memory of a
    layer is O(n^2). `build` returns a lit_attn.attention.filters.Filter. The inputs of `reference`
    are the logits (B, H, n, n), `visible`, broadcastable to them, True where a query attends to a
    key, and `present` (B, H, n), False where a token is padding, or None. It returns the logits.
    """

    needs_row_terms: ClassVar[bool] = True
    """False if adding one number to all logits of a query leaves the weights unchanged."""

    def reference_visible(self, module: Any, logits: Any, visible: Any) -> Any:
        """Return where a query attends to a key after a choice of keys; all by default."""
        return visible

    def reference_weights(self, module: Any, weights: Any, visible: Any, present: Any) -> Any:
        """Return the filtered weights (B, H, n, n), unchanged by default."""
        return weights

    def reference_heads(self, module: Any, heads: Any) -> Any:
        """Return the heads' sums (B, H, n, D) after what follows the weighted sum of values."""
        return heads


class Filter(nn.Module):
    """Base of the filters, which see all queries of a call at once.

    The methods take a (B, H, n, m) and the masks of the call; `visible`, broadcastable to a, is
    True where a query may attend to a key, and None everywhere. `cache` holds the earlier tokens.
    """

    # A member overrides at least one of these methods.
    required_methods = ("forward", "choose_keys")
    is_active = True
    """False if all methods return their input."""
    chooses_blocks = False
    """True if `choose_blocks` returns the choice of `choose_keys` for calls without other masks."""

    def __init__(self, part: Any, shape: LayerShape) -> None:
        super().__init__()
        self.part = part

    def forward(
        self, a: Tensor, visible: Tensor | None, masks: Masks, cache: Cache | None
    ) -> Tensor:
        """Return the filtered logits; those that are hidden are the lowest number."""
        return a

    def choose_keys(self, a: Tensor, visible: Tensor | None) -> Tensor | None:
        """Return `visible` without the keys that a query does not attend to; unchanged here."""
        return visible

    def choose_blocks(self, q: Tensor, k: Tensor, is_causal: bool) -> KeyBlocks:
        """Return the blocks that each query of q (B, H, n, E) attends to, from keys (B, H, m, E).

        Here all keys are one block, to which every query attends.
        """
        is_chosen = torch.ones_like(q[..., :1], dtype=torch.bool)
        return KeyBlocks(is_chosen, k.shape[-2])

    def filter_weights(
        self, a: Tensor, visible: Tensor | None, masks: Masks, cache: Cache | None
    ) -> Tensor:
        """Return the filtered weights; those that are hidden are 0."""
        return a

    def finish(self, heads: Tensor) -> Tensor:
        """Return the heads' weighted sums (B, H, n, D) after what follows them; unchanged here."""
        return heads

    def set_depth(self, layer: int) -> None:
        """Use the number of the layer, which counts from 0; ignored here."""


class NoFilterConfig(FilterConfig, kind="none"):
    """Unchanged logits and weights."""

    needs_row_terms = False

    def build(self, shape: LayerShape) -> Any:
        return NoFilter(self, shape)

    def reference(
        self, module: Any, logits: Tensor, visible: Tensor, present: Tensor | None
    ) -> Tensor:
        return logits


class NoFilter(Filter):
    """Unchanged logits and weights."""

    is_active = False

    def forward(
        self, a: Tensor, visible: Tensor | None, masks: Masks, cache: Cache | None
    ) -> Tensor:
        return a


class ActiveFilterConfig(FilterConfig):
    """Filter that sees the logits of earlier queries."""

    needs_self = "orders the tokens of one sequence"
    needs_order = "changes logits by those of the queries before"

    def find_document_problem(self) -> str:
        return "changes the logits of a query by those of earlier queries"

    def check(self, layer: LayerChoices) -> None:
        if layer.window:
            raise ValueError(
                f"window: filter '{self.kind}' needs the logits of all earlier tokens; "
                "remove the window or the filter"
            )


class SelectiveConfig(ActiveFilterConfig, kind="selective"):
    """s_ij minus the sum over u = j + 1 to i - 1 of max(s_uj, 0) of the first head (selective).

    Leviathan et al. 2024, "Selective Attention Improves Transformer",
    https://arxiv.org/abs/2410.02703, section 3. A token can ask later tokens to ignore a token
    before it, but not the first token, and not itself. The votes come from the logits that the
    normaliser would get. Without causal order, tokens vote on the tokens before them too.
    """

    def build(self, shape: LayerShape) -> Any:
        return Selective(self, shape)

    def reference(
        self, module: Any, logits: Tensor, visible: Tensor, present: Tensor | None
    ) -> Tensor:
        """Leviathan et al. 2024, section 3: each token's votes, added up query by query."""
        batch, _, n, _ = logits.shape
        shown = visible.expand(logits.shape)[:, 0]
        is_token = torch.ones(batch, n, dtype=torch.bool)
        if present is not None:
            is_token = present[:, 0]
        filtered = []
        for b in range(batch):
            tokens = [t for t in range(n) if is_token[b, t]]
            votes = logits.new_zeros(n)
            rows = []
            for i in range(n):
                rows.append(logits[b, :, i] - votes)
                if i not in tokens:
                    continue
                can_lose = [
                    j < i and j not in tokens[:1] and bool(shown[b, i, j]) for j in range(n)
                ]
                vote = torch.tensor(can_lose)
                votes = votes + torch.where(vote, logits[b, 0, i].clamp_min(0), 0.0)
            filtered.append(torch.stack(rows, dim=1))
        return torch.stack(filtered)


class Selective(Filter):
    """s_ij - sum over u = j + 1 to i - 1 of max(s_uj, 0) of the first head.

    Token u votes against the keys before it, except the first one, for all queries after it.
    """

    def forward(
        self, a: Tensor, visible: Tensor | None, masks: Masks, cache: Cache | None
    ) -> Tensor:
        n, m = a.shape[-2:]
        voter = torch.arange(m - n, m, device=a.device).unsqueeze(1)
        key = torch.arange(m, device=a.device)
        present = self._find_present(a, masks)
        is_first = self._find_first(present, cache)
        may_vote = (key < voter) & ~is_first.unsqueeze(-2) & present.unsqueeze(-1)
        votes = a[:, 0].relu().masked_fill(~may_vote, 0)
        sums = votes.cumsum(-2)
        if cache is not None:
            assert isinstance(cache, KeyValues)
            earlier_sums = cache.total_of_keys(SELECTION, n)
            if earlier_sums is not None:
                sums = sums + earlier_sums.unsqueeze(-2)
            cache.totals[SELECTION] = sums[:, -1].clone()
        earlier = sums - votes
        return a - earlier.unsqueeze(1)

    def _find_present(self, a: Tensor, masks: Masks) -> Tensor:
        """Return (B, n), False where a token of the queries is padding for the first head."""
        size = (a.shape[0], a.shape[-2])
        present = masks.present_keys()
        if present is None:
            return torch.ones(size, dtype=torch.bool, device=a.device)
        if present.ndim > 1:
            present = present.select(-2, 0)
        return present[..., -size[1] :].expand(size)

    def _find_first(self, present: Tensor, cache: Cache | None) -> Tensor:
        """Return (B, m), True for the first token of each sequence that is no padding.

        A later call of a cache has masks that may hide it, so the cache stores it. It also stores
        that there was one, because it may not keep the token itself.
        """
        is_first = present & (present.cumsum(-1) == 1)
        if cache is None:
            return is_first
        assert isinstance(cache, KeyValues)
        has_started = cache.totals.get(STARTED, torch.zeros_like(present[:, :1]))
        new = (is_first & ~has_started).unsqueeze(1)
        is_first = cache.extend(FIRST, new, axis=-1).squeeze(1)
        cache.totals[STARTED] = has_started | present.any(-1, keepdim=True)
        return is_first
