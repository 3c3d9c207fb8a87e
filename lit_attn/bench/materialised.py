"""Materialised form of the layer: all n x n logits of all heads in memory.

It saves no memory: it forms the logits of all M keys in one product, and one tensor of n x n x H
(x M) numbers after the other. The benchmark runs it beside the fast form and compares both with the
reference. It covers every similarity with logits, and linear keys.

Shapes: B batch, n tokens, H heads, D head width, M keys for every token.
"""

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from lit_attn.attention.cache import Cache
from lit_attn.attention.compose import HeadMaps
from lit_attn.attention.dispatch import Inputs
from lit_attn.attention.layer import Attention
from lit_attn.attention.rotary import Rotary
from lit_attn.attention.similarity import LINEAR_FLOOR, Similarity
from lit_attn.attention.spec import AttentionSpec

COMPOSITIONS = ("none", "static", "query", "key", "query+key")


def covers(spec: AttentionSpec) -> bool:
    """Return True if this file computes `spec`; a part from outside has only its own reference."""
    has_form = spec.similarity.has_logits or spec.similarity.kind == "linear"
    return has_form and spec.normaliser.kind == "softmax" and spec.compose.kind in COMPOSITIONS


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
        inputs = self.inputs(x, None, is_causal, rotary)
        n = x.shape[1]
        future = torch.ones(n, n, dtype=torch.bool, device=x.device).triu(1) if is_causal else None
        if self.spec.similarity.has_logits:
            weights = softmax_weights(self, inputs, future)
        else:
            weights = linear_weights(self.similarity, inputs.q, inputs.keys, future)
        heads = (weights @ inputs.v.transpose(1, 2)).transpose(1, 2)
        return self.proj_drop(self.residual(x, heads, inputs.v, self.proj))


def softmax_weights(layer: Attention, inputs: Inputs, future: Tensor | None) -> Tensor:
    """Return the weights (B, H, n, n) of a similarity with logits."""
    a = logits(layer.similarity, inputs)
    if inputs.z is not None:
        a = a + inputs.z @ inputs.z.transpose(-1, -2) / math.sqrt(layer.head_dim)
    a = composed(layer, "pre", inputs.x, a)
    if future is not None:
        a = a.masked_fill(future, -math.inf)
    weights = composed(layer, "post", inputs.x, a.softmax(-1))
    return weights if future is None else weights.masked_fill(future, 0)


def logits(similarity: Similarity, inputs: Inputs) -> Tensor:
    """Return the maximum or the log-sum-exp of the logits of all M keys, (B, H, n, n)."""
    scale = inputs.q.shape[-1] ** -0.5
    q, k = similarity.features(inputs.q, inputs.keys)
    similarity.observe(q, k, scale, inputs.masks)
    products = q.unsqueeze(2) @ k.transpose(-1, -2) * scale
    return products.amax(2) if similarity.hard else products.logsumexp(2)


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
