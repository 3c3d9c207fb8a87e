"""The attention layer in plain formulas, written to be read beside the papers' equations.

Slow, memory-hungry, and right: the tests hold the fast forms to this one, value and gradient, in
float64. Nothing is fused, no identity is used.

Shapes: n tokens, H heads, D head width, d = H D; q, k, v, z: (B, H, n, D); logits: (B, H, n, n).
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from lit_attn.attention import spec
from lit_attn.attention.layer import Attention
from lit_attn.attention.residual import FLOOR
from lit_attn.attention.rotary import Rotary


def attention(
    layer: Attention,
    x: Tensor,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    rotary: Rotary | None = None,
) -> Tensor:
    """What the layer computes of the same arguments, by definition; dropout is off. (B, n, d)."""
    n, heads = x.shape[1], layer.num_heads
    q, k, v = (split_heads(part, heads) for part in layer.qkv(x).chunk(3, dim=-1))
    q, k = layer.q_norm(q), layer.k_norm(k)
    if rotary is not None:
        q, k = rotate(q, rotary), rotate(k, rotary)

    logits = SIMILARITIES[type(layer.spec.similarity)](layer.similarity, q, k)
    if layer.z is not None:
        z = split_heads(layer.z(x), heads)
        logits = logits + z @ z.transpose(-1, -2) / math.sqrt(layer.head_dim)  # Belief2 (11)
    if layer.temperature is not None:
        # The learned temperature takes the place of 1 / sqrt(D); no token attends to itself.
        logits = logits * math.sqrt(layer.head_dim) * layer.temperature.exp()
        logits = logits.masked_fill(torch.eye(n, dtype=torch.bool), -math.inf)
    if is_causal:
        logits = logits.masked_fill(torch.ones(n, n).triu(1).bool(), -math.inf)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        logits = logits.masked_fill(~attn_mask, -math.inf)
    elif attn_mask is not None:
        logits = logits + attn_mask

    h = torch.softmax(logits, dim=-1) @ v  # H_m
    return RESIDUALS[type(layer.spec.residual)](layer.residual, h, v, layer.proj)


def split_heads(x: Tensor, heads: int) -> Tensor:
    """(B, n, d) -> (B, H, n, D)."""
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def concat(h: Tensor) -> Tensor:
    """(B, H, n, D) -> (B, n, d)."""
    return h.transpose(1, 2).flatten(-2)


def rotate(x: Tensor, rotary: Rotary) -> Tensor:
    """Su et al. 2021, section 3.2.2: coordinates j and j + D/2 as one complex number, turned."""
    first, second = x.chunk(2, dim=-1)
    turned = torch.complex(first, second) * torch.complex(*(part.to(x) for part in rotary))
    return torch.cat([turned.real, turned.imag], dim=-1)


def dot(form: Any, q: Tensor, k: Tensor) -> Tensor:
    """Vaswani et al. 2017, eq. 1."""
    return q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])


def alpha(h: Tensor, v: Tensor) -> Tensor:
    """BeliefFormer (10): <MH_i, V_i> / <V_i, V_i>; (B, n, 1)."""
    mh, vv = concat(h), concat(v)
    return (mh * vv).sum(-1, keepdim=True) / (vv * vv).sum(-1, keepdim=True).clamp_min(FLOOR)


def beta(h: Tensor, v: Tensor) -> Tensor:
    """BeliefFormer (13): the same within each head; (B, H, n, 1)."""
    return (h * v).sum(-1, keepdim=True) / (v * v).sum(-1, keepdim=True).clamp_min(FLOOR)


def along_values(h: Tensor, v: Tensor, scope: str) -> Tensor:
    """alpha V or concat of beta_m v_m; (B, n, d)."""
    return alpha(h, v) * concat(v) if scope == "global" else concat(beta(h, v) * v)


def full(form: Any, h: Tensor, v: Tensor, project: nn.Linear) -> Tensor:
    """BeliefFormer (8)."""
    return project(concat(h))


def perpendicular(form: Any, h: Tensor, v: Tensor, project: nn.Linear) -> Tensor:
    """BeliefFormer (12), with both scopes (15)."""
    across = concat(h) - along_values(h, v, "head")
    if form.part.scope == "head":
        return project(across)
    out = project(concat(h) - along_values(h, v, "global"))
    return out + form.local(across) if form.part.scope == "both" else out


def projected(form: Any, h: Tensor, v: Tensor, project: nn.Linear) -> Tensor:
    """Belief2, Fig. 3."""
    return project(along_values(h, v, form.part.scope))


def value(form: Any, h: Tensor, v: Tensor, project: nn.Linear) -> Tensor:
    """Belief2, Fig. 3."""
    return project(concat(v))


def discrepancy(form: Any, h: Tensor, v: Tensor, project: nn.Linear) -> Tensor:
    """AttentionX (9), (10)."""
    return project(form.part.gamma * concat(v) - concat(h))


def split(form: Any, h: Tensor, v: Tensor, project: nn.Linear) -> Tensor:
    """Belief2 (14), (15)."""
    along = along_values(h, v, form.part.scope)
    return project(concat(h) - along) + form.projected(form.activation(along))


SIMILARITIES: dict[type[spec.Similarity], Callable[..., Tensor]] = {spec.Dot: dot}

RESIDUALS: dict[type[spec.Residual], Callable[..., Tensor]] = {
    spec.Full: full,
    spec.Perpendicular: perpendicular,
    spec.Projected: projected,
    spec.Value: value,
    spec.Discrepancy: discrepancy,
    spec.Split: split,
}
