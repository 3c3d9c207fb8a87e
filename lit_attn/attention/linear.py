"""Linear keys: phi(q_i).sum_r pi_r phi(k_jr), in O(n) time and memory (MGK section 2.4).

Shapes: B batch, n tokens, H heads, D head width, M keys for every token.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from lit_attn.attention.masks import Masks
from lit_attn.attention.similarity import MixedKeys

# Tokens handled at a time where each sees only those before it.
CHUNK = 64

# Smallest normaliser that divides; phi is positive, so only rounding goes below it.
FLOOR = 1e-6


class Linear(MixedKeys):
    """Attention as a running sum of phi(k_j) v_j; there are no logits."""

    def attend(self, q: Tensor, keys: Tensor, v: Tensor, masks: Masks) -> Tensor:
        """(B, H, n, D) from q, v (B, H, n, D) and keys (B, H, M, n, D).

        Raises ValueError for a mask that says more than which keys there are.
        """
        k = self._mixed(keys)
        if masks.attn_mask is not None:
            k = k.masked_fill(~_present(masks.attn_mask), 0)
        if masks.without_self:
            raise ValueError("linear keys never form the logits that would mask a token's own key")
        q = F.elu(q) + 1
        run = causal if masks.is_causal else whole
        return run(q, k, v, self.part.normalised)

    def _mixed(self, keys: Tensor) -> Tensor:
        """sum_r pi_r phi(k_jr), or phi of the mixed key: (B, H, n, D)."""
        log_prior = self.log_prior(keys.shape[-2])
        prior = (
            log_prior.exp().unsqueeze(-1).to(keys.dtype)
            if isinstance(log_prior, Tensor)
            else (1 / self.part.keys)
        )
        if self.part.mixing == "before":
            return F.elu((prior * keys).sum(2)) + 1
        return (prior * (F.elu(keys) + 1)).sum(2)


def _present(mask: Tensor) -> Tensor:
    """(B, 1 or H, n, 1), from the mask (B, 1 or H, 1, n) that says which keys there are."""
    if mask.dtype != torch.bool or mask.ndim < 2 or mask.shape[-2] != 1:
        raise ValueError("linear keys take a boolean mask of present keys only, (B, 1, 1, n)")
    return mask.transpose(-1, -2)


def whole(q: Tensor, k: Tensor, v: Tensor, normalised: bool) -> Tensor:
    """Every token sees every token."""
    out = q @ (k.transpose(-1, -2) @ v)
    if normalised:
        out = out / (q @ k.sum(-2).unsqueeze(-1)).clamp_min(FLOOR)
    return out


def causal(q: Tensor, k: Tensor, v: Tensor, normalised: bool) -> Tensor:
    """Every token sees itself and those before: chunk by chunk, the past as one D x D sum."""
    n, width = q.shape[-2:]
    if normalised:
        # The normaliser is one more value that is 1 everywhere.
        v = F.pad(v, (0, 1), value=1.0)
    padding = -n % CHUNK
    q, k, v = (F.pad(x, (0, 0, 0, padding)).unflatten(-2, (-1, CHUNK)) for x in (q, k, v))
    sums = k.transpose(-1, -2) @ v
    before = sums.cumsum(2) - sums
    out = q @ before + (q @ k.transpose(-1, -2)).tril() @ v
    out = out.flatten(-3, -2)[..., :n, :]
    if normalised:
        out = out[..., :width] / out[..., width:].clamp_min(FLOOR)
    return out
