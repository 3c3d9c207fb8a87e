"""Linear attention: running sums of features of the keys, without logits. O(n) time and memory.

Katharopoulos et al. 2020, "Transformers are RNNs", https://arxiv.org/abs/2006.16236; with several
keys MGK (Nguyen et al. 2022, https://arxiv.org/abs/2110.08678), section 2.4.

Shapes: B batch, n tokens, H heads, D head width, E width of the features, D with elu + 1.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from lit_attn.attention.cache import Cache, RunningSums
from lit_attn.attention.call import Inputs
from lit_attn.attention.masks import Masks
from lit_attn.attention.mixture import MixedKeys
from lit_attn.attention.mixture_parts import LinearConfig
from lit_attn.attention.parts import LayerShape
from lit_attn.attention.precision import wide, without_autocast

# Added to divisors as in MGK's code, because a query may see no key.
LINEAR_OFFSET = 1e-5

# Tokens of a chunk of causal sums. A chunk costs products of its pairs of tokens and one E x D sum,
# which are about as many numbers at usual head widths D for E = D.
SUMS_CHUNK = 64


class Linear(MixedKeys):
    """Attention as running sums of phi(k_j) v_j^T and phi(k_j), without logits."""

    part: LinearConfig

    def __init__(self, part: LinearConfig, shape: LayerShape) -> None:
        super().__init__(part, shape)
        self.head_dim = shape.head_dim

    def attend(self, inputs: Inputs) -> Tensor:
        """Return the weighted sums (B, H, n, D), and add the tokens to the cache's running sums.

        Computed in float32 under autocast too: sums over thousands of tokens overflow or lose half
        precision. Raises ValueError for a mask of pairs of tokens.
        """
        past = inputs.cache
        masks = inputs.masks
        assert past is None or isinstance(past, RunningSums)
        if masks.without_self:
            raise ValueError("linear keys never form the logits that would mask a token's own key")
        is_masked = masks.visibility is not None
        if past is not None and is_masked and not masks.is_cross:
            raise ValueError("linear keys need causal attention without a mask for a cache")
        keys = inputs.shared(inputs.keys)
        v = inputs.shared(inputs.v.transpose(1, 2))
        first = 0 if past is None else past.position
        with without_autocast(v):
            k = self._mixed(wide(keys), first)
            present = self._present_keys(masks)
            if present is not None:
                # Later calls for the same memory have its mask and no new keys.
                k = k.masked_fill(~present[..., : k.shape[-2], :], 0)
            q = self._phi(wide(inputs.q))
            out = self._divided(q, k, wide(v), masks.is_causal, past)
            if past is not None:
                past.add(k, wide(v))
            return out.to(v.dtype)

    def _present_keys(self, masks: Masks) -> Tensor | None:
        """Return (B, H, n, 1) or smaller, False where a key is padding; None without a mask.

        Raises ValueError for a mask of pairs of tokens and for a bias, except on the meta device,
        where a bias cannot be read.
        """
        mask = masks.visibility
        if mask is None:
            return None
        adds_to_logits = masks.bias is not None and not mask.is_meta and bool(masks.bias.any())
        if adds_to_logits or mask.ndim < 2 or mask.shape[-2] != 1:
            raise ValueError(
                "linear keys take a mask of present keys, (B, 1, 1, n), without a bias: "
                "they never form the logits of pairs of tokens"
            )
        return mask.transpose(-1, -2)

    def describe_call(self, inputs: Inputs) -> None:
        """Return None: running sums are no path of lit_attn.attention.dispatch."""

    def weights(self, inputs: Inputs) -> Tensor:
        """Return the weights (B, H, n, n): the sums of values that are unit vectors."""
        n = inputs.keys.shape[-2]
        v = inputs.v
        unit = torch.eye(n, dtype=v.dtype, device=v.device)
        unit_values = unit.unsqueeze(1).expand(len(v), n, 1, n)
        return self.attend(inputs._replace(v=unit_values))

    def new_cache(self, window: int | None) -> Cache:
        return RunningSums()

    def _phi(self, x: Tensor) -> Tensor:
        """Return phi of x (..., D), divided by its sum with `features: sum-to-one`; (..., E)."""
        x = FEATURE_MAPS[self.part.phi](x)
        if self.part.features == "plain":
            return x
        # In float32, elu + 1 of a number below -17 is 0. If phi of a token is 0, it stays 0.
        total = x.sum(-1, keepdim=True)
        return x / total.masked_fill(total == 0, 1.0)

    def _mixed(self, keys: Tensor, first: int) -> Tensor:
        """Return sum_r pi_r phi(k_jr), or phi of the mixed key (B, H, n, E)."""
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
        before = 0 if past is None else past.position
        n = before + k.shape[-2]
        root = math.sqrt(self.head_dim)
        if is_causal:
            out, total = causal_sums(q, k, v)
        else:
            out = q @ (k.transpose(-1, -2) @ v)
            total = q @ k.sum(-2).unsqueeze(-1)
        if past is not None and past.products is not None:
            out = out + q @ past.products
        if self.part.divide_by == "root-length":
            if not is_causal:
                return out / math.sqrt(n)
            lengths = torch.arange(before + 1, n + 1, dtype=q.dtype, device=q.device)
            return out / lengths.sqrt().unsqueeze(-1)
        if past is not None and past.keys is not None:
            total = total + q @ past.keys.transpose(-1, -2)
        if self.part.divide_by == "scaled-sum":
            total = total * root
        return out / (total + LINEAR_OFFSET * root)


def shifted_elu(x: Tensor) -> Tensor:
    """Return elu(x) + 1."""
    return F.elu(x) + 1


def softmax_of_elements(x: Tensor) -> Tensor:
    """Return the softmax over the elements of each vector (..., D)."""
    return x.softmax(-1)


def products_of_neighbours(x: Tensor) -> Tensor:
    """Return the products of neighbours of [relu(x), relu(-x)], (..., 2 D), of x (..., D)."""
    rectified = torch.cat([x.relu(), (-x).relu()], -1)
    return rectified * rectified.roll(1, -1)


def second_order_series(x: Tensor) -> Tensor:
    """Return [1, x', x'_a x'_b / sqrt(2)] with x' = x / D^(1/4), (..., 1 + D + D^2)."""
    x = x / x.shape[-1] ** 0.25
    pairs = (x.unsqueeze(-1) * x.unsqueeze(-2)).flatten(-2)
    return torch.cat([torch.ones_like(x[..., :1]), x, pairs / math.sqrt(2)], -1)


FEATURE_MAPS: dict[str, Callable[[Tensor], Tensor]] = {
    "elu": shifted_elu,
    "relu": F.relu,
    "softmax": softmax_of_elements,
    "dpfp": products_of_neighbours,
    "taylor": second_order_series,
}
"""Feature maps by the value of `phi`, (..., D) -> (..., E)."""


def causal_sums(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return q_i.sum_{j <= i} k_j v_j^T (B, H, n, D) and q_i.sum_{j <= i} k_j (B, H, n, 1).

    q and k are features (B, H, n, E). Chunk by chunk: earlier chunks enter as one E x D sum of
    products and one sum of keys.
    """
    n = q.shape[-2]
    # One decoded token is a chunk of one token.
    size = SUMS_CHUNK if n > 1 else 1
    q = _cut_into_chunks(q, size)
    k = _cut_into_chunks(k, size)
    v = _cut_into_chunks(v, size)
    similarities = (q @ k.transpose(-1, -2)).tril()
    products = k.transpose(-1, -2) @ v
    key_sums = k.sum(-2).unsqueeze(-1)
    out = q @ (products.cumsum(2) - products) + similarities @ v
    total = q @ (key_sums.cumsum(2) - key_sums) + similarities.sum(-1, keepdim=True)
    return out.flatten(-3, -2)[..., :n, :], total.flatten(-3, -2)[..., :n, :]


def _cut_into_chunks(x: Tensor, size: int) -> Tensor:
    """Return x (B, H, n, E) as (B, H, chunks, size, E), with zeros after the last token."""
    missing = -x.shape[-2] % size
    return F.pad(x, (0, 0, 0, missing)).unflatten(-2, (-1, size))
