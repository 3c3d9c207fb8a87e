"""Every softmax and linear similarity written straight down, with all n x n logits of all heads.

It is what one would write from the papers' formulas with no thought of memory: matrix products for
the logits, one tensor of n x n x H (x M) numbers after the other. The benchmark runs it beside the
fast form; both are held to the reference. It covers what the presets choose.

Shapes: B batch, n tokens, H heads, D head width, M keys for every token.
"""

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from lit_attn.attention import mixture_parts, parts
from lit_attn.attention.cache import Cache
from lit_attn.attention.compose import HeadMaps
from lit_attn.attention.layer import Attention
from lit_attn.attention.linear import FLOOR
from lit_attn.attention.mixture import MixedKeys
from lit_attn.attention.rotary import Rotary
from lit_attn.attention.spec import AttentionSpec

SIMILARITIES = (
    parts.DotConfig,
    parts.GaussianConfig,
    mixture_parts.MixtureConfig,
    mixture_parts.LinearConfig,
)
COMPOSITIONS = (parts.NoComposeConfig, parts.StaticConfig, parts.DynamicConfig)


def covers(spec: AttentionSpec) -> bool:
    """Return True if this file computes `spec`; a part from outside has only its own reference."""
    is_covered = isinstance(spec.similarity, SIMILARITIES)
    is_covered &= isinstance(spec.compose, COMPOSITIONS)
    return is_covered and isinstance(spec.normaliser, parts.SoftmaxConfig)


class Materialised(Attention):
    """The layer with the same parameters and output; a subclass fixes `spec`."""

    def forward(
        self,
        x: Tensor,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
        rotary: Rotary | None = None,
        cache: Cache | None = None,
    ) -> Tensor:
        """(B, n, d) -> (B, n, d); ValueError for a mask or a cache, which no benchmark gives."""
        if attn_mask is not None or cache is not None:
            raise ValueError("the materialised form supports no mask and no cache")
        q, keys, v = self.project(x, rotary)
        n = x.shape[1]
        future = torch.ones(n, n, dtype=torch.bool, device=x.device).triu(1) if is_causal else None
        if isinstance(self.spec.similarity, mixture_parts.LinearConfig):
            weights = linear_weights(self.similarity, q, keys, future)
        else:
            logits = softmax_logits(self.similarity, q, keys, future)
            if self.z is not None:
                z = self.z(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
                logits = logits + z @ z.transpose(-1, -2) / math.sqrt(self.head_dim)
            logits = composed(self, "pre", x, logits)
            if future is not None:
                logits = logits.masked_fill(future, -math.inf)
            weights = composed(self, "post", x, logits.softmax(-1))
            if future is not None:
                weights = weights.masked_fill(future, 0)
        heads = weights @ v.transpose(1, 2)
        return self.proj_drop(self.residual(x, heads.transpose(1, 2), v, self.proj))


def softmax_logits(form: torch.nn.Module, q: Tensor, keys: Tensor, future: Tensor | None) -> Tensor:
    """(B, H, n, n) from q (B, H, n, D) and keys (B, H, M, n, D)."""
    part, unit = form.part, math.sqrt(q.shape[-1])
    logits = q.unsqueeze(2) @ keys.transpose(-1, -2)
    if isinstance(part, parts.GaussianConfig) or (
        isinstance(part, mixture_parts.MixtureConfig) and part.kernel == "gaussian"
    ):
        squares = q.square().sum(-1).unsqueeze(2).unsqueeze(-1), keys.square().sum(-1).unsqueeze(-2)
        logits = logits - (squares[0] + squares[1]) / 2
    logits = logits / unit
    if not isinstance(part, mixture_parts.MixtureConfig):
        return logits.squeeze(2)
    assert isinstance(form, MixedKeys)
    if part.assignment == "hard":
        return logits.amax(2)
    prior = torch.as_tensor(form.log_prior(q.shape[-2])).to(logits)
    logits = logits + (prior.unsqueeze(-2) if prior.ndim else prior)
    if part.prior == "m-step" and form.training:
        step_prior(form, logits.detach(), future)
    return logits.logsumexp(2)


def step_prior(form: MixedKeys, logits: Tensor, future: Tensor | None) -> None:
    """The M-step: pi_r of a head becomes the mean responsibility of its key r."""
    responsibility = logits.softmax(2)
    if future is None:
        mean = responsibility.mean((0, 3, 4))
    else:
        shown = responsibility.masked_fill(future, 0)
        mean = shown.sum((0, 3, 4)) / ((~future).sum() * shown.shape[0])
    form.prior.copy_(mean.T.unsqueeze(-1))


def linear_weights(form: torch.nn.Module, q: Tensor, keys: Tensor, future: Tensor | None) -> Tensor:
    """phi(q_i).sum_r pi_r phi(k_jr) over its sum in j, phi = elu + 1: (B, H, n, n)."""
    assert isinstance(form, MixedKeys)
    prior = torch.as_tensor(form.log_prior(q.shape[-2])).to(q).exp()
    mixed = ((prior.unsqueeze(-1) if prior.ndim else prior) * (F.elu(keys) + 1)).sum(2)
    similarity = (F.elu(q) + 1) @ mixed.transpose(-1, -2)
    if future is not None:
        similarity = similarity.masked_fill(future, 0)
    return similarity / similarity.sum(-1, keepdim=True).clamp_min(FLOOR)


def composed(layer: Attention, place: str, x: Tensor, a: Tensor) -> Tensor:
    """a (B, H, n, n) with its heads mixed at each pair, low-rank terms as products with a."""
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
