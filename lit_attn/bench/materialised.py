"""Materialised form of the layer: all n x n logits of all heads in memory.

It follows the papers' formulas without saving memory: matrix products for the logits, and one
tensor of n x n x H (x M) numbers after the other. The benchmark runs it beside the fast form and
compares both with the reference. It covers the parts that the presets choose.

Shapes: B batch, n tokens, H heads, D head width, M keys for every token.
"""

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from lit_attn.attention.cache import Cache
from lit_attn.attention.compose import HeadMaps
from lit_attn.attention.layer import Attention
from lit_attn.attention.masks import Masks
from lit_attn.attention.rotary import Rotary
from lit_attn.attention.similarity import LINEAR_FLOOR
from lit_attn.attention.spec import AttentionSpec


def covers(spec: AttentionSpec) -> bool:
    """Return True if this file computes `spec`; a part from outside has only its own reference."""
    is_covered = spec.similarity.kind in SIMILARITIES and spec.normaliser.kind == "softmax"
    return is_covered and (not spec.compose.places() or spec.compose.kind in COMPOSITIONS)


class Materialised(Attention):
    """The layer with the same parameters and output; a subclass sets `spec`."""

    def forward(
        self,
        x: Tensor,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
        rotary: Rotary | None = None,
        cache: Cache | None = None,
    ) -> Tensor:
        """Return the layer's output (B, n, d); raise ValueError for a mask or a cache."""
        if attn_mask is not None or cache is not None:
            raise ValueError("the materialised form supports no mask and no cache")
        q, keys, v = self.project(x, rotary)
        n = x.shape[1]
        future = torch.ones(n, n, dtype=torch.bool, device=x.device).triu(1) if is_causal else None
        similarities = SIMILARITIES[self.spec.similarity.kind](self.similarity, q, keys, future)
        if self.spec.similarity.has_logits:
            similarities = softmax_weights(self, x, similarities, future)
        heads = similarities @ v.transpose(1, 2)
        return self.proj_drop(self.residual(x, heads.transpose(1, 2), v, self.proj))


def softmax_weights(layer: Attention, x: Tensor, logits: Tensor, future: Tensor | None) -> Tensor:
    """Return the weights (B, H, n, n) of the logits of the similarity."""
    if layer.z is not None:
        z = layer.z(x).unflatten(-1, (layer.num_heads, -1)).transpose(1, 2)
        logits = logits + z @ z.transpose(-1, -2) / math.sqrt(layer.head_dim)
    logits = composed(layer, "pre", x, logits)
    if future is not None:
        logits = logits.masked_fill(future, -math.inf)
    weights = composed(layer, "post", x, logits.softmax(-1))
    return weights if future is None else weights.masked_fill(future, 0)


def dot_logits(form: Any, q: Tensor, keys: Tensor, future: Tensor | None) -> Tensor:
    """Return q_i.k_j / sqrt(D), (B, H, n, n), from q (B, H, n, D) and keys (B, H, 1, n, D)."""
    return products(q, keys).squeeze(2)


def gaussian_logits(form: Any, q: Tensor, keys: Tensor, future: Tensor | None) -> Tensor:
    """Return -|q_i - k_j|^2 / (2 sqrt(D))."""
    return (products(q, keys) - half_squares(q, keys)).squeeze(2)


def mixture_logits(form: Any, q: Tensor, keys: Tensor, future: Tensor | None) -> Tensor:
    """Return the maximum or the weighted log-sum-exp of the logits of all M keys."""
    logits = products(q, keys)
    if form.part.kernel == "gaussian":
        logits = logits - half_squares(q, keys)
    if form.part.assignment == "hard":
        return logits.amax(2)
    prior = torch.as_tensor(form.log_prior(q.shape[-2])).to(logits)
    logits = logits + (prior.unsqueeze(-2) if prior.ndim else prior)
    masks = Masks(None, is_causal=future is not None, window=None, without_self=False)
    if form.part.prior == "m-step":
        form.observe(*form.features(q, keys), q.shape[-1] ** -0.5, masks)
    return logits.logsumexp(2)


def products(q: Tensor, keys: Tensor) -> Tensor:
    """Return q_i.k_jr / sqrt(D), (B, H, M, n, n)."""
    return q.unsqueeze(2) @ keys.transpose(-1, -2) / math.sqrt(q.shape[-1])


def half_squares(q: Tensor, keys: Tensor) -> Tensor:
    """Return (|q_i|^2 + |k_jr|^2) / (2 sqrt(D)), (B, H, M, n, n)."""
    squares = q.square().sum(-1)[:, :, None, :, None] + keys.square().sum(-1).unsqueeze(-2)
    return squares / (2 * math.sqrt(q.shape[-1]))


def linear_weights(form: Any, q: Tensor, keys: Tensor, future: Tensor | None) -> Tensor:
    """Return phi(q_i).sum_r pi_r phi(k_jr) over its sum in j, phi = elu + 1: (B, H, n, n)."""
    prior = torch.as_tensor(form.log_prior(q.shape[-2])).to(q).exp()
    mixed = ((prior.unsqueeze(-1) if prior.ndim else prior) * (F.elu(keys) + 1)).sum(2)
    similarity = (F.elu(q) + 1) @ mixed.transpose(-1, -2)
    if future is not None:
        similarity = similarity.masked_fill(future, 0)
    return similarity / similarity.sum(-1, keepdim=True).clamp_min(LINEAR_FLOOR)


def composed(layer: Attention, place: str, x: Tensor, a: Tensor) -> Tensor:
    """Return a (B, H, n, n) with its heads mixed at each pair of tokens by products with a."""
    if place not in layer.composers:
        return a
    form = layer.composers[place]
    assert isinstance(form, HeadMaps)
    out = a if form.has_identity else torch.zeros_like(a)
    if form.matrix is not None:
        out = out + torch.einsum("gh,bhij->bgij", form.matrix, a)
    for side, maps in form.maps(x).items():
        token = "i" if side == "query" else "j"
        if maps.down is not None and maps.up is not None:
            down, up = maps.down.squeeze(2), maps.up.squeeze(2)
            low = torch.einsum(f"bhij,b{token}rh->brij", a, down)
            out = out + torch.einsum(f"brij,b{token}rg->bgij", low, up)
        if maps.gate is not None:
            out = out + torch.einsum(f"bhij,b{token}h->bhij", a, maps.gate)
    return out


SIMILARITIES = {
    "dot": dot_logits,
    "gaussian": gaussian_logits,
    "mixture": mixture_logits,
    "linear": linear_weights,
}
COMPOSITIONS = ("static", "query", "key", "query+key")
