"""Similarities: the base of all, and dot products.

Dot product: Vaswani et al. 2017, https://arxiv.org/abs/1706.03762, eq. 1. Mixtures of keys are in
lit_attn.attention.mixture, and linear attention is in lit_attn.attention.linear.

Shapes: B batch, n tokens, d width, H heads, H' key heads, D head width, M keys for every token, E
width of the features.
"""

import math
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from lit_attn.attention import dispatch
from lit_attn.attention.cache import Cache, KeyValues
from lit_attn.attention.call import Inputs
from lit_attn.attention.dispatch import Features
from lit_attn.attention.masks import Masks
from lit_attn.attention.parts import LayerShape, Part
from lit_attn.attention.precision import wide
from lit_attn.attention.statistics import Learner, end_step_after_backward, observe_once
from lit_attn.schema.base import Kind


class SimilarityConfig(Part, Kind):
    """Family of the logits s_ij of a head.

    `build` returns a lit_attn.attention.similarity.Similarity. The inputs of `reference` are q
    (B, H, n, D), the list of every token's keys, (B, H, n, D) each, and tau: the factor of the
    logits that a learned temperature sets, else 1. It returns the logits (B, H, n, n).
    """

    has_logits: ClassVar[bool] = True
    """False for a similarity that never forms logits, so that nothing can mask or compose them."""
    is_product: ClassVar[bool] = False
    """True if the logits are the scaled products of queries and keys themselves."""

    @property
    def counts_queries(self) -> bool:
        """True if training counts the queries, so that masks must hide queries that are padding."""
        return False

    def reference_keys(self, module: Any, x: Any, k: Any) -> list[Any]:
        """Return the keys of every token, (B, n, H' D) each, from x (B, n, d) and the layer's k."""
        return [k]

    def reference_weights(
        self, module: Any, q: Any, keys: Any, visible: Any, is_causal: bool
    ) -> Any:
        """Return the weights (B, H, n, n) of a similarity without logits, else None.

        `visible` (n, n) is True where a query attends to a key.
        """
        return None

    @property
    def max_tokens(self) -> int | None:
        """Number of tokens that the similarity has parameters for, or None if there is no limit."""
        return None

    def find_document_problem(self) -> str:
        return "" if self.max_tokens is None else "has parameters for places of the sequence"


class Similarity(Learner):
    """Base of the similarities: features of q and of the keys whose scaled products are the logits,

        s_ijr = q'_i . k'_jr / sqrt(D).

    A softmax over all M n products is then a soft mixture over each token's keys. A term that is
    equal for all keys of a query can be left out unless `needs_row_terms`. A similarity without
    logits overrides `attend`, `new_cache` and `weights` instead of `features`.
    """

    # A member overrides at least one of these methods.
    required_methods = ("features", "biased_features", "keys", "attend")
    # True if the largest of the M logits of a pair of tokens counts, not their log-sum-exp.
    hard = False

    def __init__(self, part: SimilarityConfig, shape: LayerShape) -> None:
        super().__init__()
        self.part = part
        self.needs_row_terms = shape.needs_row_terms
        # Projection of x to the second and further keys of a token, (M - 1) H' D columns.
        self.more: nn.Linear | None = None

    def keys(self, x: Tensor, k: Tensor) -> Tensor:
        """Return all keys (B, n, M, H', D) from x or the memory (B, n, d), and k (B, n, H', D)."""
        return k.unsqueeze(2)

    def features(self, q: Tensor, keys: Tensor, first: int = 0) -> tuple[Tensor, Tensor]:
        """Return q' (B, H, n, E) and k' (B, H, M, n', E) of q (B, H, n, D), keys (B, H, M, n', D).

        `first` is the position of the first key. With a cache there are more keys than queries.
        """
        return q, keys

    def biased_features(
        self, q: Tensor, keys: Tensor, first: int = 0
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return q' and k' without terms of the keys alone, and their sum (B, H, M, n') or None.

        The scaled sum of the products and of these terms are the logits. Some kernels add terms of
        keys without further features.
        """
        return *self.features(q, keys, first), None

    def observe(self, q: Tensor, k: Tensor, scale: float, masks: Masks) -> None:
        """Add the statistics of a forward pass of training, if the similarity `has_statistics`.

        q and k are the features, and `scale` the factor of their products. `end_step` uses the
        statistics.
        """

    def attend(self, inputs: Inputs) -> Tensor:
        """Return the weighted sums of values (B, H, n, D), and extend the cache by the tokens.

        In training, a similarity that learns from statistics observes the call.
        """
        is_observed = self.has_statistics and self.training
        tokens = dispatch.with_cached_tokens(inputs)
        features = self._scaled_features(inputs, tokens.keys, tokens.first)
        if is_observed:
            q, k, _, scale, _ = dispatch.with_bias_in_columns(features)
            if torch.compiler.is_compiling() and self.observes_compiled:
                self.observe(q, k, scale, inputs.masks)
            else:
                observe_once(self.observe, q, k, scale, inputs.masks)
        out = dispatch.attend(inputs, tokens, _with_factor(features, inputs.factor))
        if is_observed and self.ends_steps:
            end_step_after_backward(self, out)
        return out

    def describe_call(self, inputs: Inputs) -> dict[str, Any] | None:
        """Return the arguments of `dispatch.choose_path` for a call without a cache.

        A similarity that computes its sums itself has no path and returns None.
        """
        features = self._scaled_features(inputs, inputs.keys, 0)
        return dispatch.describe_call(inputs, _with_factor(features, inputs.factor))

    def weights(self, inputs: Inputs) -> Tensor | None:
        """Return the weights (B, H, n, n), or None if the similarity never forms them."""
        features = self._scaled_features(inputs, inputs.keys, 0)
        return dispatch.weights(inputs, _with_factor(features, inputs.factor))

    def _scaled_features(self, inputs: Inputs, keys: Tensor, first: int) -> Features:
        """Return the features of the call's queries and of `keys`, the first at position `first`.

        A learned temperature is a factor of the queries; otherwise the scale is 1 / sqrt(D).
        """
        q, k, bias = self.biased_features(inputs.q, inputs.shared(keys), first)
        if inputs.temperature is None:
            return Features(q, k, bias, inputs.q.shape[-1] ** -0.5, self.hard)
        factor = inputs.temperature.exp()
        if bias is not None:
            bias = bias * factor
        return Features(q * factor, k, bias, 1.0, self.hard)

    def new_cache(self, window: int | None) -> Cache:
        """Return an empty cache for decoding one batch of sequences."""
        return KeyValues(window)

    def log_prior(self, n: int, first: int = 0) -> Tensor | float:
        """Return log pi_r of n keys from position `first` on, broadcastable to (H, M, n)."""
        return 0.0

    def mean_prior(self) -> Tensor | None:
        """Return the weights of a token's keys (H, M), or (1, M); None without such weights."""
        return None

    def variances(self, keys: Tensor) -> Tensor:
        """Return sigma_r^2 of each key in units of sqrt(D), (H or 1, M).

        `keys` are (B, H, M, n, D).
        """
        return wide(keys).new_ones(1, keys.shape[2])

    def extra_key_weights(self) -> Tensor | None:
        """Return the projections of the second and further keys, (M - 1) H' D x d, or None."""
        return None if self.more is None else self.more.weight


def _with_factor(features: Features, factor: Tensor | None) -> Features:
    """Return features whose logits have the factor (B or 1, H, n, 1) of their query."""
    if factor is None:
        return features
    # The factor is that of the terms of the keys too.
    features = dispatch.with_bias_in_columns(features)
    return features._replace(q=(features.q * factor).to(features.q.dtype))


class DotConfig(SimilarityConfig, kind="dot"):
    """s_ij = q_i.k_j / sqrt(D) (Vaswani et al. 2017, eq. 1)."""

    is_product = True

    def build(self, shape: LayerShape) -> Any:
        return DotProduct(self, shape)

    def reference(self, module: Any, q: Tensor, keys: list[Tensor], tau: Tensor | float) -> Tensor:
        """Vaswani et al. 2017, eq. 1: the scaled dot product."""
        return tau * q @ keys[0].transpose(-1, -2) / math.sqrt(q.shape[-1])


class DotProduct(Similarity):
    """s_ij = q_i.k_j / sqrt(D)."""

    def features(self, q: Tensor, keys: Tensor, first: int = 0) -> tuple[Tensor, Tensor]:
        return q, keys
