"""Attention from logits: choice of the path, and the paths of one kernel call.

Shapes: B batch, n queries, n' tokens with keys (n, and those in the cache), d width, H heads, H'
key heads, M keys for every token, D head width, E width of the features, c queries of a chunk, m
keys that they can see.
"""

from enum import Enum
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lit_attn.attention import fused
from lit_attn.attention.cache import Cache, KeyValues
from lit_attn.attention.compose import Composer
from lit_attn.attention.formed import Formed, attend_in_pieces, form_weights, multiply_query
from lit_attn.attention.masks import CHUNK, Masks, in_chunks
from lit_attn.attention.normaliser import Normaliser
from lit_attn.attention.precision import as_multiplied, wide
from lit_attn.attention.statistics import end_step_after_backward, observe_once

if TYPE_CHECKING:
    from lit_attn.attention.similarity import Similarity


class Inputs(NamedTuple):
    """One call of a layer: its projected tokens, and everything that acts on their weights.

    x (B, n, d), q (B, H, n, D), keys (B, H', M, n, D), v (B, n, H', D), z (B, H, n, D). Keys and
    values are those of `memory`: x itself, or in cross-attention m other tokens (B, m, d).
    `temperature` is the logarithm of the logits' learned factor. `cache` holds the tokens before x.
    """

    x: Tensor
    memory: Tensor
    q: Tensor
    keys: Tensor
    v: Tensor
    z: Tensor | None
    masks: Masks
    composers: nn.ModuleDict
    normaliser: Normaliser
    temperature: Tensor | None = None
    dropout: float = 0.0
    cache: Cache | None = None

    def shared(self, x: Tensor, axis: int = 1) -> Tensor:
        """Repeat x of the key heads, along the `axis` of heads, for the heads that share them."""
        groups = self.q.shape[1] // x.shape[axis]
        return x.repeat_interleave(groups, axis) if groups > 1 else x

    def widened(self) -> "Inputs":
        """Return the call with all tensors of tokens in float32 or wider."""
        x = wide(self.x)
        return self._replace(
            x=x,
            memory=x if self.memory is self.x else wide(self.memory),
            q=wide(self.q),
            keys=wide(self.keys),
            v=wide(self.v),
            z=None if self.z is None else wide(self.z),
        )

    def maps(self) -> dict[str, dict[str, Any]]:
        """Return the composers' maps by place and side: "query" of x and "key" of the memory."""
        maps = {}
        for place, part in self.composers.items():
            maps[place] = cast(Composer, part).maps(self.x)
            if self.memory is not self.x and "key" in maps[place]:
                maps[place]["key"] = cast(Composer, part).maps(self.memory)["key"]
        return maps


class Path(Enum):
    """Ways to compute attention from logits (docs/mechanisms.md has the table)."""

    ONE_CALL = "one call of torch's attention on all M n keys; in a window, one for each chunk"
    MERGED = "one kernel call for each of the M keys and slice of the batch, merged"
    FORMED = "weights formed in pieces, and formed again in the backward pass"


def choose_path(
    *,
    keys: int,
    is_hard: bool,
    has_z: bool,
    is_composed: bool,
    normaliser: str,
    mask: str,
    dropout: float,
    device: str,
) -> Path:
    """Return the path that computes a layer with these properties in little memory and fast.

    `keys` is M. `is_hard`: the largest of a token's M logits counts. `normaliser` is its kind.
    `mask` is "none", "causal" or "other": any other mask, a window, a cache that is not empty, or
    cross-attention.
    """
    # Dropout has to drop a pair of tokens with all of its keys.
    if is_hard or is_composed or normaliser != "softmax" or (keys > 1 and dropout > 0):
        return Path.FORMED
    # FLOPs are counted on the meta device, which only counts those of torch's own operators.
    if (keys > 1 or has_z) and mask != "other" and not dropout and device != "meta":
        return Path.MERGED
    return Path.ONE_CALL


def attend(similarity: "Similarity", inputs: Inputs) -> Tensor:
    """Return the weighted sums of values (B, H, n, D), and extend the cache.

    In training, a similarity that learns from statistics observes the call.
    """
    out = _attend(similarity, inputs)
    if similarity.has_statistics and similarity.training:
        end_step_after_backward(similarity, out)
    return out


def _attend(similarity: "Similarity", inputs: Inputs) -> Tensor:
    q, keys, v, z, masks = inputs.q, inputs.keys, inputs.v, inputs.z, inputs.masks
    values, all_z = v.transpose(1, 2), z
    maps = inputs.maps()
    first, caches_features = 0, False
    if (cache := inputs.cache) is not None:
        assert isinstance(cache, KeyValues)
        # The features of shared keys differ between heads, so they would need more memory.
        caches_features = q.shape[1] == keys.shape[1]
        first = cache.position if caches_features else cache.position - cache.length
        values = cache.extend("values", values)
        if not caches_features:
            keys = cache.extend("keys", keys)
            all_z = None if z is None else cache.extend("z", z)
        for place, sides in maps.items():
            if "key" in sides:
                sides["key"] = cache.extend_maps(place, sides["key"])
    values = inputs.shared(values)
    q, k, scale = scaled_features(similarity, inputs, keys, first)
    if similarity.has_statistics and similarity.training:
        observe_once(similarity.observe, q, k, scale, masks)
    path = choose_path(
        keys=k.shape[2],
        is_hard=similarity.hard,
        has_z=z is not None,
        is_composed=len(inputs.composers) > 0,
        normaliser=inputs.normaliser.part.kind,
        mask="other" if not masks.is_causal_only else "causal" if masks.is_causal else "none",
        dropout=inputs.dropout,
        device=q.device.type,
    )
    joined_q, joined_k = q, k
    if path is not Path.MERGED or caches_features:
        joined_q, joined_k = with_z(q, k, z, all_z, inputs.temperature)
    if caches_features:
        assert isinstance(cache, KeyValues)
        joined_k = cache.extend("keys", joined_k)
    if path is Path.MERGED:
        q, k, values = as_multiplied(q), as_multiplied(k), as_multiplied(values)
        z = None if z is None else as_multiplied(z)
        return fused.attend(q, k, z, values, masks.is_causal, scale)
    if path is Path.ONE_CALL:
        return one_call(joined_q, joined_k, values, masks, scale, inputs.dropout)
    parts = inputs.composers, inputs.normaliser, similarity.hard
    formed = Formed(masks, joined_q, joined_k, maps, *parts, scale, inputs.dropout)
    return attend_in_pieces(formed, values)


def weights(similarity: "Similarity", inputs: Inputs) -> Tensor:
    """Return all weights of a call without a cache, (B, H, n, n)."""
    q, k, scale = scaled_features(similarity, inputs, inputs.keys, 0)
    q, k = with_z(q, k, inputs.z, inputs.z, inputs.temperature)
    parts = inputs.composers, inputs.normaliser, similarity.hard
    formed = Formed(inputs.masks, q, k, inputs.maps(), *parts, scale, inputs.dropout)
    all_tokens = slice(0, q.shape[-2])
    return form_weights(formed, all_tokens, all_tokens, inputs.v.dtype)


def scaled_features(
    similarity: "Similarity", inputs: Inputs, keys: Tensor, first: int
) -> tuple[Tensor, Tensor, float]:
    """Return q' (B, H, n, E), k' (B, H, M, n', E) and the factor of their products: the logits.

    `first` is the position of the first of `keys`.
    """
    q, k = similarity.features(inputs.q, inputs.shared(keys), first)
    if inputs.temperature is not None:
        return q * inputs.temperature.exp(), k, 1.0
    return q, k, inputs.q.shape[-1] ** -0.5


def with_z(
    q: Tensor, k: Tensor, z: Tensor | None, all_z: Tensor | None, temperature: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return [q'|z] and [k'|z], or q' and k' without z; `all_z` includes the cached tokens."""
    if z is None or all_z is None:
        return q, k
    if temperature is not None:
        z = z * temperature.exp()
    all_z = all_z.unsqueeze(2).expand(*k.shape[:-1], -1)
    return torch.cat([q, z], -1), torch.cat([k, all_z], -1)


def one_call(q: Tensor, k: Tensor, v: Tensor, masks: Masks, scale: float, dropout: float) -> Tensor:
    """Return softmax(scale q k^T) v over all M n' keys, (B, H, n, D).

    q (B, H, n, E), k (B, H, M, n', E), v (B, H, n', D). With a window it is one call for each chunk
    of queries, which reads the keys in their windows and needs no mask of size n x M n'.
    """
    n, (m, keys) = q.shape[-2], k.shape[2:4]
    if m == 1 and masks.is_causal_only:
        return _call(q, k, v, None, masks.is_causal, scale, dropout)
    size = n if masks.window is None or v.is_meta else max(CHUNK, masks.window)
    sums = []
    for rows in in_chunks(n, size):
        columns = masks.visible(rows, keys)
        mask = masks.combined(rows, columns, keys, q.device, q.dtype)
        visible_k, visible_v = k[..., columns, :], v[..., columns, :]
        sums.append(_call(q[:, :, rows], visible_k, visible_v, mask, False, scale, dropout))
    return sums[0] if len(sums) == 1 else torch.cat(sums, dim=-2)


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
    (queries, features), (m, n), width = q.shape[-2:], k.shape[2:4], v.shape[-1]
    if queries == 1 and mask is None and (m > 1 or features != width) and q.dtype.itemsize >= 4:
        # Values need neither copies for M keys nor zeros up to the width of the keys.
        logits = multiply_query(q, k, scale)
        return logits.flatten(2).softmax(-1).view_as(logits).sum(2) @ v
    if mask is not None and m > 1:
        mask = mask.expand(*mask.shape[:-1], n).repeat(*(1,) * (mask.ndim - 1), m)
    full = features if features == width else fused.supported_width(features, q)
    out = F.scaled_dot_product_attention(
        fused.padded(q, full),
        fused.padded(k, full).flatten(2, 3),
        fused.padded(v, full).repeat(1, 1, m, 1) if m > 1 else fused.padded(v, full),
        mask,
        dropout_p=dropout,
        is_causal=is_causal,
        scale=scale,
    )
    return out[..., :width]
