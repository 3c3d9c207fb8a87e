"""Formula of a complete layer, which joins the formulas of its parts (`reference` of each part).

It is slow and forms all n x n numbers. The tests compare values and gradients of the layers with it
in float64.

Shapes: n tokens, H heads, D head width, d = H D; q, k, v, z: (B, H, n, D); logits: (B, H, n, n).
"""

import math

import torch
from torch import Tensor

from lit_attn.attention.latent import Latent
from lit_attn.attention.layer import Attention
from lit_attn.attention.masks import HIDES_FROM
from lit_attn.attention.rotary import Rotary
from lit_attn.attention.shared_keys import KeysValues


def attention(
    layer: Attention,
    x: Tensor,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    rotary: Rotary | None = None,
    memory: Tensor | None = None,
    first_values: Tensor | None = None,
    added_values: Tensor | None = None,
    keys_values: KeysValues | None = None,
) -> Tensor:
    """Return the output (B, n, d) of `layer` by its formulas, without dropout.

    `first_values` are the values (B, n, H', D) of the network's first layer; None in that layer.
    `added_values` (B, n, H', D) are added to v. `keys_values` are those of the layer before, for a
    layer with `kv_from: previous`.
    """
    parts, tokens = layer.spec, x if memory is None else memory
    if attn_mask is not None and attn_mask.ndim > 2 and attn_mask.shape[-3] > 1:
        # The mask of a head is that of each of its queries.
        attn_mask = attn_mask.repeat_interleave(parts.pair.queries, dim=-3)
    present = None
    if memory is None and attn_mask is not None and attn_mask.ndim > 1:
        # A token is padding if it is hidden from all queries in every head.
        present = mask_shows(attn_mask).any(-2)
        if present.ndim > 1:
            present = present.any(-2)
        present = present.reshape(-1, present.shape[-1])
    if layer.latent is not None:
        q, keys, v = project_latents(layer, layer.latent, x, rotary)
    elif parts.shares_keys:
        assert keys_values is not None
        q, keys, v = project_queries(layer, x, rotary, keys_values)
    else:
        q, keys, v = project(layer, x, rotary, tokens, first_values, added_values, present)
    visible = torch.ones(x.shape[1], tokens.shape[1], dtype=torch.bool)
    if memory is None:
        visible = may_attend(x.shape[1], parts.window, layer.local_self_attention, is_causal)
    if attn_mask is not None:
        visible = visible & mask_shows(attn_mask)
    a = parts.similarity.reference_weights(layer.similarity, q, keys, visible, is_causal)
    if a is None:
        a = weights(layer, x, q, keys, visible, attn_mask, rotary, memory, is_causal)
    h = parts.normaliser.reference_heads(layer.normaliser, a @ v)
    h = parts.filter.reference_heads(layer.filter, h)

    def project_gated(signal: Tensor) -> Tensor:
        return layer.proj(parts.gate.reference(layer.gate, x, signal))

    h = parts.pair.reference(layer.pair, x, h)
    # All queries of a head have the value of the head.
    v = v[:, :: parts.pair.queries]
    out: Tensor = parts.residual.reference(layer.residual, x, h, v, project_gated)
    convolved: Tensor = parts.convolution.reference(layer.convolution, "output", out, present)
    return convolved


def weights(
    layer: Attention,
    x: Tensor,
    q: Tensor,
    keys: list[Tensor],
    visible: Tensor,
    attn_mask: Tensor | None,
    rotary: Rotary | None = None,
    memory: Tensor | None = None,
    is_causal: bool = False,
) -> Tensor:
    """Return the weights (B, H, n, n) of the results of `project` and `may_attend`."""
    # The learned temperature replaces 1 / sqrt(D) in the logits.
    tau: Tensor | float = 1.0
    if layer.temperature is not None:
        tau = math.sqrt(layer.head_dim) * layer.temperature.exp()
    tau = tau * layer.spec.scale.reference(layer.scale, visible, keys[0].shape[-2])
    logits = layer.spec.similarity.reference(layer.similarity, q, keys, tau)
    if layer.z is not None:
        z = layer.z_norm(split_heads(layer.z(x), layer.num_heads))
        if rotary is not None and layer.spec.zz == "like-k":
            z = rotate(z, rotary)
        z = z.repeat_interleave(layer.spec.pair.queries, dim=1)
        logits = logits + tau * z @ z.transpose(-1, -2) / math.sqrt(layer.head_dim)  # Belief2 (11)
    more_inputs = () if memory is None else (memory,)
    if "pre" in layer.composers:
        logits = layer.spec.compose.reference(layer.composers["pre"], x, logits, *more_inputs)
    if attn_mask is not None and attn_mask.dtype != torch.bool:
        logits = logits + attn_mask.to(logits.dtype).masked_fill(~mask_shows(attn_mask), 0)
    present = None
    if memory is None:
        if attn_mask is not None:
            present = mask_shows(attn_mask).broadcast_to(logits.shape).any(-2)
        logits = logits + layer.spec.bias.reference(layer.bias, x, is_causal, present)
    logits = layer.spec.filter.reference(layer.filter, logits, visible, present)
    visible = layer.spec.filter.reference_visible(layer.filter, logits, visible)
    # A finite number gives a query that sees no key weights without NaN; they become zero.
    logits = logits.masked_fill(~visible, -1e300)
    a = layer.spec.normaliser.reference(layer.normaliser, logits, visible).masked_fill(~visible, 0)
    a = layer.spec.filter.reference_weights(layer.filter, a, visible, present)
    # A map of the heads fills weights that are hidden from one of them alone.
    a = a.masked_fill(~visible, 0)
    if "post" in layer.composers:
        a = layer.spec.compose.reference(layer.composers["post"], x, a, *more_inputs)
    return a.masked_fill(~visible, 0)


def project(
    layer: Attention,
    x: Tensor,
    rotary: Rotary | None,
    memory: Tensor | None = None,
    first_values: Tensor | None = None,
    added_values: Tensor | None = None,
    present: Tensor | None = None,
) -> tuple[Tensor, list[Tensor], Tensor]:
    """Return q of x, and the M keys and v of `memory` (x if None), (B, H, n, D) each.

    `first_values` are the values (B, n, H', D) of the network's first layer. `present` (B or 1, n)
    is False where a token is padding.
    """
    memory = x if memory is None else memory
    heads, shared = layer.num_heads, layer.key_heads
    sizes = [heads * layer.head_dim, shared * layer.head_dim, shared * layer.head_dim]
    q, _, _ = layer.qkv(x).split(sizes, dim=-1)
    _, k, v = layer.qkv(memory).split(sizes, dim=-1)
    queries = layer.spec.pair.reference_queries(layer.pair, x, q.unflatten(-1, (heads, -1)))
    heads = layer.query_heads
    mapped = layer.spec.transform.reference(
        layer.transform,
        queries,
        k.unflatten(-1, (shared, -1)),
        v.unflatten(-1, (shared, -1)),
    )
    convolved = []
    for name, vectors in zip(("q", "k", "v"), mapped, strict=True):
        flat = layer.spec.convolution.reference(
            layer.convolution, name, vectors.flatten(-2), present
        )
        convolved.append(flat.unflatten(-1, vectors.shape[-2:]))
    q, k, own_v = convolved
    if added_values is not None:
        own_v = own_v + added_values
    if first_values is None:
        v = own_v
    else:
        v = layer.spec.values.reference(layer.values, own_v, first_values)
    q, k, v = (vectors.flatten(-2) for vectors in (q, k, v))
    keys = layer.spec.similarity.reference_keys(layer.similarity, memory, k)

    def head_of_group(t: Tensor) -> Tensor:
        """Return (B, H, n, D) from (B, n, H' D): head m reads key head m // (H / H')."""
        groups = split_heads(t, shared)
        return torch.stack([groups[:, m * shared // heads] for m in range(heads)], dim=1)

    q = layer.q_norm(split_heads(q, heads))
    keys = [layer.k_norm(head_of_group(key)) for key in keys]
    if rotary is not None:
        q, keys = rotate(q, rotary), [rotate(key, rotary) for key in keys]
    return q, keys, head_of_group(v)


def project_queries(
    layer: Attention, x: Tensor, rotary: Rotary | None, keys_values: KeysValues
) -> tuple[Tensor, list[Tensor], Tensor]:
    """Brandon et al. 2024, section 2.2: q of x, beside the keys and values of another layer."""
    queries = layer.qkv(x).unflatten(-1, (layer.num_heads, -1))
    queries = layer.spec.pair.reference_queries(layer.pair, x, queries)
    q = layer.q_norm(queries.transpose(1, 2))
    if rotary is not None:
        q = rotate(q, rotary)
    heads, shared = layer.query_heads, layer.key_heads
    chosen = [m * shared // heads for m in range(heads)]
    return q, [keys_values.keys[:, chosen, 0]], keys_values.values[:, chosen]


def project_latents(
    layer: Attention, latent: Latent, x: Tensor, rotary: Rotary | None
) -> tuple[Tensor, list[Tensor], Tensor]:
    """DeepSeek-V2, eq. 9-19: q, and keys and values from the latent, head by head."""
    normed = x
    if latent.query_down is not None and latent.query_norm is not None:
        normed = latent.query_norm(latent.query_down(x))
    q = split_heads(layer.qkv(normed), layer.num_heads)
    turned, c = latent.down(x).split([latent.rotary_width, latent.rank], dim=-1)
    c = latent.norm.weight * c / (c.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    k, v = latent.up(c).chunk(2, dim=-1)
    keys, values = split_heads(k, layer.key_heads), split_heads(v, layer.key_heads)
    if rotary is not None:
        q = rotate(q, rotary)
        turned = rotate(turned.unsqueeze(1), rotary).squeeze(1)
    of_heads, values_of_heads = [], []
    for m in range(layer.num_heads):
        group = m * layer.key_heads // layer.num_heads
        of_heads.append(torch.cat([turned, keys[:, group]], dim=-1))
        values_of_heads.append(values[:, group])
    return q, [torch.stack(of_heads, 1)], torch.stack(values_of_heads, 1)


def may_attend(n: int, window: int | None, without_self: bool, is_causal: bool) -> Tensor:
    """Return (n, n), True where token i may attend to token j."""
    i, j = torch.arange(n).unsqueeze(1), torch.arange(n)
    visible = torch.ones(n, n, dtype=torch.bool)
    if is_causal:
        visible = visible & (j <= i)
    if window is not None:
        visible = visible & ((i - j).abs() < window)
    return visible & (i != j) if without_self else visible


def mask_shows(attn_mask: Tensor) -> Tensor:
    """Return a boolean mask, or where an additive mask is above the values that hide a key."""
    return attn_mask if attn_mask.dtype == torch.bool else attn_mask > HIDES_FROM


def split_heads(x: Tensor, heads: int) -> Tensor:
    """Return (B, H, n, D) from (B, n, H D)."""
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def rotate(x: Tensor, rotary: Rotary) -> Tensor:
    """Su et al. 2021, section 3.2.2: coordinates j and j + D/2 as one complex number, turned."""
    width = 2 * rotary.cos.shape[-1]  # Further coordinates are not turned.
    first, second = x[..., :width].chunk(2, dim=-1)
    turned = torch.complex(first, second) * torch.complex(*(part.to(x) for part in rotary))
    return torch.cat([turned.real, turned.imag, x[..., width:]], dim=-1)
