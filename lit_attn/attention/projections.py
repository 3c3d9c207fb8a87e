"""Products with several Linears at once, which call the Linears where a product would differ.

A Linear's weight is not always what its call multiplies by: pruning, weight norm, spectral norm and
adapters change the weight or the output when the module is called, and a subclass may round it.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import TypeVar

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
