"""Calls that the kernels of flex_attention support.

The kernels are called by lit_attn.attention.flex, whose import takes half a second; a command that
reads a study imports this file alone.
"""

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor

# Widths of features and values that the kernels support. Wider ones need more shared memory in the
# backward pass than consumer cards have.
NARROWEST, WIDEST = 16, 256

DTYPES = (torch.float16, torch.bfloat16, torch.float32)

_LEFT_OUT: list[bool] = []
"""Has an entry for each active `left_out`."""


@contextlib.contextmanager
def left_out() -> Iterator[None]:
    """Compute without flex_attention in this context."""
    _LEFT_OUT.append(True)
    try:
        yield
    finally:
        _LEFT_OUT.pop()


def supports(q: Tensor, features: int, width: int) -> bool:
    """Return True if the kernels support queries like q, `features` and values of `width`.

    A single query, as in decoding, needs no kernel, which would be compiled for growing lengths.
    """
    if _LEFT_OUT:
        return False
    is_in_range = NARROWEST <= features <= WIDEST and NARROWEST <= width <= WIDEST
    has_kernel = q.device.type == "cuda" and q.dtype in DTYPES and is_in_range
    return has_kernel and q.shape[-2] > 1
