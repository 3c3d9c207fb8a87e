"""Fast forms of the softmax similarities: features whose scaled dot products are the logits.

Shapes: B batch, n tokens, H heads, D head width, M keys for every token, E width of the features.

A similarity makes keys (B, n, M, H, D) and, from them and q, features q' (B, H, n, E) and k'
(B, H, M, n, E) with
    s_ijr = q'_i . k'_jr / sqrt(D)
so that a softmax over the products with all M n keys is a soft mixture. Terms that are constant in
the key are left out where a softmax follows at once, for it does not see them.
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lit_attn.attention import spec
from lit_attn.attention.masks import CHUNK, Masks, in_chunks


class Shape(NamedTuple):
    """What a part needs to know of its layer; `key_heads` is H, or the groups that share keys."""

    dim: int
    heads: int
    key_heads: int
    head_dim: int
    bias: bool
    factory: dict[str, Any]


class Dot(nn.Module):
    """s_ij = q_i.k_j / sqrt(D): q and k are the features. Also the base of the others."""

    # How the M logits of a pair of tokens become one: their log-sum-exp, or the largest.
    hard = False

    def __init__(self, part: Any, shape: Shape, composed: bool) -> None:
        """`composed`: heads mix before the softmax, which then sees constants of the query."""
        super().__init__()
        self.part = part
        self.composed = composed

    def keys(self, x: Tensor, k: Tensor) -> Tensor:
        """All keys (B, n, M, key heads, D), from x (B, n, d) and the first (B, n, key heads, D)."""
        return k.unsqueeze(2)

    def features(self, q: Tensor, keys: Tensor, first: int = 0) -> tuple[Tensor, Tensor]:
        """q' and k' from q (B, H, n, D) and keys (B, H, M, n', D), from position `first` on.

        There are more keys than queries where those of earlier tokens are cached.
        """
        return q, keys

    def observe(self, q: Tensor, k: Tensor, scale: float, masks: Masks) -> None:
        """Learn from a training step's features, where a part does."""


class Gaussian(Dot):
    """s_ij = -|q_i - k_j|^2 / (2 sqrt(D)) = (q.k - |k|^2 / 2 - |q|^2 / 2) / sqrt(D)."""

    def features(self, q: Tensor, keys: Tensor, first: int = 0) -> tuple[Tensor, Tensor]:
        q, keys = as_multiplied(q), as_multiplied(keys)
        ones = torch.ones_like(q[..., :1])
        q_parts, k_parts = [q, ones, ones], [keys, *in_two(-_square(keys) / 2, keys)]
        if self.composed:
            q_parts += in_two(-_square(q) / 2, q)
            k_parts += [torch.ones_like(keys[..., :1])] * 2
        return torch.cat(q_parts, -1), torch.cat(k_parts, -1)


class MixedKeys(Dot):
    """M keys for every token: projected or shifted, with weights pi_r."""

    def __init__(self, part: spec.MixedKeysConfig, shape: Shape, composed: bool) -> None:
        super().__init__(part, shape, composed)
        self.hard = isinstance(part, spec.MixtureConfig) and part.assignment == "hard"
        m, heads, width, factory = part.keys, shape.key_heads, shape.head_dim, shape.factory
        if part.source == "projected" and m > 1:
            self.more = nn.Linear(shape.dim, (m - 1) * heads * width, bias=shape.bias, **factory)
        if part.source == "shifted":
            self.shift = nn.Parameter(torch.empty(m, heads, width, **factory))
        scopes = {"head": (shape.heads, 1), "layer": (1, 1)}
        size = (m, *scopes.get(part.prior_scope, (shape.heads, part.positions)))
        # The largest of the keys' logits does not weigh them.
        weighted = m > 1 and not self.hard
        if weighted and part.prior in ("learned", "clamped"):
            self.prior = nn.Parameter(torch.empty(size, **factory))
        elif weighted and part.prior == "m-step":
            self.register_buffer("prior", torch.empty(size, **factory))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Offsets as `shift_init` says, every pi at 1 / M."""
        with torch.no_grad():
            if self.part.source == "shifted":
                nn.init.normal_(self.shift)
                if self.part.shift_init == "released":
                    self.shift.mul_(0.5)[0].zero_()
            if hasattr(self, "prior"):
                self.prior.fill_(0.0 if self.part.prior == "learned" else 1 / self.part.keys)

    def keys(self, x: Tensor, k: Tensor) -> Tensor:
        if self.part.source == "shifted":
            return k.unsqueeze(2) + self.shift
        if self.part.keys == 1:
            return k.unsqueeze(2)
        more = self.more(x).unflatten(-1, (self.part.keys - 1, *k.shape[-2:]))
        return torch.cat([k.unsqueeze(2), more], 2)

    def log_prior(self, n: int, first: int = 0) -> Tensor | float:
        """log pi_r of n keys from position `first` on, broadcastable to (H, M, n).

        Raises ValueError beyond the positions that have one.
        """
        if not hasattr(self, "prior"):
            return -math.log(self.part.keys)
        prior: Tensor = self.prior
        if self.part.prior_scope == "position":
            if first + n > self.part.positions:
                raise ValueError(
                    f"{first + n} tokens, but the mixture's weights are for {self.part.positions} "
                    "positions"
                )
            prior = prior[..., first : first + n]
        prior = wide(prior).transpose(0, 1)
        if self.part.prior == "learned":
            return prior.log_softmax(1)
        return prior.clamp(torch.finfo(prior.dtype).tiny, 1).log()


class Mixture(MixedKeys):
    """s_ijr of a Gaussian or dot kernel, with log pi_r where the assignment is soft."""

    variance: Tensor

    def __init__(self, part: spec.MixtureConfig, shape: Shape, composed: bool) -> None:
        super().__init__(part, shape, composed)
        self.unit = math.sqrt(shape.head_dim)
        variance = part.variance or (1.0,) * part.keys
        self.register_buffer("variance", torch.tensor(variance, **shape.factory), persistent=False)
        # |q_i|^2 cancels in the softmax unless keys of one token weigh it differently.
        self.query_matters = part.kernel == "gaussian" and (composed or len(set(variance)) > 1)

    def features(self, q: Tensor, keys: Tensor, first: int = 0) -> tuple[Tensor, Tensor]:
        q, keys = as_multiplied(q), as_multiplied(keys)
        ones = torch.ones_like(q[..., :1])
        variance = self.variance.view(-1, 1, 1).to(keys.dtype)
        offset = torch.zeros_like(wide(keys[..., 0]))
        if not self.hard:
            offset = offset + self.unit * self.log_prior(keys.shape[-2], first)
        if self.part.kernel == "gaussian":
            offset = offset - _square(keys).squeeze(-1) / (2 * self.variance.view(-1, 1))
            keys = keys / variance
        q_parts, k_parts = [q, ones, ones], [keys, *in_two(offset.unsqueeze(-1), keys)]
        if self.query_matters:
            q_parts += in_two(-_square(q) / 2, q)
            k_parts += [(1 / variance).expand_as(keys[..., :1])] * 2
        return torch.cat(q_parts, -1), torch.cat(k_parts, -1)

    @torch.no_grad()
    def observe(self, q: Tensor, k: Tensor, scale: float, masks: Masks) -> None:
        """The M-step: pi_r becomes the mean responsibility of key r (MGK eq. 8 and below).

        Over the batch, the pairs of tokens that `responsibilities` names, and what shares a pi. The
        step's own logits are formed with the pi before; what no pair speaks for keeps its pi.
        """
        if self.part.prior != "m-step" or not hasattr(self, "prior") or not self.training:
            return
        n = q.shape[-2]
        taken = counted = torch.zeros((), device=q.device)
        for rows in in_chunks(n, CHUNK):
            logits = torch.einsum("bhce,bhrme->bhcrm", q[:, :, rows] * scale, k)
            responsibility = wide(logits).softmax(3)
            seen = masks.chunk(rows, slice(0, n), n, q.device)
            weight = torch.ones_like(responsibility[:, :, :, :1])
            if seen is not None and self.part.responsibilities == "attending":
                weight = weight * seen.unsqueeze(-2)
            taken = taken + (responsibility * weight).sum((0, 2))
            counted = counted + weight.sum((0, 2))
        shared = {"head": (-1,), "layer": (0, -1), "position": ()}[self.part.prior_scope]
        if shared:
            taken, counted = taken.sum(shared, keepdim=True), counted.sum(shared, keepdim=True)
        mean = (taken / counted.clamp_min(1)).transpose(0, 1)
        before = self.prior[..., : mean.shape[-1]]
        before.copy_(torch.where(counted.transpose(0, 1) > 0, mean, wide(before)))


def as_multiplied(x: Tensor) -> Tensor:
    """x in the precision that autocast, where it is on, will take its products in."""
    kind = x.device.type
    # Models are counted on the meta device, which knows no autocast.
    if x.dtype == torch.float32 and kind != "meta" and torch.is_autocast_enabled(kind):
        return x.to(torch.get_autocast_dtype(kind))
    return x


def in_two(x: Tensor, like: Tensor) -> list[Tensor]:
    """x as two features of `like`'s precision, the second what the first rounds away.

    In bfloat16 |k|^2 / 2 of a few dozen would be off by a quarter, and so would the logit.
    """
    high = x.to(like.dtype)
    return [high, (x - high.to(x.dtype)).to(like.dtype)]


def _square(x: Tensor) -> Tensor:
    """|x|^2 in float32 or wider, (..., 1)."""
    return wide(x).square().sum(-1, keepdim=True)


def wide(x: Tensor) -> Tensor:
    """x in float32, or in float64 where it is that."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


SIMILARITIES: dict[type[spec.Similarity], type[Dot]] = {
    spec.DotConfig: Dot,
    spec.GaussianConfig: Gaussian,
    spec.MixtureConfig: Mixture,
}
