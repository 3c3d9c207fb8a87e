"""Projections to q, k, v and the output in the form of our layer.

Shapes: B batch, n tokens, H heads, D head width.
"""

import copy
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Projections(NamedTuple):
    """Projections and options of a self-attention module, apart from masks and positions.

    `qkv` has the rows of all query heads, then of the key heads for keys and for values.
    `scale` multiplies the logits; None means 1 / sqrt(D).
    """

    heads: int
    qkv: nn.Linear
    proj: nn.Linear
    key_heads: int | None = None
    q_norm: nn.Module | None = None
    k_norm: nn.Module | None = None
    attn_drop: float = 0.0
    proj_drop: float = 0.0
    scale: float | None = None


def join(*parts: nn.Linear) -> nn.Linear:
    """Return a Linear with the outputs of all `parts`: q, k, v, or some of them joined already.

    Raises ValueError if some parts have a bias, other than the first and the last one of three.
    """
    if len(parts) == 1:
        return linear(parts[0].weight, parts[0].bias)
    weight = torch.cat([part.weight for part in parts])
    biases = [part.bias for part in parts]
    if all(bias is None for bias in biases):
        return linear(weight, None)
    if biases[0] is None or biases[-1] is None:
        raise ValueError("some of its projections to q, k and v have a bias and others have none")
    if None in biases:
        return QueryValueLinear(linear(weight, None), biases[0], biases[-1])
    return linear(weight, torch.cat(tuple(biases)))


def by_head(qkv: nn.Linear, heads: int, key_heads: int | None = None) -> nn.Linear:
    """Return `qkv`, whose rows are q, k and v of each head in turn, with rows q, k, v.

    With `key_heads`, the rows are the queries of the heads that share a key head, then its k and v.
    """
    key_heads = key_heads or heads
    rows = torch.arange(qkv.out_features).view(key_heads, heads // key_heads + 2, -1)
    q = rows[:, :-2].flatten()
    k = rows[:, -2].flatten()
    v = rows[:, -1].flatten()
    order = torch.cat([q, k, v])
    bias = None if qkv.bias is None else qkv.bias[order]
    return linear(qkv.weight[order], bias)


def linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    """Return a Linear with `weight` (outputs, inputs) and `bias`.

    Parameters are used as they are, so that what else holds them stays tied to them; other tensors
    are copied.
    """
    new = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    new.weight = as_parameter(weight)
    if bias is not None:
        new.bias = as_parameter(bias)
    return new


def as_parameter(tensor: Tensor) -> nn.Parameter:
    """Return a parameter as it is, or a copy of another tensor as a parameter."""
    if isinstance(tensor, nn.Parameter):
        return tensor
    return nn.Parameter(tensor.detach().clone())


class QueryValueLinear(nn.Linear):
    """Projection to q, k and v in which k has no bias (BEiT, EVA)."""

    def __init__(self, qkv: nn.Linear, q_bias: nn.Parameter, v_bias: nn.Parameter) -> None:
        super().__init__(qkv.in_features, qkv.out_features, bias=False, device="meta")
        self.weight = qkv.weight
        self.q_bias = q_bias
        self.v_bias = v_bias

    def forward(self, x: Tensor) -> Tensor:
        k_rows = self.out_features - len(self.q_bias) - len(self.v_bias)
        k_bias = self.q_bias.new_zeros(k_rows)
        bias = torch.cat([self.q_bias, k_bias, self.v_bias])
        return F.linear(x, self.weight, bias)


class NormedLinear(nn.Linear):
    """Output projection after a norm of all heads."""

    def __init__(self, norm: nn.Module, proj: nn.Linear) -> None:
        super().__init__(proj.in_features, proj.out_features, device="meta")
        self.weight = proj.weight
        self.bias = proj.bias
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.norm(x), self.weight, self.bias)


class ScaledNorm(nn.Module):
    """Norm of queries whose output is multiplied by a constant, (..., D) -> (..., D)."""

    def __init__(self, norm: nn.Module, factor: float) -> None:
        super().__init__()
        self.norm = norm
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x) * self.factor


class JointNorm(nn.Module):
    """Norm over all heads at once, (..., H, D) -> (..., H, D)."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x.flatten(-2)).view_as(x)


@torch.no_grad()
def scale_queries(qkv: nn.Linear, rows: int, factor: float) -> nn.Linear:
    """Return a copy of `qkv` whose first `rows` outputs, the queries, are multiplied by `factor`.

    The caller's module may be the original's, which must stay unchanged.
    """
    scaled = copy.deepcopy(qkv)
    for name, parameter in scaled.named_parameters():
        if name != "v_bias":
            parameter[:rows] *= factor
    return scaled
