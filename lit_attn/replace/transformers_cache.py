"""Cache of transformers for a replaced layer.

Shapes: B batch, m stored tokens, F everything that is kept of a token.
"""

from typing import Any

import torch
from torch import Tensor

from lit_attn.attention.cache import KeyValues

GROWING = (
    "DynamicLayer",
    "DynamicSlidingWindowLayer",
    "LinearAttentionAndFullAttentionLayer",
    "LinearAttentionAndSlidingWindowAttentionLayer",
)
"""Classes of the layers of a cache that keep every stored vector as it is."""


class HubCache(KeyValues):
    """Cache of transformers, in which one vector has everything that is kept of a token.

    The vectors (B, 1, m, F) are stored as the keys of the cache, so that selecting and removing
    samples and tokens works as usual. The values of the cache have a width of 0.

    A layer that also keeps sums over tokens stores them as `lit_attn_totals` of the cache's layer.
    The values of the cache are then (B, 1, 1, 1): the row of the sums that belongs to each sample.
    Selecting samples selects these numbers, and removing tokens removes them.
    """

    def __init__(self, past: Any, index: int, window: int | None, new_tokens: int) -> None:
        """Raise ValueError for a cache that does not keep vectors as they are, or lost the sums."""
        super().__init__(window)
        self.past = past
        self.index = index
        self.vectors: Tensor | None = None
        self.parts: list[Tensor] = []
        if index >= len(past.layers):
            return
        layer = past.layers[index]
        name = type(layer).__name__
        if name not in GROWING:
            raise ValueError(
                f"replaced attention needs a cache that grows, such as DynamicCache, not {name}"
            )
        self.position = past.get_seq_length(index)
        if self.position == 0:
            return
        if past.offloading:
            # The cache moves a layer to its device for `update`, and the layer reads it before.
            past.prefetch_stream.synchronize()
            layer.prefetch()
        self.vectors = layer.keys
        self.length = layer.get_mask_sizes(new_tokens)[0] - new_tokens
        if self.limit is not None:
            self.length = min(self.length, self.limit)
        if layer.values.shape[-1] > 0:
            self.totals = read_totals(layer)

    def extend(self, name: str, new: Tensor, axis: int = -2) -> Tensor:
        """Append `new` to its part of the stored vectors along the token axis and return both.

        The parts of a vector are in the order of the calls, which is the same for all tokens.
        """
        tokens = new.movedim(axis, 1)
        start = sum(part.shape[-1] for part in self.parts)
        self.parts.append(tokens.flatten(2))
        if self.vectors is None or self.length == 0:
            return new
        stop = start + self.parts[-1].shape[-1]
        first_token = self.vectors.shape[-2] - self.length
        stored = self.vectors[:, 0, first_token:, start:stop]
        stored = stored.unflatten(-1, tokens.shape[2:]).to(new.dtype)
        return torch.cat([stored, tokens], 1).movedim(1, axis)

    def advance(self, n: int) -> None:
        if n == 0:
            # Cross-attention, whose memory is in the cache since the first call.
            return
        vectors = torch.cat(self.parts, -1).unsqueeze(1)
        if self.totals and self.vectors is not None:
            self.past.layers[self.index].values = self.vectors[..., :0]
        self.past.update(vectors, vectors[..., :0], self.index)
        if self.totals:
            layer = self.past.layers[self.index]
            layer.lit_attn_totals = self.totals
            layer.values = torch.arange(len(vectors), device=vectors.device).view(-1, 1, 1, 1)


def read_totals(layer: Any) -> dict[str, Tensor]:
    """Return the sums of a layer of a cache, with the samples that the cache has now.

    Raises ValueError if tokens were removed from the cache, or if another cache was made from it.
    """
    totals = getattr(layer, "lit_attn_totals", None)
    if totals is None or layer.values.numel() == 0:
        raise ValueError(
            "a replaced layer keeps sums over all tokens in this cache, and tokens were removed "
            "from it or it was made anew; call the model with use_cache=False, or compute the "
            "remaining tokens again"
        )
    rows = layer.values.flatten()
    return {name: total[rows.to(total.device)] for name, total in totals.items()}
