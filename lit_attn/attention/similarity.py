"""Logits of dot-product and Gaussian attention, and the base class of all similarities.

Dot product: Vaswani et al. 2017, https://arxiv.org/abs/1706.03762, eq. 1. Gaussian: MGK with one
key (Nguyen et al. 2022, https://arxiv.org/abs/2110.08678, eq. 7).

Shapes: B batch, n tokens, d width, H heads, H' key heads, D head width, M keys for every token, E
width of the features.
"""

import torch
from torch import Tensor, nn

from lit_attn.attention import dispatch
from lit_attn.attention.cache import Cache, KeyValues
from lit_attn.attention.dispatch import Inputs
from lit_attn.attention.masks import Masks
from lit_attn.attention.parts import LayerShape
from lit_attn.attention.parts import Similarity as SimilarityConfig
from lit_attn.attention.precision import as_multiplied, in_two, square


class Similarity(nn.Module):
    """Base of the similarities: features of q and of the keys whose scaled products are the logits,

        s_ijr = q'_i . k'_jr / sqrt(D).

    A softmax over all M n products is then a soft mixture over each token's keys. A term that is
    equal for all keys of a query can be left out unless `needs_row_terms`. A similarity without
    logits overrides `attend`, `new_cache` and `weights` instead of `features`.
    """

    # True if the largest of the M logits of a pair of tokens counts, not their log-sum-exp.
    hard = False

    def __init__(self, part: SimilarityConfig, shape: LayerShape) -> None:
        super().__init__()
        self.part = part
        self.needs_row_terms = shape.needs_row_terms

    def keys(self, x: Tensor, k: Tensor) -> Tensor:
        """Return all keys (B, n, M, H', D) from x (B, n, d) and the layer's k (B, n, H', D)."""
        return k.unsqueeze(2)

    def features(self, q: Tensor, keys: Tensor, first: int = 0) -> tuple[Tensor, Tensor]:
        """Return q' (B, H, n, E) and k' (B, H, M, n', E) of q (B, H, n, D), keys (B, H, M, n', D).

        `first` is the position of the first key. With a cache there are more keys than queries.
        """
        return q, keys

    def observe(self, q: Tensor, k: Tensor, scale: float, masks: Masks) -> None:
        """Update buffers from the features of a training step; most similarities have none."""

    def attend(self, inputs: Inputs) -> Tensor:
        """Return the weighted sums of values (B, H, n, D), and extend the cache by the tokens."""
        return dispatch.attend(self, inputs)

    def weights(self, inputs: Inputs) -> Tensor | None:
        """Return the weights (B, H, n, n), or None if the similarity never forms them."""
        return dispatch.weights(self, inputs)

    def new_cache(self, window: int | None) -> Cache:
        """Return an empty cache for decoding one batch of sequences."""
        return KeyValues(window)

    def mean_prior(self) -> Tensor | None:
        """Return the weights of a token's keys (H, M), or (1, M); None without such weights."""
        return None

    def extra_key_weights(self) -> Tensor | None:
        """Return the projections of the second and further keys, (M - 1) H' D x d, or None."""
        return None


class Dot(Similarity):
    """s_ij = q_i.k_j / sqrt(D): q and k are the features."""


class Gaussian(Similarity):
    """s_ij = -|q_i - k_j|^2 / (2 sqrt(D)) = (q.k - |k|^2 / 2 - |q|^2 / 2) / sqrt(D)."""

    def features(self, q: Tensor, keys: Tensor, first: int = 0) -> tuple[Tensor, Tensor]:
        q, keys = as_multiplied(q), as_multiplied(keys)
        ones = torch.ones_like(q[..., :1])
        q_parts, k_parts = [q, ones, ones], [keys, *in_two(-square(keys) / 2, keys)]
        if self.needs_row_terms:
            q_parts += in_two(-square(q) / 2, q)
            k_parts += [torch.ones_like(keys[..., :1])] * 2
        return torch.cat(q_parts, -1), torch.cat(k_parts, -1)
