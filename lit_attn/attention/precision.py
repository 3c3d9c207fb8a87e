"""Precision of products and sums: float32 accumulation, autocast, and sums of rounded terms."""

import torch
from torch import Tensor


def wide(x: Tensor) -> Tensor:
    """Return x in float32, or in float64 if x is float64."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def square(x: Tensor) -> Tensor:
    """Return |x|^2 in float32 or wider, (..., 1)."""
    return wide(x).square().sum(-1, keepdim=True)


def without_autocast(x: Tensor) -> torch.autocast:
    """Return a context without autocast on the device of x."""
    # The meta device, on which parameters and FLOPs are counted, has no autocast.
    return torch.autocast("cpu" if x.is_meta else x.device.type, enabled=False)


def as_multiplied(x: Tensor) -> Tensor:
    """Return x in the precision in which autocast, if it is enabled, multiplies matrices."""
    kind = x.device.type
    # Parameters and FLOPs are counted on the meta device, which has no autocast.
    if x.dtype == torch.float32 and kind != "meta" and torch.is_autocast_enabled(kind):
        return x.to(torch.get_autocast_dtype(kind))
    return x


def rounded_terms(x: Tensor, like: Tensor) -> list[Tensor]:
    """Return terms of `like`'s precision with the sum x: x rounded and, if it is coarser, the rest.

    In bfloat16 alone, |k|^2 / 2 of a few dozen would be off by a quarter, and so would the logit.
    """
    high = x.to(like.dtype)
    if high.dtype == x.dtype:
        return [high]
    return [high, (x - high.to(x.dtype)).to(like.dtype)]
