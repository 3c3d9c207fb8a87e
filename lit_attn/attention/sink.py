"""Softmax attention with a trainable sink: a key without value that every query sees.

The weights are exp(s_ij) / (exp(b) + sum_j exp(s_ij)) with the sink's logit b, as in gpt-oss
(OpenAI 2025, https://arxiv.org/abs/2508.10925, section 2.3). The sink is one token in front of the
others, so every kernel of `scaled_dot_product_attention` computes the sums and all gradients, also
that of b, and no tensor of all pairs of tokens is made.

Shapes: B batch, H heads, n queries, m keys, D head width.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from lit_attn.attention.kernel_call import call_kernel
from lit_attn.attention.precision import as_multiplied, rounded_terms, wide


class WithSink(NamedTuple):
    """Arguments of attention whose first key is the sink.

    In causal order the first query is that of the sink, and its output is zero.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None


def attend_with_sink(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sink: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """Return attention (B, H, n, D) with the logit `sink`, which can require a gradient.

    `sink` is broadcastable to (B, H, n), so (H, 1) for one number of each head. The other arguments
    are those of torch.nn.functional.scaled_dot_product_attention: q (B, H, n, D), k and v
    (B, H, m, D), and a boolean or additive mask broadcastable to (B, H, n, m). In causal order n
    is m.
    """
    if scale is None:
        scale = q.shape[-1] ** -0.5
    joined = add_sink(q, k, v, attn_mask, is_causal, sink, scale)
    out = call_kernel(*joined, is_causal=is_causal, scale=scale, dropout=dropout_p)
    return out[..., 1:, :] if is_causal else out


def add_sink(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    is_causal: bool,
    sink: Tensor,
    scale: float,
) -> WithSink:
    """Return the arguments of `attend_with_sink` with the sink as the first key.

    Its logit is the product of further columns: the terms of the logit in the queries, and their
    factors in the sink's key. All other keys have zeros there.
    """
    # Autocast would round the terms once more.
    q = as_multiplied(q)
    k = as_multiplied(k)
    v = as_multiplied(v)
    logits = (wide(sink) / scale).expand(q.shape[:-1]).unsqueeze(-1)
    one = k.new_ones(*k.shape[:-2], 1, 1)
    columns_of_queries = [q]
    columns_of_sink = [one.new_zeros(*k.shape[:-2], 1, k.shape[-1])]
    for factor, term in rounded_terms(logits, q):
        columns_of_queries.append(term)
        columns_of_sink.append(factor * one)
    queries = torch.cat(columns_of_queries, -1)
    key = torch.cat(columns_of_sink, -1)
    keys = torch.cat([key, F.pad(k, (0, key.shape[-1] - k.shape[-1]))], -2)
    if is_causal:
        # Query i of a kernel sees the keys 0 to i, so a query in front lets all others see the
        # sink.
        queries = F.pad(queries, (0, 0, 1, 0))
    if mask is not None:
        of_tokens = mask.expand(*mask.shape[:-1], k.shape[-2])
        mask = F.pad(of_tokens, (1, 0), value=mask.dtype == torch.bool)
    return WithSink(queries, keys, F.pad(v, (0, 0, 1, 0)), mask)
