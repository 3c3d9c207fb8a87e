"""Attention from features: tokens of the cache, choice of the path, and paths of one kernel call.

Shapes: B batch, n queries, n' tokens with keys (n, and those in the cache), d width, H heads, H'
key heads, M keys for every token, D head width, E width of the features, c queries of a chunk, m
keys that they can see.
"""

import contextlib
import math
from collections.abc import Sequence
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from lit_attn.attention import flex, fused, path_record
from lit_attn.attention.cache import KeyValues
from lit_attn.attention.call import Inputs
from lit_attn.attention.formed import Formed, attend_in_pieces, form_weights, multiply_query
from lit_attn.attention.masks import CHUNK, Masks, in_chunks
from lit_attn.attention.precision import as_multiplied, rounded_terms

# PyTorch's kernels that take a mask, without cuDNN's.
MASKED_KERNELS = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


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


# The compiler of PyTorch 2.11 cannot go through the members of an Enum.
ALL_PATHS = tuple(Path)


def choose_path(
    *,
    keys: int,
    is_hard: bool,
    has_bias: bool,
    has_z: bool,
    is_composed: bool,
    normaliser: str,
    mask: str,
    dropout: float,
    device: str,
) -> Path:
    """Return the path that computes a layer with these properties in little memory and fast.

    `keys` is M. `is_hard`: the largest of a token's M logits counts. `has_bias`: the logits have a
    term of each key. `is_composed`: heads are composed, or a filter acts on the matrix of logits.
    `normaliser` is its kind. `mask` is "none"; "causal"; "order" for a window or
    local self-attention, without another mask; or "other" for any other mask, a bias of pairs, a
    factor of each query, a cache that is not empty, or cross-attention. `device` is "flex" on a GPU
    where flex_attention supports the type and the widths, else the device's type.
    """
    if is_composed or normaliser not in ("softmax", "offset-softmax"):
        return Path.FORMED
    needs_flex = keys > 1 or has_bias or has_z or normaliser != "softmax" or mask == "order"
    if device == "flex" and needs_flex:
        return Path.FLEX
    # Dropout has to drop a pair of tokens with all of its keys.
    if is_hard or normaliser != "softmax" or (keys > 1 and dropout > 0):
        return Path.FORMED
    # FLOPs are counted on the meta device, which only counts those of torch's own operators.
    is_merged = (keys > 1 or has_z) and mask in ("none", "causal")
    if is_merged and not dropout and device != "meta":
        return Path.MERGED
    return Path.ONE_CALL


def first_usable(candidates: Sequence[Path], refused: Sequence[Path]) -> Path:
    """Return the first of `candidates` that is not refused.

    Raises RuntimeError if all of them are.
    """
    for path in candidates:
        if path not in refused:
            return path
    names = ", ".join(path.name for path in candidates)
    raise RuntimeError(
        f"attention: every path of this layer is refused on this machine ({names}); "
        "`lit-attn doctor` shows why: train on another device, or with another version of torch"
    )


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
    caches_features = inputs.q.shape[1] == keys.shape[1]
    first = cache.position
    values = cache.extend("values", values)
    if not caches_features:
        first -= cache.length
        keys = cache.extend("keys", keys)
        if z is not None:
            z = cache.extend("z", z)
    for place, sides in maps.items():
        if "key" in sides:
            sides["key"] = cache.extend_maps(place, sides["key"])
    return Tokens(keys, inputs.shared(values), z, maps, first, caches_features)


def attend(inputs: Inputs, tokens: Tokens, features: Features) -> Tensor:
    """Return the weighted sums of values (B, H, n, D), and extend the cache by the features."""
    kind = features.q.device.type
    path = choose_usable_path(describe_call(inputs, features), kind)
    joined = features
    if path is not Path.FLEX or tokens.caches_features:
        joined = with_bias_in_columns(joined)
    # A merged call joins features and z slice by slice; only a cache needs them joined.
    of_this_call = joined
    if path is not Path.MERGED or tokens.caches_features:
        joined = with_z(joined, inputs, tokens.z)
    if tokens.caches_features:
        assert isinstance(inputs.cache, KeyValues)
        joined = joined._replace(k=inputs.cache.extend("keys", joined.k))

    if path is Path.MERGED:
        return _merged_calls(inputs, of_this_call, tokens.values)
    if path is Path.FLEX:
        return _flex_call(inputs, joined, tokens.values)
    if path is Path.ONE_CALL:
        return one_call(
            joined.q, joined.k, tokens.values, inputs.masks, joined.scale, inputs.dropout
        )
    return attend_in_pieces(_formed(inputs, joined, tokens.maps), tokens.values)


def weights(inputs: Inputs, features: Features) -> Tensor:
    """Return all weights of a call without a cache, (B, H, n, n)."""
    joined = with_z(with_bias_in_columns(features), inputs, inputs.z)
    formed = _formed(inputs, joined, inputs.maps())
    all_tokens = slice(0, joined.q.shape[-2])
    return form_weights(formed, all_tokens, all_tokens, inputs.v.dtype)


def choose_usable_path(properties: dict[str, Any], kind: str) -> Path:
    """Return the path for the arguments of `choose_path` that this machine does not refuse.

    `kind` is the type of the device. Without flex_attention the path is that of any device of this
    type, and formed weights can replace every other path.
    """
    without_flex = {**properties, "device": kind}
    candidates = [choose_path(**properties), choose_path(**without_flex), Path.FORMED]
    refused = [path for path in ALL_PATHS if path_record.is_refused(path.name, kind)]
    return first_usable(candidates, refused)


def describe_call(inputs: Inputs, features: Features) -> dict[str, Any]:
    """Return the arguments of `choose_path` for this call."""
    device = features.q.device.type
    width = features.q.shape[-1]
    if inputs.z is not None:
        width += inputs.z.shape[-1]
    if flex.supports(as_multiplied(features.q), width, inputs.v.shape[-1]):
        device = "flex"
    mask = _kind_of_masks(inputs.masks)
    if inputs.factor is not None:
        # A merged call has one z for queries and keys, and a factor is that of the queries alone.
        mask = "other"
    return {
        "keys": features.k.shape[2],
        "is_hard": features.hard,
        "has_bias": features.key_bias is not None,
        "has_z": inputs.z is not None,
        "is_composed": len(inputs.composers) > 0 or inputs.filter.is_active,
        "normaliser": inputs.normaliser.part.kind,
        "mask": mask,
        "dropout": inputs.dropout,
        "device": device,
    }


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
    ones = torch.ones_like(q[..., :1])
    q_parts = [q]
    k_parts = [k]
    for factor, term in rounded_terms(bias.unsqueeze(-1), k):
        q_parts.append(factor * ones)
        k_parts.append(term)
    return torch.cat(q_parts, -1), torch.cat(k_parts, -1)


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


def _flex_call(inputs: Inputs, joined: Features, values: Tensor) -> Tensor:
    """Return the sums of the path FLEX, in the precision that autocast would choose."""
    part = inputs.normaliser.part
    bias = joined.key_bias
    scores = flex.Scores(
        q=as_multiplied(joined.q),
        k=as_multiplied(joined.k),
        key_bias=None if bias is None else joined.scale * bias,
        masks=inputs.masks,
        scale=joined.scale,
        dropout=inputs.dropout,
        log_offset=math.log(part.offset) if part.kind == "offset-softmax" else None,
    )
    return flex.attend(scores, as_multiplied(values), joined.hard)


def one_call(q: Tensor, k: Tensor, v: Tensor, masks: Masks, scale: float, dropout: float) -> Tensor:
    """Return softmax(scale q k^T) v over all M n' keys, (B, H, n, D).

    q (B, H, n, E), k (B, H, M, n', E), v (B, H, n', D). With a window it is one call for each chunk
    of queries, which reads the keys in their windows and needs no mask of size n x M n'.
    """
    n = q.shape[-2]
    m, keys = k.shape[2:4]
    if m == 1 and masks.is_causal_only:
        return _call(q, k, v, None, masks.is_causal, scale, dropout)
    size = n
    if masks.window is not None and not v.is_meta:
        size = max(CHUNK, masks.window)
    sums = []
    for rows in in_chunks(n, size):
        columns = masks.visible(rows, keys)
        mask = masks.combined(rows, columns, keys, q.device, q.dtype)
        visible_k, visible_v = k[..., columns, :], v[..., columns, :]
        sums.append(_call(q[:, :, rows], visible_k, visible_v, mask, False, scale, dropout))
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
) -> Tensor:
    """Return `one_call` of the queries of a chunk for the keys that they can see.

    Flash attention needs one width of q, k and v, on a GPU a multiple of 8: zeros pad them.
    """
    queries, features = q.shape[-2:]
    m, n = k.shape[2:4]
    width = v.shape[-1]
    differ_in_size = m > 1 or features != width
    if queries == 1 and mask is None and differ_in_size and q.dtype.itemsize >= 4:
        # Values need neither copies for M keys nor zeros up to the width of the keys.
        logits = multiply_query(q, k, scale)
        return logits.flatten(2).softmax(-1).view_as(logits).sum(2) @ v
    if mask is not None and m > 1:
        # The mask of the tokens is that of each of their M keys.
        repeats = [1] * (mask.ndim - 1)
        mask = mask.expand(*mask.shape[:-1], n).repeat(*repeats, m)
    full = features if features == width else fused.supported_width(features, q)
    values = fused.padded(v, full)
    if m > 1:
        values = values.repeat(1, 1, m, 1)
    with _kernels_for(mask):
        out = F.scaled_dot_product_attention(
            fused.padded(q, full),
            fused.padded(k, full).flatten(2, 3),
            values,
            mask,
            dropout_p=dropout,
            is_causal=is_causal,
            scale=scale,
        )
    return out[..., :width]


def _kernels_for(mask: Tensor | None) -> contextlib.AbstractContextManager[Any]:
    """Return a context without cuDNN's kernel if there is a mask on a GPU.

    From PyTorch 2.11 on, Hopper and Blackwell cards prefer it. For a query that sees no key it
    returns numbers instead of zeros, and with some lengths its gradients are not numbers
    (https://github.com/pytorch/pytorch/issues/196678).
    """
    if mask is None or mask.device.type != "cuda":
        return contextlib.nullcontext()
    return sdpa_kernel(MASKED_KERNELS)
