"""Attention from features: tokens of the cache, choice of the path, and paths of one kernel call.

Shapes: B batch, n queries, n' tokens with keys (n, and those in the cache), d width, H heads, H'
key heads, M keys for every token, D head width, E width of the features, c queries of a chunk, m
keys that they can see.
"""

from enum import Enum
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lit_attn.attention import flex_support, fused
from lit_attn.attention.cache import KeyValues
from lit_attn.attention.call import Inputs
from lit_attn.attention.formed import Formed, attend_in_pieces, form_weights, multiply_query
from lit_attn.attention.kernel_call import call_kernel
from lit_attn.attention.masks import CHUNK, Masks, differs_between_heads, in_chunks
from lit_attn.attention.precision import as_multiplied, rounded_terms, wide
from lit_attn.attention.sink import attend_with_sink


class Tokens(NamedTuple):
    """Tokens that the queries of a call attend to: those of its memory and of its cache.

    `values` (B, H, n', D) and the composers' `maps` are those of all tokens. `keys`
    (B, H', M, n', D) and `z` (B, H, n', D) are too, unless the cache stores features instead
    (`caches_features`): then they are those of this call alone. `first` is the position of the
    first of `keys`.
    """

    keys: Tensor
    values: Tensor
    z: Tensor | None
    maps: dict[str, dict[str, Any]]
    first: int
    caches_features: bool


class Features(NamedTuple):
    """Features whose scaled products are the logits: q (B, H, n, E) and k (B, H, M, n', E).

    `key_bias` (B, H, M, n') or None is added to the products. `scale` multiplies the sum. `hard`:
    the largest of a token's M logits counts, not their log-sum-exp.
    """

    q: Tensor
    k: Tensor
    key_bias: Tensor | None
    scale: float
    hard: bool


class Path(Enum):
    """Ways to compute attention from logits (docs/mechanisms.md has the table)."""

    ONE_CALL = "one call of torch's attention on all M n keys; in a window, one for each chunk"
    FLEX = "one call of flex_attention, compiled"
    MERGED = "one kernel call for each of the M keys and slice of the batch, merged"
    FORMED = "weights formed in chunks, and formed again in the backward pass"


def choose_path(
    *,
    keys: int,
    is_hard: bool,
    has_z: bool,
    chooses_blocks: bool,
    needs_weights: bool,
    has_sink: bool,
    mask: str,
    dropout: float,
    device: str,
) -> Path:
    """Return the path that computes a layer with these properties in little memory and fast.

    `keys` is M. `is_hard`: the largest of a token's M logits counts. `chooses_blocks`: each query
    attends to few blocks of keys, and flex_attention can skip the others (`_can_choose_blocks`).
    `needs_weights`: the layer changes weights or logits of pairs of tokens (`_needs_weights`).
    `has_sink`: the normaliser has a sink. `mask` is "none"; "causal"; "order" for a window or local
    self-attention, without another mask; or "other" for any other mask, a bias of pairs, a factor
    of each query, a cache that is not empty, or cross-attention. `device` is "flex" on a GPU where
    flex_attention supports the type and the widths, else the device's type.
    """
    if chooses_blocks:
        return Path.FLEX if device == "flex" else Path.FORMED
    if needs_weights:
        return Path.FORMED
    is_several = keys > 1
    # Dropout has to drop a pair of tokens with all of its keys.
    drops_pairs = is_several and dropout > 0
    is_ordered = mask == "order" or (is_several and mask != "none")
    if device == "flex" and (is_hard or has_z or is_ordered or drops_pairs):
        return Path.FLEX
    if is_hard or drops_pairs:
        return Path.FORMED
    is_merged = (is_several and mask == "causal") or (has_z and mask in ("none", "causal"))
    # FLOPs are counted on the meta device, which only counts those of torch's own operators.
    if is_merged and not has_sink and not dropout and device != "meta":
        return Path.MERGED
    return Path.ONE_CALL


def with_cached_tokens(inputs: Inputs) -> Tokens:
    """Return the tokens that a call attends to, and extend its cache, if any, by all but features.

    The cache stores features of keys, joined with z, unless heads share keys: the features of
    shared keys differ between heads, so they would need more memory.
    """
    cache = inputs.cache
    keys = inputs.keys
    values = inputs.v.transpose(1, 2)
    z = inputs.z
    maps = inputs.maps()
    if cache is None:
        return Tokens(keys, inputs.shared(values), z, maps, first=0, caches_features=False)
    assert isinstance(cache, KeyValues)
    caches_features = inputs.q.shape[1] == keys.shape[1] and inputs.all_tokens is None
    first = cache.position
    if inputs.all_tokens is not None:
        keys, values = inputs.all_tokens
    else:
        values = cache.extend("values", values)
    if not caches_features:
        first -= cache.length
        if inputs.all_tokens is None:
            keys = cache.extend("keys", keys)
        if z is not None:
            z = cache.extend("z", z)
    for place, sides in maps.items():
        if "key" in sides:
            sides["key"] = cache.extend_maps(place, sides["key"])
    return Tokens(keys, inputs.shared(values), z, maps, first, caches_features)


def attend(inputs: Inputs, tokens: Tokens, features: Features) -> Tensor:
    """Return the weighted sums of values (B, H, n, D), and extend the cache by the features."""
    path = choose_path(**describe_call(inputs, features))
    joined = features
    # A merged call joins features and z slice by slice; only a cache needs them joined.
    if path is not Path.MERGED and not tokens.caches_features:
        joined = with_z(features, inputs, tokens.z)
    if tokens.caches_features:
        assert isinstance(inputs.cache, KeyValues)
        of_cache = with_z(with_bias_in_columns(features), inputs, tokens.z)
        of_cache = of_cache._replace(k=inputs.cache.extend("keys", of_cache.k))
        if path is not Path.MERGED:
            joined = of_cache
    if path is Path.FORMED:
        formed = _formed(inputs, with_bias_in_columns(joined), tokens.maps)
        return attend_in_pieces(formed, tokens.values)
    sink = sink_of_queries(inputs)
    joined = with_terms_of_keys(joined, inputs.masks)
    if path is not Path.FLEX:
        joined = with_bias_in_columns(joined)
    inputs = inputs._replace(masks=inputs.masks._replace(terms=None))

    def sum_values(values: Tensor) -> Tensor:
        if path is Path.FLEX:
            return _flex_call(inputs, joined, values, sink)
        if path is Path.MERGED:
            return _merged_calls(inputs, joined, values)
        q, k, _, scale, _ = joined
        return one_call(q, k, values, inputs.masks, scale, inputs.dropout, sink)

    return inputs.normaliser.combine(sum_values, tokens.values)


def weights(inputs: Inputs, features: Features) -> Tensor:
    """Return all weights of a call without a cache, (B, H, n, n)."""
    joined = with_z(with_bias_in_columns(features), inputs, inputs.z)
    formed = _formed(inputs, joined, inputs.maps())
    all_tokens = slice(0, joined.q.shape[-2])
    return form_weights(formed, all_tokens, all_tokens, inputs.v.dtype)


def describe_call(inputs: Inputs, features: Features) -> dict[str, Any]:
    """Return the arguments of `choose_path` for this call."""
    device = features.q.device.type
    width = features.q.shape[-1]
    if inputs.z is not None:
        width += inputs.z.shape[-1]
    if flex_support.supports(as_multiplied(features.q), width, inputs.v.shape[-1]):
        device = "flex"
    mask = _kind_of_masks(inputs.masks)
    if inputs.factor is not None:
        # A merged call has one z for queries and keys, and a factor is that of the queries alone.
        mask = "other"
    return {
        "keys": features.k.shape[2],
        "is_hard": features.hard,
        "has_z": inputs.z is not None,
        "chooses_blocks": _can_choose_blocks(inputs, features),
        "needs_weights": inputs.filter.is_active or _needs_weights(inputs),
        "has_sink": inputs.normaliser.sink() is not None,
        "mask": mask,
        "dropout": inputs.dropout,
        "device": device,
    }


def _needs_weights(inputs: Inputs) -> bool:
    """Return True if softmax sums do not determine the result of the layer without its filter."""
    normaliser = inputs.normaliser
    if len(inputs.composers) > 0 or normaliser.softmaxes == 0:
        return True
    is_plain = normaliser.softmaxes == 1 and normaliser.sink() is None
    if is_plain:
        return False
    # A cache would be copied, or read twice, for the few weights of one query. FLOPs, which are
    # counted on the meta device, are those of the weights.
    if inputs.q.shape[-2] == 1 or inputs.q.is_meta:
        return True
    if normaliser.softmaxes == 1:
        return False
    # Dropout, and a mask of a single head, act on the difference of two softmaxes.
    visibility = inputs.masks.visibility
    has_masks_of_heads = visibility is not None and differs_between_heads(visibility)
    return has_masks_of_heads or inputs.dropout > 0


def _can_choose_blocks(inputs: Inputs, features: Features) -> bool:
    """Return True if a choice of blocks is the only thing that needs more than softmax sums.

    Mean keys give the choice of a call without other masks. A call with a cache has few queries,
    and the choice of a single head acts on the difference of two softmaxes.
    """
    if not inputs.filter.chooses_blocks or _needs_weights(inputs):
        return False
    if inputs.normaliser.softmaxes > 1:
        return False
    masks = inputs.masks
    is_plain = masks.is_causal_only and masks.terms is None and inputs.cache is None
    return is_plain and features.k.shape[2] == 1


def _kind_of_masks(masks: Masks) -> str:
    """Return the kind of masks that `choose_path` distinguishes."""
    if masks.is_causal_only:
        return "causal" if masks.is_causal else "none"
    depends_on_order = masks._replace(window=None, without_self=False).is_causal_only
    return "order" if depends_on_order else "other"


def _formed(inputs: Inputs, joined: Features, maps: dict[str, dict[str, Any]]) -> Formed:
    """Return everything that the weights are computed from, for features joined with z."""
    return Formed(
        masks=inputs.masks,
        q=joined.q,
        k=joined.k,
        maps=maps,
        composers=inputs.composers,
        normaliser=inputs.normaliser,
        filter=inputs.filter,
        cache=inputs.cache,
        hard=joined.hard,
        scale=joined.scale,
        dropout=inputs.dropout,
    )


def with_bias_in_columns(features: Features) -> Features:
    """Return features whose products contain the bias of the keys."""
    q, k = bias_in_columns(features.q, features.k, features.key_bias)
    return features._replace(q=q, k=k, key_bias=None)


def bias_in_columns(q: Tensor, k: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return q (B, H, n, E) and k (B, H, M, n', E) with columns whose product is the bias.

    The bias (B, H, M, n') is one further column of the keys, or several in half precision.
    """
    if bias is None:
        return q, k
    # Autocast would round the columns once more.
    q = as_multiplied(q)
    k = as_multiplied(k)
    ones = torch.ones_like(q[..., :1])
    q_parts = [q]
    k_parts = [k]
    for factor, term in rounded_terms(bias.unsqueeze(-1), k):
        q_parts.append(factor * ones)
        k_parts.append(term)
    return torch.cat(q_parts, -1), torch.cat(k_parts, -1)


def with_terms_of_keys(features: Features, masks: Masks) -> Features:
    """Return features with the terms of the keys in `masks.terms`, if any, in their bias.

    The terms of the queries are left out: they are equal for all keys but the sink.
    """
    if masks.terms is None:
        return features
    bias = (masks.terms.of_keys / features.scale).unsqueeze(2)
    if features.key_bias is not None:
        bias = features.key_bias + bias
    return features._replace(key_bias=bias.expand(features.k.shape[:-1]))


def sink_of_queries(inputs: Inputs) -> Tensor | None:
    """Return the logit of the sink for every query, broadcastable to (B, H, n), or None.

    It is relative to the terms of the queries, which the logits of the other keys leave out.
    """
    logit = inputs.normaliser.sink()
    if logit is None:
        return None
    if isinstance(logit, Tensor):
        sink = logit.view(-1, 1)
    else:
        sink = wide(inputs.q).new_full((1, 1), logit)
    terms = inputs.masks.terms
    return sink if terms is None else sink - terms.of_queries


def with_z(features: Features, inputs: Inputs, all_z: Tensor | None) -> Features:
    """Return [q'|z] and [k'|z], or q' and k' without z; `all_z` includes the cached tokens.

    In memory the tokens stay before the heads, as in the projections.
    """
    z = inputs.z
    if z is None or all_z is None:
        return features
    if inputs.temperature is not None:
        z = z * inputs.temperature.exp()
    if inputs.factor is not None:
        z = (z * inputs.factor).to(z.dtype)
    z_of_keys = all_z.unsqueeze(2).expand(*features.k.shape[:-1], -1)
    return features._replace(
        q=torch.cat([features.q, z], -1), k=torch.cat([features.k, z_of_keys], -1)
    )


def _merged_calls(inputs: Inputs, features: Features, values: Tensor) -> Tensor:
    """Return the sums of the path MERGED, in the precision that autocast would choose."""
    q = as_multiplied(features.q)
    k = as_multiplied(features.k)
    values = as_multiplied(values)
    z = None if inputs.z is None else as_multiplied(inputs.z)
    return fused.attend(q, k, z, values, inputs.masks.is_causal, features.scale)


def _flex_call(inputs: Inputs, joined: Features, values: Tensor, sink: Tensor | None) -> Tensor:
    """Return the sums of the path FLEX, in the precision that autocast would choose."""
    # Imported here, because it takes half a second (lit_attn.attention.flex_support).
    from lit_attn.attention import flex

    bias = joined.key_bias
    blocks = None
    if inputs.filter.chooses_blocks:
        q, k = bias_in_columns(joined.q, joined.k, bias)[:2]
        blocks = inputs.filter.choose_blocks(q, k.squeeze(2), inputs.masks.is_causal)
    scores = flex.Scores(
        q=as_multiplied(joined.q),
        k=as_multiplied(joined.k),
        key_bias=None if bias is None else joined.scale * bias,
        masks=inputs.masks,
        scale=joined.scale,
        dropout=inputs.dropout,
        sink=sink,
        blocks=blocks,
    )
    return flex.attend(scores, as_multiplied(values), joined.hard)


def one_call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    masks: Masks,
    scale: float,
    dropout: float,
    sink: Tensor | None = None,
) -> Tensor:
    """Return softmax(scale q k^T) v over all M n' keys and the sink, (B, H, n, D).

    q (B, H, n, E), k (B, H, M, n', E), v (B, H, n', D), `sink` broadcastable to (B, H, n) or None.
    With a window it is one call for each chunk of queries, which reads the keys in their windows
    and needs no mask of size n x M n'.
    """
    n = q.shape[-2]
    m, keys = k.shape[2:4]
    if masks.is_causal_only and (m == 1 or not masks.is_causal):
        return _call(q, k, v, None, masks.is_causal, scale, dropout, sink)
    chunks = [slice(0, n)]
    if masks.window is not None and not v.is_meta:
        chunks = in_chunks(n, max(CHUNK, masks.window))
    sums = []
    for rows in chunks:
        columns = masks.visible(rows, keys)
        mask = masks.combined(rows, columns, keys, q.device, q.dtype)
        visible_k, visible_v = k[..., columns, :], v[..., columns, :]
        sink_of_rows = sink
        if sink is not None and sink.shape[-1] > 1:
            sink_of_rows = sink[..., rows]
        queries = q[:, :, rows]
        sums.append(_call(queries, visible_k, visible_v, mask, False, scale, dropout, sink_of_rows))
    if len(sums) == 1:
        return sums[0]
    return torch.cat(sums, dim=-2)


def _call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    is_causal: bool,
    scale: float,
    dropout: float,
    sink: Tensor | None,
) -> Tensor:
    """Return `one_call` of the queries of a chunk for the keys that they can see."""
    queries, features = q.shape[-2:]
    m, n = k.shape[2:4]
    is_softmax_alone = sink is None and mask is None and not dropout
    if is_softmax_alone and queries == 1 and q.dtype.itemsize >= 4:
        differ_in_size = m > 1 or features != v.shape[-1]
        if differ_in_size:
            # Values need neither copies for M keys nor zeros up to the width of the keys.
            logits = multiply_query(q, k, scale)
            return logits.flatten(2).softmax(-1).view_as(logits).sum(2) @ v
    if m > 1:
        v = v.repeat(1, 1, m, 1)
        if mask is not None:
            # The mask of the tokens is that of each of their M keys.
            repeats = [1] * (mask.ndim - 1)
            mask = mask.expand(*mask.shape[:-1], n).repeat(*repeats, m)
    keys = k.flatten(2, 3)
    if sink is not None:
        return attend_with_sink(q, keys, v, sink, mask, dropout, is_causal, scale)
    return call_kernel(q, keys, v, mask, is_causal, scale, dropout)
