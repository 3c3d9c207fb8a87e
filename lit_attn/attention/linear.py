"""Linear attention, also with several keys for every token: O(n) time and memory.

One key: Katharopoulos et al. 2020, "Transformers are RNNs", https://arxiv.org/abs/2006.16236.
Several keys: phi(q_i).sum_r pi_r phi(k_jr), MGK section 2.4, https://arxiv.org/abs/2110.08678.

Shapes: B batch, n tokens, H heads, D head width, M keys for every token.
"""

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from lit_attn.attention.cache import Cache, RunningSums
from lit_attn.attention.dispatch import Inputs
from lit_attn.attention.mixture import MixedKeys
from lit_attn.attention.mixture_parts import LinearConfig
from lit_attn.attention.precision import wide, without_autocast

# Number of tokens in a chunk of causal attention.
CHUNK = 64

# Lower bound of the sum of similarities as a divisor: a query that sees no key gets zero. It
# belongs to the definition; the reference uses the same bound.
FLOOR = 1e-6


class Linear(MixedKeys):
    """Attention as running sums of phi(k_j) v_j^T and phi(k_j), without logits."""

    part: LinearConfig

    def attend(self, inputs: Inputs) -> Tensor:
        """Return the weighted sums (B, H, n, D), and add the tokens to the cache's running sums.

        Computed in float32 under autocast too: sums over thousands of tokens overflow or lose half
        precision. Raises ValueError for a mask of pairs of tokens.
        """
        past, masks = inputs.cache, inputs.masks
        assert past is None or isinstance(past, RunningSums)
        if masks.without_self:
            raise ValueError("linear keys never form the logits that would mask a token's own key")
        if past is not None and masks.attn_mask is not None:
            raise ValueError("linear keys need causal attention without a mask for a cache")
        keys, v = inputs.shared(inputs.keys), inputs.shared(inputs.v.transpose(1, 2))
        with without_autocast(v.device):
            k = self._mixed(wide(keys), 0 if past is None else past.seen)
            if masks.attn_mask is not None:
                k = k.masked_fill(~_present(masks.attn_mask), 0)
            out = self._divided(self._phi(wide(inputs.q)), k, wide(v), masks.is_causal, past)
            if past is not None:
                past.add(k, wide(v))
            return out.to(v.dtype)

    def weights(self, inputs: Inputs) -> None:
        return None

    def new_cache(self, window: int | None) -> Cache:
        return RunningSums()

    def _phi(self, x: Tensor) -> Tensor:
        x = F.elu(x) + 1
        return x / x.sum(-1, keepdim=True) if self.part.features == "sum-to-one" else x

    def _mixed(self, keys: Tensor, first: int) -> Tensor:
        """Return sum_r pi_r phi(k_jr), or phi of the mixed key (B, H, n, D)."""
        log_prior = self.log_prior(keys.shape[-2], first)
        prior: Tensor | float = 1 / self.part.keys
        if isinstance(log_prior, Tensor):
            prior = log_prior.exp().unsqueeze(-1)
        if self.part.mixing == "before":
            return self._phi((prior * keys).sum(2))
        return (prior * self._phi(keys)).sum(2)

    def _divided(
        self, q: Tensor, k: Tensor, v: Tensor, is_causal: bool, past: RunningSums | None
    ) -> Tensor:
        """Return the sum over keys divided as `divide_by` says."""
        n, width = q.shape[-2:]
        out = causal(q, k, v) if is_causal else q @ (k.transpose(-1, -2) @ v)
        before = 0 if past is None else past.seen
        if past is not None and past.products is not None:
            out = out + q @ past.products
        if self.part.divide_by == "root-length":
            if not is_causal:
                return out / math.sqrt(n)
            lengths = torch.arange(before + 1, before + n + 1, dtype=q.dtype, device=q.device)
            return out / lengths.sqrt().unsqueeze(-1)
        seen = k.cumsum(-2) if is_causal else k.sum(-2, keepdim=True)
        if past is not None and past.keys is not None:
            seen = seen + past.keys
        out = out / (q * seen).sum(-1, keepdim=True).clamp_min(FLOOR)
        return out / math.sqrt(width) if self.part.divide_by == "scaled-sum" else out


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return q_i.sum_{j <= i} k_j v_j^T, chunk by chunk: earlier chunks enter as one D x D sum."""
    n = q.shape[-2]
    # One decoded token is a chunk of one token.
    size = CHUNK if n > 1 else 1
    q, k, v = (F.pad(x, (0, 0, 0, -n % size)).unflatten(-2, (-1, size)) for x in (q, k, v))
    sums = k.transpose(-1, -2) @ v
    before = sums.cumsum(2) - sums
    out = q @ before + (q @ k.transpose(-1, -2)).tril() @ v
    return out.flatten(-3, -2)[..., :n, :]


def _present(mask: Tensor) -> Tensor:
    """Return (B, 1 or H, n, 1) from the mask (B, 1 or H, 1, n) of the keys that are present."""
    if mask.dtype != torch.bool or mask.ndim < 2 or mask.shape[-2] != 1:
        raise ValueError("linear keys take a boolean mask of present keys only, (B, 1, 1, n)")
    return mask.transpose(-1, -2)
