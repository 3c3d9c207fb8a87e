"""Attention with composed heads and its gradient, tile by tile in plain PyTorch.

The formulas and the order of steps are those of lit_attn/attention/kernels/composed_tiles.py, which
names the matrices A to D. A tile of pairs is (B, H, c, m).
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

QUERIES = 5
KEYS = 3


class Call(NamedTuple):
    """Inputs of one call: q, k (B, H, n, E), v (B, H, n, D), matrices (B, n, H, H) or None.

    `visible` is (B, H, n, n').
    """

    q: Tensor
    k: Tensor
    v: Tensor
    a: Tensor | None
    b: Tensor | None
    c: Tensor | None
    d: Tensor | None
    visible: Tensor
    scale: float

    def products(self, rows: slice, columns: slice) -> Tensor:
        """Return s of a tile."""
        return self.scale * self.q[:, :, rows] @ self.k[:, :, columns].mT

    def weights_before(self, rows: slice, columns: slice, lse: Tensor) -> Tensor:
        """Return p of a tile."""
        logits = compose(self.products(rows, columns), self.a, self.b, rows, columns)
        weights = (logits - lse[:, :, rows, None]).exp()
        return weights * self.visible[:, :, rows, columns]

    def gradient_of_weights(self, rows: slice, columns: slice, gradient: Tensor) -> Tensor:
        """Return da of a tile."""
        to_weights = gradient[:, :, rows] @ self.v[:, :, columns].mT
        return to_weights * self.visible[:, :, rows, columns]


def compose(
    x: Tensor, of_queries: Tensor | None, of_keys: Tensor | None, rows: slice, columns: slice
) -> Tensor:
    """Return (A_i + B_j) x of a tile, or x without matrices."""
    if of_queries is None and of_keys is None:
        return x
    out = torch.zeros_like(x)
    if of_queries is not None:
        out += torch.einsum("bigh,bhij->bgij", of_queries[:, rows], x)
    if of_keys is not None:
        out += torch.einsum("bjgh,bhij->bgij", of_keys[:, columns], x)
    return out


def compose_transposed(
    x: Tensor, of_queries: Tensor | None, of_keys: Tensor | None, rows: slice, columns: slice
) -> Tensor:
    """Return (A_i + B_j)^T x of a tile, or x without matrices."""
    queries = None if of_queries is None else of_queries.mT
    keys = None if of_keys is None else of_keys.mT
    return compose(x, queries, keys, rows, columns)


def tiles(tokens: int, size: int) -> Iterator[slice]:
    """Yield the tokens of every tile."""
    for start in range(0, tokens, size):
        yield slice(start, min(start + size, tokens))


def forward(call: Call) -> tuple[Tensor, Tensor]:
    """Return the sums o (B, H, n, D) and lse (B, H, n)."""
    n, keys = call.visible.shape[-2:]
    lse = call.q.new_zeros(call.q.shape[:3])
    out = call.v.new_zeros(*call.q.shape[:3], call.v.shape[-1])
    for rows in tiles(n, QUERIES):
        largest = torch.full_like(lse[:, :, rows], -torch.inf)
        total = torch.zeros_like(largest)
        for columns in tiles(keys, KEYS):
            logits = compose(call.products(rows, columns), call.a, call.b, rows, columns)
            hidden = ~call.visible[:, :, rows, columns]
            logits = logits.masked_fill(hidden, -torch.inf)
            new_largest = torch.maximum(largest, logits.amax(-1))
            shift = new_largest.masked_fill(new_largest == -torch.inf, 0)
            total = total * (largest - shift).exp() + (logits - shift[..., None]).exp().sum(-1)
            largest = new_largest
        is_empty = total == 0
        lse[:, :, rows] = (largest + total.log()).masked_fill(is_empty, 0)
        for columns in tiles(keys, KEYS):
            p = call.weights_before(rows, columns, lse)
            weights = compose(p, call.c, call.d, rows, columns)
            weights = weights * call.visible[:, :, rows, columns]
            out[:, :, rows] += weights @ call.v[:, :, columns]
    return out, lse


def backward(call: Call, gradient: Tensor, lse: Tensor) -> list[Tensor | None]:
    """Return the gradients of q, k, v and of the matrices A to D, for the `gradient` of o."""
    n, keys = call.visible.shape[-2:]
    to_q, to_k, to_v = (torch.zeros_like(x) for x in (call.q, call.k, call.v))
    to_matrices = [None if x is None else torch.zeros_like(x) for x in call[3:7]]
    to_a, to_b, to_c, to_d = to_matrices
    delta = torch.zeros_like(lse)
    for rows in tiles(n, QUERIES):
        for columns in tiles(keys, KEYS):
            p = call.weights_before(rows, columns, lse)
            to_weights = call.gradient_of_weights(rows, columns, gradient)
            to_p = compose_transposed(to_weights, call.c, call.d, rows, columns)
            delta[:, :, rows] += (p * to_p).sum(-1)
            if to_c is not None:
                to_c[:, rows] += torch.einsum("bgij,bhij->bigh", to_weights, p)
            if to_d is not None:
                to_d[:, columns] += torch.einsum("bgij,bhij->bjgh", to_weights, p)
        for columns in tiles(keys, KEYS):
            s = call.products(rows, columns)
            p = call.weights_before(rows, columns, lse)
            weights = compose(p, call.c, call.d, rows, columns)
            weights = weights * call.visible[:, :, rows, columns]
            to_weights = call.gradient_of_weights(rows, columns, gradient)
            to_p = compose_transposed(to_weights, call.c, call.d, rows, columns)
            to_logits = p * (to_p - delta[:, :, rows, None])
            to_s = compose_transposed(to_logits, call.a, call.b, rows, columns)
            to_q[:, :, rows] += call.scale * to_s @ call.k[:, :, columns]
            to_k[:, :, columns] += call.scale * to_s.mT @ call.q[:, :, rows]
            to_v[:, :, columns] += weights.mT @ gradient[:, :, rows]
            if to_a is not None:
                to_a[:, rows] += torch.einsum("bgij,bhij->bigh", to_logits, s)
            if to_b is not None:
                to_b[:, columns] += torch.einsum("bgij,bhij->bjgh", to_logits, s)
    return [to_q, to_k, to_v, *to_matrices]


class Tiled(torch.autograd.Function):
    """Sums of `forward` with the gradient of `backward`."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        out, lse = forward(Call(*inputs))
        ctx.save_for_backward(*inputs[:-1], lse)
        ctx.scale = inputs[-1]
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        *inputs, lse = ctx.saved_tensors
        gradients = backward(Call(*inputs, ctx.scale), gradient, lse)
        return (*gradients, None, None)
