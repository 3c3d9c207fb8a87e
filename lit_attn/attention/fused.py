"""Softmax attention with logits q.k + z.z or with several keys for every token, by flash attention.

Flash attention requires one q, one k and one v of the same width: [q|z], [k|z] and padded values.
Kept for the backward pass, these copies would take half of a block's memory again. This module
makes them for one slice of the batch at a time, in the forward and again in the backward pass, and
keeps only its inputs. M keys are one kernel call with the values repeated, or, if attention is
causal, M calls merged by their log-sum-exp, since kernels know the causal order of n keys alone.
The backward kernels use the merged output and log-sum-exp, because a weight is
exp(logit - log-sum-exp) for every key.

Forward and backward are torch operators, so the same tensors are kept when compiled. They call
torch's kernels directly, because `scaled_dot_product_attention` keeps its inputs for the backward
pass and does not return the log-sum-exp.

Shapes: B batch, n tokens, H heads, M keys for every token, E width of the features, D of z and v.
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.backends import cuda
from torch.nn import functional as F
from torch.nn.attention import SDPBackend

from lit_attn.attention.derivatives import raise_no_second, refuse_forward_mode
from lit_attn.attention.masks import in_chunks
from lit_attn.attention.precision import wide
from lit_attn.private_names import of_torch as kernels

# Bytes of [k|z] in a slice: few, because the joined inputs need memory, but on a GPU enough to
# occupy it.
SLICE = 1 << 20
GPU_SLICE = 1 << 25

Index = tuple[slice, ...]


class Summed(NamedTuple):
    """Output of a kernel: weighted sums (B, H, n, E), log-sum-exp of each row (B, H, n or more).

    `seed` and `offset` belong to dropout, which is off; the backward kernel requires them.
    """

    out: Tensor
    lse: Tensor
    seed: Tensor
    offset: Tensor


def attend(
    q: Tensor, k: Tensor, z: Tensor | None, v: Tensor, is_causal: bool, scale: float
) -> Tensor:
    """Return softmax(scale (q.k + z.z)) over all M n keys, times v: (B, H, n, D).

    q (B, H, n, E), k (B, H, M, n, E), z and v (B, H, n, D), of one dtype. Raises RuntimeError for
    second derivatives and for derivatives in forward mode.
    """
    refuse_forward_mode(q, k, z, v)
    return _attend(q, k, z, v, is_causal, scale)[0]


@torch.library.custom_op("lit_attn::attend", mutates_args=())
def _attend(
    q: Tensor, k: Tensor, z: Tensor | None, v: Tensor, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    out = _tokens_first(v)
    normalisers = []
    axis, cuts = _slices(q, k, z)
    last = None
    for cut in cuts:
        last = _summed(cut, q, k, z, v, is_causal, scale)
        out[cut] = last.out[..., : v.shape[-1]]
        normalisers.append(last.lse)
    assert last is not None
    return out, torch.cat(normalisers, axis), last.seed, last.offset


@_attend.register_fake
def _(
    q: Tensor, k: Tensor, z: Tensor | None, v: Tensor, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    summed = _summed((), q, k, z, v, is_causal, scale)
    return _tokens_first(v), summed.lse, summed.seed, summed.offset


@torch.library.custom_op("lit_attn::attend_backward", mutates_args=())
def _attend_backward(
    gradient: Tensor,
    q: Tensor,
    k: Tensor,
    z: Tensor | None,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    seed: Tensor,
    offset: Tensor,
    is_causal: bool,
    scale: float,
) -> list[Tensor]:
    """Return the gradients of q, k, v and, if it is not None, of z."""
    summed = Summed(out, lse, seed, offset)
    totals: list[Tensor] = []
    _, cuts = _slices(q, k, z)
    for cut in cuts:
        for r in _calls(k, is_causal):
            to_q, to_k, to_v = _gradients_of_call(
                cut, r, gradient, q, k, z, v, summed, is_causal, scale
            )
            if not totals:
                # Allocated after the first kernel call, whose inputs have been freed.
                totals = _zero_gradients(q, k, z, v)
            _add_gradients([total[cut] for total in totals], r, to_q, to_k, to_v)
    return totals


def _gradients_of_call(
    cut: Index,
    r: slice,
    gradient: Tensor,
    q: Tensor,
    k: Tensor,
    z: Tensor | None,
    v: Tensor,
    summed: Summed,
    is_causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of the arguments of one kernel call: [q|z], [k|z] and padded values.

    `summed` has the sums of all slices over all keys, and `gradient` is that of these sums.
    """
    queries, keys, values, kernel = _arguments(cut, r, q, k, z, v, is_causal)
    width = values.shape[-1]
    g = padded(gradient[cut], width)
    of_slice = summed._replace(out=padded(summed.out[cut], width), lse=summed.lse[cut].contiguous())
    return run_backward(kernel, g, queries, keys, values, of_slice, is_causal, scale)


def _add_gradients(
    totals: list[Tensor], r: slice, to_q: Tensor, to_k: Tensor, to_v: Tensor
) -> None:
    """Add the gradients of a kernel call with the keys `r` to those of q, k, v and perhaps z.

    `totals` are the parts of a slice. Keys and values stand one after the other for the keys `r`.
    """
    dq, dk, dv, *rest = totals
    dz = rest[0] if rest else None
    features = dq.shape[-1]
    width = dv.shape[-1]
    z_columns = slice(features, features + width)
    dq.add_(to_q[..., :features])
    for i, tokens in enumerate(in_chunks(to_k.shape[2], dv.shape[2]), r.start):
        dk[:, :, i] = to_k[:, :, tokens, :features]
        dv.add_(to_v[:, :, tokens, :width])
        if dz is not None:
            dz.add_(to_k[:, :, tokens, z_columns])
    if dz is not None:
        dz.add_(to_q[..., z_columns])


@_attend_backward.register_fake
def _(gradient: Tensor, q: Tensor, k: Tensor, z: Tensor | None, v: Tensor, *_: Any) -> list[Tensor]:
    return _zero_gradients(q, k, z, v)


_attend_backward.register_autograd(raise_no_second)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, z, v, ctx.is_causal, ctx.scale = inputs
    ctx.save_for_backward(q, k, z, v, *output)


def _gradients(ctx: Any, gradient: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    gradients = _attend_backward(gradient, *ctx.saved_tensors, ctx.is_causal, ctx.scale)
    dq, dk, dv, *rest = gradients
    dz = rest[0] if rest else None
    return dq, dk, dz, dv, None, None


_attend.register_autograd(_gradients, setup_context=_keep)


def _summed(
    cut: Index, q: Tensor, k: Tensor, z: Tensor | None, v: Tensor, is_causal: bool, scale: float
) -> Summed:
    """Return the sums of a slice over all keys, merged in float32 or wider."""
    n = q.shape[2]
    merged: Summed | None = None
    for r in _calls(k, is_causal):
        queries, keys, values, kernel = _arguments(cut, r, q, k, z, v, is_causal)
        other = run_forward(kernel, queries, keys, values, is_causal, scale)
        merged = other if merged is None else _merged(merged, other, n)
    assert merged is not None
    return merged._replace(out=merged.out.to(v.dtype))


def _merged(first: Summed, second: Summed, n: int) -> Summed:
    """Return the sums of n queries over the keys of two kernel calls."""
    first_lse = first.lse[..., :n]
    second_lse = second.lse[..., :n]
    total = torch.logaddexp(first_lse, second_lse)
    out = first.out * (first_lse - total).exp().unsqueeze(-1)
    out = out + second.out * (second_lse - total).exp().unsqueeze(-1)
    # Some kernels return more than n log-sum-exps.
    lse = second.lse.clone()
    lse[..., :n] = total
    return first._replace(out=out, lse=lse)


def _calls(k: Tensor, is_causal: bool) -> list[slice]:
    """Return slices of the M keys, one for every kernel call."""
    m = k.shape[2]
    keys_of_a_call = 1 if is_causal else m
    return in_chunks(m, keys_of_a_call)


def _arguments(
    cut: Index, r: slice, q: Tensor, k: Tensor, z: Tensor | None, v: Tensor, is_causal: bool
) -> tuple[Tensor, Tensor, Tensor, SDPBackend]:
    """Return queries, the keys `r` and repeated values of a slice, and the kernel for them."""
    m = r.stop - r.start
    queries = _joined(q, z, cut)
    repeated = None if z is None else z.unsqueeze(2).expand(-1, -1, m, -1, -1)
    keys = _joined(k[:, :, r], repeated, cut).flatten(2, 3)
    kernel = choose_kernel(queries, keys, is_causal)
    # Flash attention requires values of the queries' width.
    is_flash = kernel == SDPBackend.FLASH_ATTENTION
    width = queries.shape[-1] if is_flash else supported_width(v.shape[-1], v)
    values = padded(v[cut], width)
    if m > 1:
        values = values.repeat(1, 1, m, 1)
    return queries, keys, values, kernel


def _slices(q: Tensor, k: Tensor, z: Tensor | None) -> tuple[int, list[Index]]:
    """Return the axis, batch or heads, and slices along it with few bytes of [k|z]."""
    limit = SLICE if k.device.type == "cpu" else GPU_SLICE
    batch, heads, m, n, features = k.shape
    joined = features if z is None else features + z.shape[-1]
    head_bytes = n * m * supported_width(joined, q) * q.element_size()
    # A slice of the batch has all heads, and a slice of the heads has the complete batch.
    if heads * head_bytes <= limit or batch >= heads:
        size = max(1, limit // (head_bytes * heads))
        return 0, [(cut,) for cut in in_chunks(batch, size)]
    size = max(1, limit // (head_bytes * batch))
    return 1, [(slice(None), cut) for cut in in_chunks(heads, size)]


def _joined(x: Tensor, z: Tensor | None, cut: Index) -> Tensor:
    """Return [x|z] of a slice, padded with zeros to a width that flash attention supports."""
    parts = [x[cut]] if z is None else [x[cut], z[cut]]
    width = sum(part.shape[-1] for part in parts)
    missing = supported_width(width, x) - width
    if missing:
        parts.append(x.new_zeros(1).expand(*parts[0].shape[:-1], missing))
    if len(parts) == 1:
        # `cat` would copy it.
        return parts[0]
    return torch.cat(parts, -1)


def padded(x: Tensor, width: int) -> Tensor:
    """Return x padded with zeros to `width`; x of this width is not copied, as `pad` would."""
    missing = width - x.shape[-1]
    return x if missing == 0 else F.pad(x, (0, missing))


def _tokens_first(x: Tensor) -> Tensor:
    """Return zeros like x (B, H, n, D) with the memory layout (B, n, H, D)."""
    b, heads, n, width = x.shape
    return x.new_zeros(b, n, heads, width).transpose(1, 2)


def _zero_gradients(q: Tensor, k: Tensor, z: Tensor | None, v: Tensor) -> list[Tensor]:
    """Return zeros for the gradients of q, k, v and z in the memory layout of their projections."""
    b, heads, m, n, width = k.shape
    dk = k.new_zeros(b, n, m, heads, width).permute(0, 3, 2, 1, 4)
    gradients = [_tokens_first(q), dk, _tokens_first(v)]
    if z is not None:
        gradients.append(_tokens_first(z))
    return gradients


def choose_kernel(q: Tensor, k: Tensor, is_causal: bool) -> SDPBackend:
    """Return the kernel for q, k and values of the same width: flash, memory-efficient or MATH.

    cuDNN's kernel is never returned: its backward pass needs more than output and log-sum-exp.
    Some kernels have limits in training only, such as flash attention's head width of 192 on
    consumer cards. Inside an operator no tensor requires a gradient, so torch is asked about
    aliases that do. The answer is then the same in both passes.
    """
    if q.is_inference():
        # Inference tensors cannot require a gradient.
        return _usable_kernel(q, k, is_causal)
    with torch.enable_grad():
        trained_q = q.detach().requires_grad_()
        trained_k = k.detach().requires_grad_()
        return _usable_kernel(trained_q, trained_k, is_causal)


def _usable_kernel(q: Tensor, k: Tensor, is_causal: bool) -> SDPBackend:
    """Return the first kernel that torch can use for q, k and values like k."""
    if q.device.type != "cuda":
        return SDPBackend(kernels.preferred_kernel(q, k, k, is_causal))
    parameters = cuda.SDPAParams(q, k, k, None, 0.0, is_causal, False)
    if cuda.can_use_flash_attention(parameters):
        return SDPBackend.FLASH_ATTENTION
    if cuda.can_use_efficient_attention(parameters):
        return SDPBackend.EFFICIENT_ATTENTION
    return SDPBackend.MATH


def run_forward(
    kernel: SDPBackend, q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float
) -> Summed:
    """Return the output of `kernel` for q, k and v with the widths of `_arguments`."""
    none = q.new_empty(0)
    if kernel == SDPBackend.FLASH_ATTENTION and q.device.type == "cpu":
        forward = kernels.cpu_flash_forward
        out, lse = forward(q, k, v, 0.0, is_causal, scale=scale)
        return Summed(out, lse, none, none.clone())
    if kernel == SDPBackend.FLASH_ATTENTION:
        forward = kernels.flash_forward
        # The outputs between these belong to sequences of different lengths.
        out, lse, *_, seed, offset, _ = forward(q, k, v, 0.0, is_causal, False, scale=scale)
        return Summed(out, lse, seed, offset)
    if kernel == SDPBackend.EFFICIENT_ATTENTION:
        forward = kernels.efficient_forward
        return Summed(*forward(q, k, v, None, True, 0.0, is_causal, scale=scale))
    logits = _logits(q, k, is_causal, scale)
    lse = logits.logsumexp(-1)
    weights = (logits - lse.unsqueeze(-1)).exp().to(v.dtype)
    return Summed(weights @ v, lse, none, none.clone())


def run_backward(
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
        backward = kernels.cpu_flash_backward
        dq, dk, dv = backward(gradient, q, k, v, out, lse, 0.0, is_causal, scale=scale)
    elif kernel == SDPBackend.FLASH_ATTENTION:
        n = q.shape[2]
        dq, dk, dv = kernels.flash_backward(
            gradient, q, k, v, out, lse, None, None, n, n, 0.0, is_causal, seed, offset, scale=scale
        )
    elif kernel == SDPBackend.EFFICIENT_ATTENTION:
        needed = [True, True, True, False]
        dq, dk, dv, _ = kernels.efficient_backward(
            gradient, q, k, v, None, out, lse, seed, offset, 0.0, needed, is_causal, scale=scale
        )
    else:
        weights = (_logits(q, k, is_causal, scale) - lse.unsqueeze(-1)).exp()
        g = gradient.to(weights.dtype)
        # The softmax removes the mean over keys of the gradients of the weights, g v^T.
        mean = (g * out).sum(-1, keepdim=True)
        to_products = weights * (g @ v.to(g.dtype).transpose(-1, -2) - mean) * scale
        dq = to_products @ k.to(g.dtype)
        dk = to_products.transpose(-1, -2) @ q.to(g.dtype)
        dv = weights.transpose(-1, -2) @ g
    return dq, dk, dv


def _logits(q: Tensor, k: Tensor, is_causal: bool, scale: float) -> Tensor:
    """Return the logits (B, H, n, n) in float32 or wider, for inputs that no kernel supports."""
    logits = wide(q) @ wide(k).transpose(-1, -2) * scale
    if is_causal:
        future = torch.ones(logits.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        logits = logits.masked_fill(future, -math.inf)
    return logits


def supported_width(width: int, x: Tensor) -> int:
    """Return the least width of x's device that kernels support: on a GPU a multiple of 8."""
    if x.device.type == "cpu":
        return width
    missing = -width % 8
    return width + missing
