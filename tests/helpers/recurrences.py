"""Recurrences of layers of flash-linear-attention, one token after the other, on any device."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

HEADS = 2


def convolved(x: Tensor, convolution: nn.Conv1d) -> Tensor:
    """Return SiLU of the causal convolution of each channel of x (B, n, channels)."""
    padded = F.pad(x.mT, (convolution.kernel_size[0] - 1, 0))
    channels = x.shape[-1]
    return F.silu(
        F.conv1d(padded, convolution.weight, convolution.bias, groups=channels).mT,
    )


def split_heads(x: Tensor) -> Tensor:
    """Return x (B, n, H E) as (B, H, n, E)."""
    return x.unflatten(-1, (HEADS, -1)).transpose(1, 2)


def join_heads(x: Tensor) -> Tensor:
    """Return x (B, H, n, E) as (B, n, H E)."""
    return x.transpose(1, 2).flatten(2)


def rms_normed(x: Tensor, norm: nn.Module) -> Tensor:
    """Return x with a mean square of 1 along its last dimension, times the weights."""
    weight = norm.weight
    assert isinstance(weight, Tensor)
    return x * (x.pow(2).mean(-1, keepdim=True) + 1e-5).rsqrt() * weight


def turned(x: Tensor) -> Tensor:
    """Return x (B, H, n, K) with its halves turned by t 10000^(-2 i / K) at token t."""
    half = x.shape[-1] // 2
    frequencies = 10000.0 ** (-torch.arange(half, dtype=torch.double) / half)
    angles = torch.arange(x.shape[2], dtype=torch.double).unsqueeze(-1) * frequencies
    first, second = x.chunk(2, dim=-1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def recurrence(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor | None) -> Tensor:
    """Return S_t^T q_t / sqrt(K) of all tokens; the decay is (B, H, n, K or 1).

    S_t = a_t S_(t-1) + k_t v_t^T. With `beta` (B, H, n, 1), v_t - a_t S_(t-1)^T k_t times beta_t
    replaces v_t.
    """
    state = q.new_zeros(*k.shape[:2], k.shape[-1], v.shape[-1])
    outputs = []
    for t in range(q.shape[2]):
        state = decay[:, :, t].unsqueeze(-1) * state
        value = v[:, :, t]
        if beta is not None:
            predicted = torch.einsum("bhk,bhkv->bhv", k[:, :, t], state)
            value = beta[:, :, t] * (value - predicted)
        state = state + torch.einsum("bhk,bhv->bhkv", k[:, :, t], value)
        outputs.append(torch.einsum("bhk,bhkv->bhv", q[:, :, t], state))
    return torch.stack(outputs, dim=2) * k.shape[-1] ** -0.5


def read_qkv(layer: Any, x: Tensor) -> tuple[Tensor, ...]:
    """Return q, k and v (B, n, channels) of one of fla's layers after their short convolutions."""
    return tuple(
        convolved(getattr(layer, f"{letter}_proj")(x), getattr(layer, f"{letter}_conv1d"))
        for letter in "qkv"
    )


def read_delta_parts(layer: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return q, k, v (B, H, n, E) and beta (B, H, n, 1) of a layer with a delta rule."""
    q, k, v = (split_heads(part) for part in read_qkv(layer, x))
    beta = split_heads(layer.b_proj(x)).sigmoid()
    return F.normalize(q, dim=-1), F.normalize(k, dim=-1), v, beta


def gated_delta(layer: Any, x: Tensor) -> Tensor:
    """Return the output of fla's GatedDeltaNet."""
    q, k, v, beta = read_delta_parts(layer, x)
    log_decay = -layer.A_log.exp() * F.softplus(layer.a_proj(x) + layer.dt_bias)
    output = recurrence(q, k, v, split_heads(log_decay).exp(), beta)
    normed = rms_normed(output, layer.o_norm)
    return layer.o_proj(join_heads(normed) * F.silu(layer.g_proj(x)))
