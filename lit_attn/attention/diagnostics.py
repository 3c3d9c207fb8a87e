"""What the papers plot of an attention layer (docs/diagnostics.md).

Shapes: B batch, n tokens, d width, H heads, D head width, M keys for every token.
"""

import torch
from torch import Tensor

from lit_attn.attention.layer import Attention, Look
from lit_attn.attention.residual import projected

# Singular values below it do not count towards a rank (MGK, section 3.4).
TOLERANCE = 1e-6

# A vector shorter than this share of the one it was projected from is rounding: it has no angle.
NO_LENGTH = 1e-9


def residual(layer: Attention, look: Look, stream: Tensor) -> dict[str, Tensor]:
    """Norms of MH_i and Delta_i and cosines of their angles to X_i, each (B, n).

    Delta = MH - alpha V (BeliefFormer eq. 10), of every layer, whatever its residual part passes
    on. The angles are those of MH W and Delta W to `stream` (B, n, d), onto which the layer's
    output is added; NaN where one of the two has no length.
    """
    mh = look.heads.flatten(-2)
    delta = mh - projected(look.heads, look.values, "global").flatten(-2)
    found = {}
    for name, vector in (("mh", mh), ("delta", delta)):
        norm = vector.norm(dim=-1)
        through, x = vector @ layer.proj.weight.T, stream.norm(dim=-1)
        cosine = (through * stream).sum(-1) / (through.norm(dim=-1) * x)
        some = norm > NO_LENGTH * mh.norm(dim=-1)
        found[f"norm-{name}"] = norm
        found[f"cos-{name}"] = cosine.masked_fill(~some, torch.nan)
    return found


def ranks(weights: Tensor, present: Tensor) -> Tensor:
    """Singular values of at least 1e-6 of each attention matrix, (B, H), from (B, H, n, n).

    Rows and columns of tokens that are not `present` (B, n) are left out.
    """
    there = present[:, None, :, None] & present[:, None, None, :]
    return (torch.linalg.svdvals(weights * there) >= TOLERANCE).sum(-1)


def captured_variance(layer: Attention) -> dict[str, float]:
    """How few directions the heads of a layer share, in their QK and in their OV circuits.

    The product of the concatenated heads, W_Q W_K^T and W_V W (d x d): with its r largest singular
    values s, r the most it can have, the mean over k of sum_{i <= k} s_i^2 / sum_i s_i^2. It is 1
    where all heads do one thing in one direction and (r + 1) / 2r where every direction counts the
    same (Cordonnier et al. 2020, Fig. 1; DCMHA Fig. 5).

    Every key of a mixture is a circuit of its own, and so is z with itself.
    """
    heads, shared, width = layer.num_heads, layer.key_heads, layer.head_dim
    sizes = [heads * width, shared * width, shared * width]

    def of_heads(weight: Tensor) -> Tensor:
        """(shared D, d) -> (H D, d): head m has group m // (H / shared)."""
        groups = weight.unflatten(0, (shared, width))
        return groups.repeat_interleave(heads // shared, 0).flatten(0, 1)

    q, k, v = layer.qkv.weight.split(sizes)
    k, v = of_heads(k), of_heads(v)
    if (more := layer.similarity.extra_key_weights()) is not None:
        # The products of all keys, added up, are that of their sum.
        k = k + sum(of_heads(weight) for weight in more.split(shared * width))
    if layer.z is not None:
        q, k = torch.cat([q, layer.z.weight]), torch.cat([k, layer.z.weight])
    return {"qk": _captured(q.T, k), "ov": _captured(v.T, layer.proj.weight.T)}


def _captured(left: Tensor, right: Tensor) -> float:
    """Of the product of (d, r) and (r, d)."""
    most = min(left.shape)
    variance = torch.linalg.svdvals(left @ right)[:most].square()
    return float((variance.cumsum(0) / variance.sum()).mean())
