"""Torch's attention kernels, forward and backward, called directly.

`scaled_dot_product_attention` keeps its kernel's inputs for the backward pass and does not return
the log-sum-exp. A direct call leaves both to the caller (lit_attn.attention.fused).

Shapes: B batch, n tokens, H heads, E width of q and k (B, H, n, E), F of v (B, H, n, F).
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.backends import cuda
from torch.nn.attention import SDPBackend

aten = torch.ops.aten


class Summed(NamedTuple):
    """Output of a kernel: weighted sums (B, H, n, E), log-sum-exp of each row (B, H, n or more).

    `seed` and `offset` belong to dropout, which is off; the backward kernel requires them.
    """

    out: Tensor
    lse: Tensor
    seed: Tensor
    offset: Tensor


def choose(q: Tensor, k: Tensor, is_causal: bool) -> SDPBackend:
    """Return the kernel for q, k and values of the same width: flash, memory-efficient or MATH.

    cuDNN's kernel is never returned, because its backward pass needs more than the output and the
    log-sum-exp.
    """
    if q.device.type != "cuda":
        return SDPBackend(torch._fused_sdp_choice(q, k, k, None, 0.0, is_causal))
    parameters = cuda.SDPAParams(q, k, k, None, 0.0, is_causal, False)
    if cuda.can_use_flash_attention(parameters):
        return SDPBackend.FLASH_ATTENTION
    if cuda.can_use_efficient_attention(parameters):
        return SDPBackend.EFFICIENT_ATTENTION
    return SDPBackend.MATH


def value_width(kernel: SDPBackend, queries: Tensor, v: Tensor) -> int:
    """Return the width of values that `kernel` requires: that of q, or a multiple of 8."""
    if kernel == SDPBackend.FLASH_ATTENTION:
        return queries.shape[-1]
    return round_up(v.shape[-1])


def forward(
    kernel: SDPBackend, q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float
) -> Summed:
    """Call `kernel` with values of width `value_width`."""
    none = q.new_empty(0)
    if kernel == SDPBackend.FLASH_ATTENTION and q.device.type == "cpu":
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, is_causal, scale=scale
        )
        return Summed(out, lse, none, none.clone())
    if kernel == SDPBackend.FLASH_ATTENTION:
        out, lse, *_, seed, offset, _ = aten._scaled_dot_product_flash_attention(
            q, k, v, 0.0, is_causal, False, scale=scale
        )
        return Summed(out, lse, seed, offset)
    if kernel == SDPBackend.EFFICIENT_ATTENTION:
        return Summed(
            *aten._scaled_dot_product_efficient_attention(
                q, k, v, None, True, 0.0, is_causal, scale=scale
            )
        )
    logits = _logits(q, k, is_causal, scale)
    lse = logits.logsumexp(-1)
    weights = (logits - lse.unsqueeze(-1)).exp().to(v.dtype)
    return Summed(weights @ v, lse, none, none.clone())


def backward(
    kernel: SDPBackend,
    gradient: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    summed: Summed,
    is_causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v, computed by the same `kernel`."""
    out, lse, seed, offset = summed
    dq: Tensor
    dk: Tensor
    dv: Tensor
    if kernel == SDPBackend.FLASH_ATTENTION and q.device.type == "cpu":
        dq, dk, dv = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            gradient, q, k, v, out, lse, 0.0, is_causal, scale=scale
        )
    elif kernel == SDPBackend.FLASH_ATTENTION:
        n = q.shape[2]
        dq, dk, dv = aten._scaled_dot_product_flash_attention_backward(
            gradient, q, k, v, out, lse, None, None, n, n, 0.0, is_causal, seed, offset, scale=scale
        )
    elif kernel == SDPBackend.EFFICIENT_ATTENTION:
        needed = [True, True, True, False]
        dq, dk, dv, _ = aten._scaled_dot_product_efficient_attention_backward(
            gradient, q, k, v, None, out, lse, seed, offset, 0.0, needed, is_causal, scale=scale
        )
    else:
        weights = (_logits(q, k, is_causal, scale) - lse.unsqueeze(-1)).exp()
        g = gradient.to(weights.dtype)
        along = (g * out).sum(-1, keepdim=True)
        to_logits = weights * (g @ v.to(g.dtype).transpose(-1, -2) - along) * scale
        dq, dk = to_logits @ k.to(g.dtype), to_logits.transpose(-1, -2) @ q.to(g.dtype)
        dv = weights.transpose(-1, -2) @ g
    return dq, dk, dv


def _logits(q: Tensor, k: Tensor, is_causal: bool, scale: float) -> Tensor:
    """Return the logits (B, H, n, n) in float32 or wider, for inputs that no kernel supports."""
    wide = torch.promote_types(q.dtype, torch.float32)
    logits = q.to(wide) @ k.to(wide).transpose(-1, -2) * scale
    if is_causal:
        future = torch.ones(logits.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        logits = logits.masked_fill(future, -math.inf)
    return logits


def round_up(width: int) -> int:
    """Return the least multiple of 8 that is at least `width`, as GPU kernels require."""
    return width + -width % 8
