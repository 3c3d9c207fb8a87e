"""Attention that forms its weights, in chunks of queries: O(n chunk H) memory.

Shapes: B batch, n queries, n' tokens with keys (n, and those in the cache), H heads, c queries of a
chunk, m keys that they can see, M keys for every token, E width of the features, D of the values.

The backward pass computes each chunk again, so no tensor of size n x n is kept.
"""

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lit_attn.attention.compose import select
from lit_attn.attention.masks import CHUNK, Masks, in_chunks
from lit_attn.attention.normaliser import Normaliser

# Number of keys up to which all queries are one chunk: keeping its weights is then cheaper than
# computing them twice.
WHOLE_UP_TO = 384


class Formed(NamedTuple):
    """Everything that the weights of a call are computed from.

    q (B, H, n, E), k (B, H, M, n', E). `hard`: the largest of a token's M logits counts, not their
    log-sum-exp. `maps` are the composers' maps of all tokens by place and side. `scale` multiplies
    the products of q and k.
    """

    q: Tensor
    k: Tensor
    masks: Masks
    hard: bool
    composers: nn.ModuleDict
    normaliser: Normaliser
    maps: dict[str, dict[str, Any]]
    scale: float


def attend(formed: Formed, v: Tensor, dropout: float) -> Tensor:
    """Return the weighted sums (B, H, n, D) of v (B, H, n', D)."""
    n, keys = formed.q.shape[-2], formed.k.shape[-2]
    # On the meta device, where FLOPs are counted, all queries attend to all keys, as in the FLOPs
    # of one kernel call.
    size = n if keys <= WHOLE_UP_TO or v.is_meta else CHUNK

    def chunk(rows: slice) -> Tensor:
        columns = formed.masks.visible(rows, keys)
        a = weights(formed, rows, columns, v.dtype)
        return F.dropout(a, dropout) @ v[..., columns, :]

    chunks = in_chunks(n, size)
    if len(chunks) == 1:
        return chunk(chunks[0])
    return torch.cat([checkpoint(chunk, rows, use_reentrant=False) for rows in chunks], dim=-2)


def weights(formed: Formed, rows: slice, columns: slice, dtype: torch.dtype) -> Tensor:
    """Return the weights (B, H, c, m) of the queries `rows` for the keys `columns`, in `dtype`.

    Logits -> maximum or, before a composition, log-sum-exp over M -> composition -> masks ->
    normaliser -> composition. `columns` contains every key that the queries can see.
    """
    q, k, masks, hard = formed[:4]
    keys = k.shape[-2]
    q, k = q[:, :, rows] * formed.scale, k[..., columns, :]
    if q.shape[-2] == 1:
        # A cache is not contiguous, and `einsum` would copy its keys.
        logits = (q.unsqueeze(2) @ k.transpose(-1, -2)).transpose(2, 3)
    else:
        logits = torch.einsum("bhce,bhrme->bhcrm", q, k)
    if hard:
        logits = functools.reduce(_larger, logits.unbind(3)).unsqueeze(3)
    if "pre" in formed.composers:
        a = logits.squeeze(3) if logits.shape[3] == 1 else logits.logsumexp(3)
        logits = _compose("pre", formed, a, rows, columns).unsqueeze(3)
    if (bias := masks.bias(rows, columns, keys)) is not None:
        logits = logits + bias.unsqueeze(-2)
    if (seen := masks.chunk(rows, columns, keys, q.device)) is not None:
        logits = logits.masked_fill(~seen.unsqueeze(-2), torch.finfo(logits.dtype).min)
    a = formed.normaliser.over_keys(logits, seen).to(dtype)
    if "post" in formed.composers and seen is not None and seen.ndim > 2 and seen.shape[-3] > 1:
        # The softmax of a head that sees no key is uniform; other heads must not take it over.
        a = a.masked_fill(~seen, 0)
    a = _compose("post", formed, a, rows, columns)
    # Composition fills masked positions again, and a query that sees no key gets zero.
    return a if seen is None else a.masked_fill(~seen, 0)


def _larger(a: Tensor, b: Tensor) -> Tensor:
    """Return the larger of a and b, with the gradient for that one alone.

    `maximum` and `amax` would share the gradient of equal numbers, which costs three times the
    memory uncompiled and 1.6 times the time compiled.
    """
    return torch.where(a > b, a, b)


def _compose(place: str, formed: Formed, a: Tensor, rows: slice, columns: slice) -> Tensor:
    if place not in formed.composers:
        return a
    query, key = (formed.maps[place].get(side) for side in ("query", "key"))
    composed: Tensor = formed.composers[place](
        a,
        None if query is None else select(query, rows),
        None if key is None else select(key, columns),
    )
    return composed
