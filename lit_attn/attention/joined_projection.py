"""All projections of a layer's input as one product, for compiled code.

Shapes: B batch, n tokens, m tokens of the memory, d width, H heads, H' key heads, M keys for every
token, D head width.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lit_attn.attention.projections import is_plain


class Projected(NamedTuple):
    """Projections of a call: q and z (B, n, H, D), keys (B, m, M, H', D) and v (B, m, H', D)."""

    q: Tensor
    keys: Tensor
    v: Tensor
    z: Tensor | None


class HeadSizes(NamedTuple):
    """Numbers of heads of queries and of keys, and their width."""

    heads: int
    key_heads: int
    width: int


def can_project_together(qkv: nn.Linear, more: nn.Linear | None, z: nn.Linear | None) -> bool:
    """Return True if there are several projections, and all of them are plain.

    `more` is the projection to the second and further keys of a token.
    """
    further = [linear for linear in (more, z) if linear is not None]
    return len(further) > 0 and all(is_plain(linear) for linear in [qkv, *further])


def project_together(
    x: Tensor, qkv: nn.Linear, more: nn.Linear | None, z: nn.Linear | None, sizes: HeadSizes
) -> Projected:
    """Return all projections of x from one product, whose parts need no copies."""
    inner = sizes.heads * sizes.width
    shared = sizes.key_heads * sizes.width
    q_rows, k_rows, v_rows = qkv.weight.split([inner, shared, shared])
    # All keys of a token are neighbours.
    rows_of_keys = [k_rows] if more is None else [k_rows, more.weight]
    rows = [q_rows, *rows_of_keys, v_rows]
    if z is not None:
        rows.append(z.weight)
    bias = None
    if qkv.bias is not None:
        q_bias, k_bias, v_bias = qkv.bias.split([inner, shared, shared])
        biases_of_keys = [k_bias] if more is None else [k_bias, more.bias]
        biases = [q_bias, *biases_of_keys, v_bias]
        if z is not None:
            biases.append(q_bias.new_zeros(inner))
        bias = torch.cat(biases)
    outputs = F.linear(x, torch.cat(rows), bias).unflatten(-1, (-1, sizes.width))
    count_of_keys = sum(len(part) for part in rows_of_keys) // sizes.width
    counts = [sizes.heads, count_of_keys, sizes.key_heads]
    if z is not None:
        counts.append(sizes.heads)
    q, keys, v, *rest = outputs.split(counts, dim=-2)
    keys = keys.unflatten(-2, (-1, sizes.key_heads))
    return Projected(q=q, keys=keys, v=v, z=rest[0] if rest else None)
