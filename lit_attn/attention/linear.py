"""Linear attention: running sums of features of the keys, without logits. O(n) time and memory.

Katharopoulos et al. 2020, "Transformers are RNNs", https://arxiv.org/abs/2006.16236; with several
keys MGK (Nguyen et al. 2022, https://arxiv.org/abs/2110.08678), section 2.4.

Shapes: B batch, n tokens, H heads, D head width, E width of the features, D with elu + 1.
"""

import math
from collections.abc import Callable
from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from lit_attn.attention.cache import Cache, RunningSums
from lit_attn.attention.call import Inputs
from lit_attn.attention.masks import Masks
from lit_attn.attention.mixture import MixedKeys, MixedKeysConfig
from lit_attn.attention.parts import LayerChoices, LayerShape
from lit_attn.attention.precision import wide, without_autocast
from lit_attn.schema.base import consistency_check

# Added to divisors as in MGK's code, because a query may see no key.
LINEAR_OFFSET = 1e-5

# Tokens of a chunk of causal sums. A chunk costs products of its pairs of tokens and one E x D sum,
# which are about as many numbers at usual head widths D for E = D.
SUMS_CHUNK = 64


class LinearConfig(MixedKeysConfig, kind="linear"):
    """phi(q_i).sum_r pi_r phi(k_jr): linear in n (MGK section 2.4).

    The feature maps phi of a vector t of the head's width D, by their sources:

    - elu: elu(t) + 1 (Katharopoulos et al. 2020, https://arxiv.org/abs/2006.16236, eq. 7), that of
      MGK's linear attention.
    - relu: max(t, 0) (Choromanski et al. 2021, https://arxiv.org/abs/2009.14794).
    - softmax: exp(t) divided by its sum over the D elements, as for the queries of efficient
      attention (Shen et al. 2021, https://arxiv.org/abs/1812.01243), whose keys are
      divided by a sum over the tokens instead, which has no causal form.
    - dpfp: the 2 D products of neighbours of r = [max(t, 0), max(-t, 0)], r_c r_(c - 1), where r_0
      is the last one (Schlag et al. 2021, https://arxiv.org/abs/2102.11174, section 5.3, nu = 1;
      MGK's language models extend its code).
    - taylor: [1, t', t'_a t'_b / sqrt(2)] with t' = t / D^(1/4), 1 + D + D^2 elements, so that
      phi(q).phi(k) = 1 + s + s^2 / 2 with s = q.k / sqrt(D), the second-order series of softmax's
      exp(s) (Arora et al. 2024, https://arxiv.org/abs/2402.18668).
    """

    has_logits = False
    keys: int = Field(1, ge=1, le=16, description="keys of every token, M")
    mixing: Literal["after", "before"] = Field(
        "after",
        description="order of mixing the keys and phi; after (paper) or before (released LRA code)",
    )
    phi: Literal["elu", "relu", "softmax", "dpfp", "taylor"] = Field(
        "elu",
        description="feature map; elu: elu + 1 (paper); relu, softmax over the head's width, dpfp: "
        "products of neighbours (fast weights), taylor: series of exp up to second order",
    )
    features: Literal["plain", "sum-to-one"] = Field(
        "plain",
        description="sum-to-one: phi divided by the sum of its elements (released LM code)",
    )
    divide_by: Literal["sum", "scaled-sum", "root-length"] = Field(
        "sum",
        description="divisor of the sum over keys; sum of the similarities (paper), or "
        "scaled-sum: that times sqrt(D), both plus 1e-5 sqrt(D) (released language model code); "
        "root-length: root of the number of tokens (released LRA code)",
    )

    @consistency_check
    def _makes_sense(self) -> None:
        if self.prior == "m-step":
            raise ValueError("prior: responsibilities need the logits that linear keys never form")
        if self.features == "sum-to-one" and self.phi == "softmax":
            raise ValueError("features: the elements of `phi: softmax` sum to one; remove it")
        if self.features == "sum-to-one" and self.phi == "taylor":
            raise ValueError(
                "features: elements of `phi: taylor` can be negative, and their sum near zero; "
                "remove it"
            )

    def reference_weights(
        self, module: Any, q: Tensor, keys: list[Tensor], visible: Tensor, is_causal: bool
    ) -> Tensor:
        """MGK section 2.4: phi(q_i).sum_r pi_r phi(k_jr) over its sum in j."""

        def phi(t: Tensor) -> Tensor:
            plain = make_features(module.part.phi, t)
            total = plain.sum(-1, keepdim=True)
            total = total.masked_fill(total == 0, 1.0)
            return plain / total if module.part.features == "sum-to-one" else plain

        (queries, width), n = q.shape[-2:], keys[0].shape[-2]
        weights = [
            self.reference_log_prior(module, r, n).exp().unsqueeze(-1) for r in range(len(keys))
        ]
        if module.part.mixing == "before":
            mixed = phi(torch.stack([w * key for w, key in zip(weights, keys, strict=True)]).sum(0))
        else:
            mixed = torch.stack([w * phi(key) for w, key in zip(weights, keys, strict=True)]).sum(0)
        similarity = (phi(q) @ mixed.transpose(-1, -2)).masked_fill(~visible, 0)
        factor = math.sqrt(width) if module.part.divide_by == "scaled-sum" else 1.0
        total = factor * similarity.sum(-1, keepdim=True) + LINEAR_OFFSET * math.sqrt(width)
        if module.part.divide_by == "root-length":
            lengths = [i + 1 if is_causal else n for i in range(queries)]
            total = torch.tensor(lengths).double().sqrt().unsqueeze(-1)
        return similarity / total

    def find_document_problem(self) -> str:
        return "adds up all earlier tokens"

    def check(self, layer: LayerChoices) -> None:
        reason = "linear keys never form the logits"
        if layer.compose.places():
            raise ValueError(f"compose: {reason} that it would compose")
        if layer.normaliser.kind != "softmax":
            raise ValueError(f"normaliser: {reason} that it would normalise")
        if layer.zz:
            raise ValueError(f"zz: {reason} to which it would add z_i.z_j")
        if layer.window:
            raise ValueError(f"window: {reason} that it would mask")
        scale = layer.parts["scale"]
        if scale.kind != "none":
            raise ValueError(f"scale: {reason} that '{scale.kind}' would multiply")
        bias = layer.parts["bias"]
        if bias.kind != "none":
            raise ValueError(f"bias: {reason} to which '{bias.kind}' would add")
        chosen_filter = layer.parts["filter"]
        if chosen_filter.kind != "none":
            raise ValueError(f"filter: {reason} that '{chosen_filter.kind}' would filter")

    def build(self, shape: LayerShape) -> Any:
        return Linear(self, shape)


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
        if adds_to_logits or mask.shape[-2] != 1:
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


def make_features(name: str, t: Tensor) -> Tensor:
    """Return the features of t (..., D); `LinearConfig` has their sources."""
    width = t.shape[-1]
    if name == "relu":
        return torch.where(t > 0, t, torch.zeros_like(t))
    if name == "softmax":
        exponentials = torch.exp(t - t.detach().amax(-1, keepdim=True))
        return exponentials / exponentials.sum(-1, keepdim=True)
    if name == "dpfp":
        r = [t[..., c] for c in range(width)]
        r += [-t[..., c] for c in range(width)]
        r = [torch.where(element > 0, element, torch.zeros_like(element)) for element in r]
        return torch.stack([r[c] * r[c - 1] for c in range(2 * width)], dim=-1)
    if name == "taylor":
        t = t / width**0.25
        elements = [torch.ones_like(t[..., 0])]
        elements += [t[..., a] for a in range(width)]
        for a in range(width):
            elements += [t[..., a] * t[..., b] / 2**0.5 for b in range(width)]
        return torch.stack(elements, dim=-1)
    return F.elu(t) + 1
