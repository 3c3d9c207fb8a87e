"""Precision of products and sums: float32 accumulation, autocast, and sums of rounded terms."""

import torch
from torch import Tensor

# Factor of the coarse term of a sum in float16: a power of two, so products with it are exact.
COARSE = 1024.0


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


def keeps_range(x: Tensor) -> bool:
    """Return False in float16, where logits and squares of finite features can overflow."""
    return x.dtype != torch.float16


def multiply(equation: str, q: Tensor, k: Tensor, scale: float) -> Tensor:
    """Return `scale` times `torch.einsum` of features.

    Products of float16 features are computed in float32, under autocast too.
    """
    if keeps_range(q):
        return torch.einsum(equation, q * scale, k)
    with without_autocast(q):
        return torch.einsum(equation, wide(q) * scale, wide(k))


def multiplies_in_tf32(x: Tensor) -> bool:
    """Return True if products of x may be rounded to TF32, which has the bits of a bfloat16."""
    return x.is_cuda and x.dtype == torch.float32


def rounded_terms(x: Tensor, like: Tensor) -> list[tuple[float, Tensor]]:
    """Return factors and terms of `like`'s precision: the sum of the products is x.

    If `like` is coarser than x, the terms are x rounded and the rest: in bfloat16 alone, |k|^2 / 2
    of a few dozen would be off by a quarter, and so would the logit. Three terms of bfloat16 have
    the 24 bits of float32, which a bias of thousands needs. In float16 one of three terms has the
    factor `COARSE`, because |k|^2 / 2 overflows from |k| = 362. Up to |k| = 11,585 the sum is exact
    to 22 bits; a larger x is limited to the largest sum.
    """
    is_rounded_to_tf32 = multiplies_in_tf32(like)
    if like.dtype == x.dtype and not is_rounded_to_tf32:
        return [(1.0, x)]
    if like.dtype == torch.bfloat16 or is_rounded_to_tf32:
        return _bfloat16_terms(x, like.dtype)
    terms = []
    if not keeps_range(like):
        limit = COARSE * torch.finfo(like.dtype).max
        x = x.clamp(-limit, limit)
        # `trunc` has no gradient: the gradient passes through the other terms, without the factor,
        # with which it would overflow.
        coarse = (x / COARSE).trunc().to(like.dtype)
        x = x - COARSE * coarse.to(x.dtype)
        terms.append((COARSE, coarse))
    high = x.to(like.dtype)
    rest = (x - high.to(x.dtype)).to(like.dtype)
    return [*terms, (1.0, high), (1.0, rest)]


def _bfloat16_terms(x: Tensor, dtype: torch.dtype) -> list[tuple[float, Tensor]]:
    """Return three terms of type `dtype` with the bits of a bfloat16 each, whose sum is x.

    All columns of the same factor have one gradient, so the first one passes it on alone.
    """
    rest = x.detach()
    terms = []
    for _ in range(3):
        term = rest.to(torch.bfloat16).to(x.dtype)
        rest = rest - term
        terms.append(term)
    # The gradient of a cast to bfloat16 would be a bfloat16, also where `dtype` is float32.
    terms[0] = x + (terms[0] - x.detach())
    return [(1.0, term.to(dtype)) for term in terms]
