"""The formulas of the parts in channel_parts.py, written to be compared with the papers' equations.

As those in lit_attn.attention.reference, they are slow, and tests compare the modules with them in
float64. `form` is the module, whose parameters the formula uses.

Shapes: B batch, n tokens, H heads, D head width.
"""

import math
from typing import Any

import torch
from torch import Tensor

from lit_attn.attention.multi_token import EPS as MULTI_TOKEN_EPS


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
    has_keys_before_only = form.part.choose_direction(is_causal) == "before"
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


def unfiltered(form: Any, logits: Tensor, visible: Tensor, present: Tensor | None) -> Tensor:
    return logits


def selective(form: Any, logits: Tensor, visible: Tensor, present: Tensor | None) -> Tensor:
    """Leviathan et al. 2024, section 3: each token's votes, added up query by query."""
    batch, _, n, _ = logits.shape
    shown = visible.expand(logits.shape)[:, 0]
    is_token = torch.ones(batch, n, dtype=torch.bool)
    if present is not None:
        is_token = present[:, 0]
    filtered = []
    for b in range(batch):
        tokens = [t for t in range(n) if is_token[b, t]]
        votes = logits.new_zeros(n)
        rows = []
        for i in range(n):
            rows.append(logits[b, :, i] - votes)
            if i not in tokens:
                continue
            can_lose = [j < i and j not in tokens[:1] and bool(shown[b, i, j]) for j in range(n)]
            vote = torch.tensor(can_lose)
            votes = votes + torch.where(vote, logits[b, 0, i].clamp_min(0), 0.0)
        filtered.append(torch.stack(rows, dim=1))
    return torch.stack(filtered)


def multi_token_logits(
    form: Any, logits: Tensor, visible: Tensor, present: Tensor | None
) -> Tensor:
    """Golovneva et al. 2025, section 3: the convolution of each head, then the map of the heads."""
    convolved = convolve_pairs(zero_hidden(logits, visible, present), form.logit_kernel)
    return torch.einsum("gh,bhij->bgij", form.logit_heads, convolved)


def multi_token_weights(
    form: Any, weights: Tensor, visible: Tensor, present: Tensor | None
) -> Tensor:
    """Golovneva et al. 2025, section 3: the same of the weights, with maps of groups of heads."""
    convolved = convolve_pairs(zero_hidden(weights, visible, present), form.weight_kernel)
    convolved = convolved.masked_fill(~visible, 0)
    group = form.weight_heads.shape[-1]
    mixed = []
    for number, matrix in enumerate(form.weight_heads):
        heads = convolved[:, number * group : (number + 1) * group]
        mixed.append(torch.einsum("gh,bhij->bgij", matrix, heads))
    return torch.cat(mixed, dim=1)


def multi_token_heads(form: Any, heads: Tensor) -> Tensor:
    """Golovneva et al. 2025, released code: RMSNorm with shared weights, times a gate of a head."""
    mean_square = heads.square().mean(-1, keepdim=True)
    normed = form.factor * form.norm * heads / (mean_square + MULTI_TOKEN_EPS).sqrt()
    if form.gate is None:
        return normed
    return normed / (1 + torch.exp(-form.gate(normed)))


def zero_hidden(a: Tensor, visible: Tensor, present: Tensor | None) -> Tensor:
    """Return a with 0 where a key is hidden, and in the rows of padding."""
    a = a.masked_fill(~visible, 0)
    if present is None:
        return a
    return a.masked_fill(~present.unsqueeze(-1), 0)


def convolve_pairs(a: Tensor, kernel: Tensor) -> Tensor:
    """Return sum over u, w of K[u, w] a[i - (C_q - 1) + u, j - (C_k - 1) / 2 + w] of each head."""
    queries, keys = kernel.shape[1:]
    n, m = a.shape[-2:]
    total = torch.zeros_like(a)
    for u in range(queries):
        for w in range(keys):
            down = queries - 1 - u
            right = (keys - 1) // 2 - w
            if down >= n or abs(right) >= m:
                # Everything would move out of the matrix.
                continue
            first, last = max(0, right), min(m, m + right)
            moved = torch.zeros_like(a)
            moved[..., down:, first:last] = a[..., : n - down, first - right : last - right]
            total = total + kernel[:, u, w].view(-1, 1, 1) * moved
    return total


def one_query(form: Any, x: Tensor, a: Tensor) -> Tensor:
    return a


def two_queries(form: Any, x: Tensor, q: Tensor) -> Tensor:
    """Differential attention, version 2: the queries 2m and 2m + 1 of head m."""
    second = form.projection(x).unflatten(-1, q.shape[-2:])
    queries = []
    for m in range(q.shape[-2]):
        queries += [q[..., m, :], second[..., m, :]]
    return torch.stack(queries, dim=-2)


def difference(form: Any, x: Tensor, a: Tensor) -> Tensor:
    """Differential attention, version 2: h_2m - sigmoid(x w_m) h_2m+1."""
    factors = 1 / (1 + torch.exp(-form.factor(x)))
    heads = []
    for m in range(factors.shape[-1]):
        subtracted = factors[..., m].unsqueeze(-1) * a[:, 2 * m + 1]
        heads.append(a[:, 2 * m] - subtracted)
    return torch.stack(heads, dim=1)
