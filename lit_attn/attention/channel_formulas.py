"""The formulas of the parts in channel_parts.py, written to be compared with the papers' equations.

As those in lit_attn.attention.reference, they are slow, and tests compare the modules with them in
float64. `form` is the module, whose parameters the formula uses.

Shapes: B batch, n tokens, H heads, D head width.
"""

import math
from typing import Any

import torch
from torch import Tensor


def unchanged(form: Any, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return q, k, v


def linear_transform(form: Any, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Knocking heads, linear: one D x D matrix for all heads of q, k and v."""
    mapped = []
    for name, vectors in (("q", q), ("k", k), ("v", v)):
        if name in form.part.maps:
            vectors = torch.einsum("bnhd,de->bnhe", vectors, form.matrices[name])
        mapped.append(vectors)
    return mapped[0], mapped[1], mapped[2]


def mlp_transform(form: Any, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Knocking heads, MLP: 2 (v W_up * sigmoid(v W_gate)) W_down."""
    up = torch.einsum("bnhd,de->bnhe", v, form.up)
    gate = 1 / (1 + torch.exp(-torch.einsum("bnhd,de->bnhe", v, form.gate)))
    return q, k, 2 * torch.einsum("bnhd,de->bnhe", up * gate, form.down)


def own_values(form: Any, v: Tensor, first: Tensor) -> Tensor:
    return v


def mixed_values(form: Any, v: Tensor, first: Tensor) -> Tensor:
    """Value residual: lambda_1 v^(0) + lambda_2 v."""
    if form.part.learned:
        return form.factors[0] * first + form.factors[1] * v
    return form.part.first * first + form.part.layer * v


def unscaled(form: Any, visible: Tensor, n: int) -> float:
    return 1.0


def ssmax(form: Any, visible: Tensor, n: int) -> Tensor:
    """SSMax: c_m log(n_i)."""
    count = visible.expand(*visible.shape[:-1], n).sum(-1, keepdim=True)
    return form.strength.view(-1, 1, 1) * count.clamp_min(1).double().log()


def no_bias(form: Any, x: Tensor, is_causal: bool, present: Tensor | None) -> Tensor:
    return x.new_zeros(1, 1, x.shape[1], x.shape[1])


def alibi(form: Any, x: Tensor, is_causal: bool, present: Tensor | None) -> Tensor:
    """Press et al. 2022, section 3, pair by pair."""
    n = x.shape[1]
    heads = len(form.slopes)
    bias = x.new_zeros(1, heads, n, n)
    for m in range(heads):
        for i in range(n):
            for j in range(n):
                bias[0, m, i, j] = -slope(m, heads) * abs(i - j)
    return bias


def slope(m: int, heads: int) -> float:
    """Return the slope of head `m`, counted from 0."""
    lower = 1
    while 2 * lower <= heads:
        lower *= 2
    if m < lower:
        return 1 / 2 ** (8 * (m + 1) / lower)
    return 1 / 2 ** (8 * (2 * (m - lower) + 1) / (2 * lower))


def t5_bias(form: Any, x: Tensor, is_causal: bool, present: Tensor | None) -> Tensor:
    """Raffel et al. 2020: the bucket of each pair of positions, one by one."""
    n = x.shape[1]
    has_keys_before_only = form.part.direction == "before"
    rows = []
    for i in range(n):
        numbers = [
            t5_bucket(j - i, has_keys_before_only, form.part.buckets, form.part.max_distance)
            for j in range(n)
        ]
        rows.append(form.table[numbers])
    return torch.stack(rows).permute(2, 0, 1).unsqueeze(0)


def t5_bucket(relative: int, has_keys_before_only: bool, buckets: int, max_distance: int) -> int:
    """Return the bucket of a key that is `relative` positions after its query."""
    first = 0
    if has_keys_before_only:
        length = max(-relative, 0)
    else:
        buckets //= 2
        first = buckets if relative > 0 else 0
        length = abs(relative)
    exact = buckets // 2
    if length < exact:
        return first + length
    steps = math.log(length / exact) / math.log(max_distance / exact) * (buckets - exact)
    return first + min(exact + math.floor(steps), buckets - 1)


def forgetting(form: Any, x: Tensor, is_causal: bool, present: Tensor | None) -> Tensor:
    """Lin et al. 2025, eq. 5-7: the sum of log f_t between two tokens, pair by pair."""
    # log sigmoid, which is finite for any gate
    log_gates = -torch.nn.functional.softplus(-form.gate(x))
    if present is not None:
        log_gates = log_gates * present.transpose(1, 2)
    n = x.shape[1]
    rows = []
    for i in range(n):
        row = [log_gates[:, min(i, j) + 1 : max(i, j) + 1].sum(1) for j in range(n)]
        rows.append(torch.stack(row, dim=-1))
    return torch.stack(rows, dim=2)


def ungated(form: Any, x: Tensor, signal: Tensor) -> Tensor:
    return signal


def sigmoid_gate(form: Any, x: Tensor, signal: Tensor) -> Tensor:
    """Qiu et al. 2025, section 2.2: signal * sigmoid(x W_g + b)."""
    read = x if form.part.columns is None else x[..., : form.part.columns]
    gates = form.part.factor / (1 + torch.exp(-form.linear(read)))
    parts = signal.unflatten(-1, (gates.shape[-1], -1))
    return (parts * gates.unsqueeze(-1)).flatten(-2)
