"""Attention that has to form its logits, by chunks of queries: O(n chunk H) memory.

Shapes: B batch, n queries, n' tokens with keys (n, and those cached before them), H heads, c
queries of a chunk, m keys that they can see, M keys for every token, E width of the features, D of
the values.

In the backward pass each chunk is computed again, so nothing of size n x n is kept.
"""

import functools

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lit_attn.attention.compose import Maps
from lit_attn.attention.masks import CHUNK, Masks, in_chunks

# Up to here one chunk is everything, and keeping it costs less than computing it twice.
WHOLE_UP_TO = 384


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    masks: Masks,
    hard: bool,
    composers: nn.ModuleDict,
    maps: dict[str, dict[str, Maps]],
    scale: float,
    dropout: float,
) -> Tensor:
    """(B, H, n, D) from q (B, H, n, E), k (B, H, M, n', E) and v (B, H, n', D).

    Logits -> maximum or, before a composition, log-sum-exp over M -> composition -> masks ->
    softmax -> sum over M -> composition -> times v. `maps` holds the composers' maps of all tokens
    by place and side.
    """
    n, keys = q.shape[-2], k.shape[-2]
    # FLOPs are counted on the meta device: of all queries and keys, as those of a fused call are.
    size = n if keys <= WHOLE_UP_TO or q.is_meta else CHUNK

    def chunk(rows: slice) -> Tensor:
        columns = masks.visible(rows, keys)
        a = weights(q, k, masks, hard, composers, maps, scale, rows, columns, v.dtype)
        return F.dropout(a, dropout) @ v[..., columns, :]

    chunks = in_chunks(n, size)
    if len(chunks) == 1:
        return chunk(chunks[0])
    return torch.cat([checkpoint(chunk, rows, use_reentrant=False) for rows in chunks], dim=-2)


def weights(
    q: Tensor,
    k: Tensor,
    masks: Masks,
    hard: bool,
    composers: nn.ModuleDict,
    maps: dict[str, dict[str, Maps]],
    scale: float,
    rows: slice,
    columns: slice,
    dtype: torch.dtype,
) -> Tensor:
    """(B, H, c, m): what the queries of `rows` give to the values of `columns`, all that they see.

    The arguments are `attend`'s; `dtype` is the values'.
    """
    keys = k.shape[-2]
    logits = torch.einsum("bhce,bhrme->bhcrm", q[:, :, rows] * scale, k[..., columns, :])
    if hard:
        logits = functools.reduce(_larger, logits.unbind(3)).unsqueeze(3)
    if "pre" in composers:
        a = logits.squeeze(3) if logits.shape[3] == 1 else logits.logsumexp(3)
        logits = _compose("pre", composers, a, maps, rows, columns).unsqueeze(3)
    if (bias := masks.bias(rows, columns, keys)) is not None:
        logits = logits + bias.unsqueeze(-2)
    if (seen := masks.chunk(rows, columns, keys, q.device)) is not None:
        logits = logits.masked_fill(~seen.unsqueeze(-2), torch.finfo(logits.dtype).min)
    a = _over_keys(logits).to(dtype)
    if "post" in composers and seen is not None and seen.ndim > 2 and seen.shape[-3] > 1:
        # A head that sees nothing has weights all the same, which others would take from it.
        a = a.masked_fill(~seen, 0)
    a = _compose("post", composers, a, maps, rows, columns)
    # Composition puts something there again, and a query that sees nothing gets nothing.
    return a if seen is None else a.masked_fill(~seen, 0)


def _over_keys(logits: Tensor) -> Tensor:
    """(B, H, c, m) in float32 or wider, from (B, H, c, M, m): what all keys of a token weigh.

    Weights of a token's keys add up, so one softmax over all keys spares their log-sum-exp.
    Compiled, it is spelled out: the gradient of a sum over one axis of a flattened tensor is read
    by remainders, and the backward of the softmax then takes twice as long.
    """
    wide = torch.promote_types(logits.dtype, torch.float32)
    if logits.shape[3] == 1:
        return logits.squeeze(3).softmax(-1, dtype=wide)
    if not torch.compiler.is_compiling():
        return logits.flatten(3).softmax(-1, dtype=wide).view_as(logits).sum(3)
    every = [keys.to(wide) for keys in logits.unbind(3)]
    top = functools.reduce(torch.maximum, every).detach().amax(-1, keepdim=True)
    a = functools.reduce(torch.add, [(keys - top).exp() for keys in every])
    return a / a.sum(-1, keepdim=True)


def _larger(a: Tensor, b: Tensor) -> Tensor:
    """The larger, whose gradient goes to it alone: `maximum` and `amax` would share it where equal.

    That costs them three times the memory uncompiled and 1.6 times the time compiled.
    """
    return torch.where(a > b, a, b)


def _compose(
    place: str,
    composers: nn.ModuleDict,
    a: Tensor,
    maps: dict[str, dict[str, Maps]],
    rows: slice,
    columns: slice,
) -> Tensor:
    if place not in composers:
        return a
    query, key = maps[place].get("query"), maps[place].get("key")
    return composers[place](
        a,
        None if query is None else query.rows(rows),
        None if key is None else key.rows(columns),
    )
