"""Products with several Linears at once, which call the Linears where a product would differ.

A Linear's weight is not always what its call multiplies by: pruning, weight norm, spectral norm and
adapters change the weight or the output when the module is called, and a subclass may round it.

Shapes: B batch, n tokens, m tokens of the memory, d width, H heads, H' key heads, M keys for every
token, D head width.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lit_attn.private_names.of_torch import has_hooks

Key = TypeVar("Key")


def is_plain(linear: nn.Module) -> bool:
    """Return True if calling `linear` only multiplies by its weight and adds its bias."""
    # A parametrised module has another class, and pruning is a hook.
    is_linear = type(linear) is nn.Linear
    return is_linear and not has_hooks(linear) and "forward" not in vars(linear)


def multiply_together(x: Tensor, linears: Mapping[Key, nn.Linear]) -> dict[Key, Tensor]:
    """Return the output of every Linear for x (..., d), by its key; the Linears have no biases.

    It is one product if all are plain: several with few columns take 1.7 times as long.
    """
    if not all(is_plain(linear) for linear in linears.values()):
        return {key: linear(x) for key, linear in linears.items()}
    weights = [linear.weight for linear in linears.values()]
    outputs = F.linear(x, torch.cat(weights)).split([len(weight) for weight in weights], -1)
    return dict(zip(linears, outputs, strict=True))


def split_outputs(
    linear: nn.Linear, first_input: Tensor, second_input: Tensor, first_count: int
) -> tuple[Tensor, Tensor]:
    """Return the first `first_count` outputs for one input, and the other outputs for another.

    Only a plain Linear can leave the unused outputs out.
    """
    if not is_plain(linear):
        return linear(first_input)[..., :first_count], linear(second_input)[..., first_count:]
    weight, bias = linear.weight, linear.bias
    first_bias = None if bias is None else bias[:first_count]
    second_bias = None if bias is None else bias[first_count:]
    first = F.linear(first_input, weight[:first_count], first_bias)
    second = F.linear(second_input, weight[first_count:], second_bias)
    return first, second


def add_outputs(linears: Sequence[nn.Linear], inputs: Sequence[Tensor]) -> Tensor:
    """Return the sum of the outputs of several Linears of one width, each for its own input.

    In compiled code it is one product with all inputs side by side, if all Linears are plain: the
    outputs are not written one by one. Uncompiled, the copies side by side would cost more.
    """
    if not torch.compiler.is_compiling() or not all(is_plain(linear) for linear in linears):
        outputs = [linear(x) for linear, x in zip(linears, inputs, strict=True)]
        return functools.reduce(torch.add, outputs)
    weight = torch.cat([linear.weight for linear in linears], 1)
    biases: list[Tensor] = [linear.bias for linear in linears if linear.bias is not None]
    bias = functools.reduce(torch.add, biases) if biases else None
    return F.linear(torch.cat(list(inputs), -1), weight, bias)


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
