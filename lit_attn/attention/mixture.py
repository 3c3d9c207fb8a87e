"""Mixture of Gaussian Keys (MGK): several keys for every token.

Nguyen et al. 2022, "Improving Transformers with Probabilistic Attention Keys",
https://arxiv.org/abs/2110.08678, section 2, Tables 5 and 6.

Shapes: B batch, n tokens, d width, H heads, H' key heads, D head width, M keys for every token, E
width of the features.
"""

import math

import torch
from torch import Tensor, nn

from lit_attn.attention.masks import CHUNK, Masks, in_chunks
from lit_attn.attention.mixture_parts import MixedKeysConfig, MixtureConfig
from lit_attn.attention.parts import LayerShape
from lit_attn.attention.precision import as_multiplied, in_two, square, wide
from lit_attn.attention.similarity import Similarity


class MixedKeys(Similarity):
    """M keys for every token: projected or shifted, with weights pi_r."""

    part: MixedKeysConfig

    def __init__(self, part: MixedKeysConfig, shape: LayerShape) -> None:
        super().__init__(part, shape)
        m, heads, width, factory = part.keys, shape.key_heads, shape.head_dim, shape.options
        if part.source == "projected" and m > 1:
            self.more = nn.Linear(
                shape.dim, (m - 1) * heads * width, bias=shape.qkv_bias, **factory
            )
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
        """Draw the offsets as `shift_init` says, and set every pi to 1 / M."""
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
        """Return log pi_r of n keys from position `first` on, broadcastable to (H, M, n).

        Raises ValueError beyond the positions that have a pi.
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

    def mean_prior(self) -> Tensor | None:
        """Return pi of every head and key, averaged over positions: (H, M) or (1, M)."""
        if not hasattr(self, "prior"):
            return None
        log_prior = self.log_prior(self.prior.shape[-1])
        assert isinstance(log_prior, Tensor)
        return log_prior.exp().mean(-1)

    def extra_key_weights(self) -> Tensor | None:
        return self.more.weight if hasattr(self, "more") else None


class Mixture(MixedKeys):
    """s_ijr of a Gaussian or dot kernel, with log pi_r where the assignment is soft."""

    part: MixtureConfig
    variance: Tensor

    def __init__(self, part: MixtureConfig, shape: LayerShape) -> None:
        self.hard = part.assignment == "hard"
        super().__init__(part, shape)
        self.unit = math.sqrt(shape.head_dim)
        variance = part.variance or (1.0,) * part.keys
        self.register_buffer("variance", torch.tensor(variance, **shape.options), persistent=False)
        # |q_i|^2 cancels in the softmax unless keys of one token weigh it differently.
        self.query_matters = part.kernel == "gaussian" and (
            self.needs_row_terms or len(set(variance)) > 1
        )

    def features(self, q: Tensor, keys: Tensor, first: int = 0) -> tuple[Tensor, Tensor]:
        q, keys = as_multiplied(q), as_multiplied(keys)
        ones = torch.ones_like(q[..., :1])
        variance = self.variance.view(-1, 1, 1).to(keys.dtype)
        offset = torch.zeros_like(wide(keys[..., 0]))
        if not self.hard:
            offset = offset + self.unit * self.log_prior(keys.shape[-2], first)
        if self.part.kernel == "gaussian":
            offset = offset - square(keys).squeeze(-1) / (2 * self.variance.view(-1, 1))
            keys = keys / variance
        q_parts, k_parts = [q, ones, ones], [keys, *in_two(offset.unsqueeze(-1), keys)]
        if self.query_matters:
            q_parts += in_two(-square(q) / 2, q)
            k_parts += [(1 / variance).expand_as(keys[..., :1])] * 2
        return torch.cat(q_parts, -1), torch.cat(k_parts, -1)

    @torch.no_grad()
    def observe(self, q: Tensor, k: Tensor, scale: float, masks: Masks) -> None:
        """Set pi_r to the mean responsibility of key r: the M-step (MGK eq. 8 and below).

        The mean is over the batch, over the pairs of tokens that `responsibilities` names, and over
        everything that shares a pi. Queries that are padding do not count. The logits of this
        training step still use the previous pi. A pi without any pair keeps its value.
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
            if (present := masks.present_queries(rows)) is not None:
                weight = weight * present.unsqueeze(-2)
            taken = taken + (responsibility * weight).sum((0, 2))
            counted = counted + weight.sum((0, 2))
        shared = {"head": (-1,), "layer": (0, -1), "position": ()}[self.part.prior_scope]
        if shared:
            taken, counted = taken.sum(shared, keepdim=True), counted.sum(shared, keepdim=True)
        mean = (taken / counted.clamp_min(1)).transpose(0, 1)
        before = self.prior[..., : mean.shape[-1]]
        before.copy_(torch.where(counted.transpose(0, 1) > 0, mean, wide(before)))
