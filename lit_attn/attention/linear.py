"""Linear keys: phi(q_i).sum_r pi_r phi(k_jr), in O(n) time and memory (MGK section 2.4).

Shapes: B batch, n tokens, H heads, D head width, M keys for every token.
"""

import contextlib
import math

import torch
from torch import Tensor
from torch.nn import functional as F

from lit_attn.attention import spec
from lit_attn.attention.cache import RunningSums
from lit_attn.attention.masks import Masks
from lit_attn.attention.similarity import SIMILARITIES, MixedKeys, wide

# Tokens handled at a time where each sees only those before it.
CHUNK = 64

# Smallest sum of similarities that divides: a token that sees nothing gets nothing. Part of the
# definition: the reference uses the same floor.
FLOOR = 1e-6


class Linear(MixedKeys):
    """Attention as a running sum of phi(k_j) v_j; there are no logits."""

    def attend(
        self, q: Tensor, keys: Tensor, v: Tensor, masks: Masks, past: RunningSums | None = None
    ) -> Tensor:
        """(B, H, n, D) from q, v (B, H, n, D) and keys (B, H, M, n, D).

        `past` holds the sums of the tokens before, and afterwards of these too. In float32 under
        autocast too: sums over thousands of tokens leave half precision. Raises ValueError for a
        mask that says more than which keys there are.
        """
        if masks.without_self:
            raise ValueError("linear keys never form the logits that would mask a token's own key")
        with _without_autocast(q.device):
            k = self._mixed(wide(keys), 0 if past is None else past.seen)
            if masks.attn_mask is not None:
                k = k.masked_fill(~_present(masks.attn_mask), 0)
            out = self._divided(self._phi(wide(q)), k, wide(v), masks.is_causal, past)
            if past is not None:
                past.add(k, wide(v))
            return out.to(v.dtype)

    def _phi(self, x: Tensor) -> Tensor:
        x = F.elu(x) + 1
        return x / x.sum(-1, keepdim=True) if self.part.features == "sum-to-one" else x

    def _mixed(self, keys: Tensor, first: int) -> Tensor:
        """sum_r pi_r phi(k_jr), or phi of the mixed key: (B, H, n, D), from position `first` on."""
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
        """The sum over keys, divided by what `divide_by` says."""
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
    """q_i.sum_{j <= i} k_j v_j, chunk by chunk: the chunks before come in as one D x D sum."""
    n = q.shape[-2]
    # A token decoded alone is a chunk of its own.
    size = CHUNK if n > 1 else 1
    q, k, v = (F.pad(x, (0, 0, 0, -n % size)).unflatten(-2, (-1, size)) for x in (q, k, v))
    sums = k.transpose(-1, -2) @ v
    before = sums.cumsum(2) - sums
    out = q @ before + (q @ k.transpose(-1, -2)).tril() @ v
    return out.flatten(-3, -2)[..., :n, :]


def _present(mask: Tensor) -> Tensor:
    """(B, 1 or H, n, 1), from the mask (B, 1 or H, 1, n) that says which keys there are."""
    if mask.dtype != torch.bool or mask.ndim < 2 or mask.shape[-2] != 1:
        raise ValueError("linear keys take a boolean mask of present keys only, (B, 1, 1, n)")
    return mask.transpose(-1, -2)


def _without_autocast(device: torch.device) -> contextlib.AbstractContextManager[None]:
    # Models are counted on the meta device, which knows no autocast.
    if device.type == "meta":
        return contextlib.nullcontext()
    return torch.autocast(device.type, enabled=False)


SIMILARITIES[spec.LinearConfig] = Linear
