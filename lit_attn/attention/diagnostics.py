"""Quantities of an attention layer that the papers plot (docs/diagnostics.md).

Shapes: B batch, n tokens, d width, H heads, D head width, M keys for every token.
"""

import torch
from torch import Tensor

from lit_attn.attention.layer import Attention, LayerRecord
from lit_attn.attention.residual import projected

# Smallest singular value that counts towards a rank (MGK, section 3.4).
RANK_TOLERANCE = 1e-6


def residual(layer: Attention, record: LayerRecord, stream: Tensor) -> dict[str, Tensor]:
    """Return norms of MH_i and Delta_i and cosines of their angles to X_i, each (B, n).

    Delta = MH - alpha V (BeliefFormer eq. 10), for every residual part. The angles are those of
    MH W and Delta W to `stream` (B, n, d), the residual stream that the layer's output is added to;
    NaN for a vector of length zero.
    """
    mh = record.heads.flatten(-2)
    delta = mh - projected(record.heads, record.values, "global").flatten(-2)
    values = {}
    for name, vector in (("mh", mh), ("delta", delta)):
        norm = vector.norm(dim=-1)
        through = vector @ layer.proj.weight.T
        lengths = through.norm(dim=-1) * stream.norm(dim=-1)
        cosine = (through * stream).sum(-1) / lengths
        # A much shorter vector than the one it was projected from is a rounding error.
        has_length = norm > 1e-9 * mh.norm(dim=-1)
        values[f"norm-{name}"] = norm
        values[f"cos-{name}"] = cosine.masked_fill(~has_length, torch.nan)
    return values


def ranks(weights: Tensor, present: Tensor) -> Tensor:
    """Return the rank (B, H) of each attention matrix: its singular values of at least 1e-6.

    `weights` is (B, H, n, n). Rows and columns of tokens that are not `present` (B, n) are ignored.
    """
    pairs = present[:, None, :, None] & present[:, None, None, :]
    return (torch.linalg.svdvals(weights * pairs) >= RANK_TOLERANCE).sum(-1)


def query_likelihood(layer: Attention, record: LayerRecord) -> Tensor:
    """Return the negative log-likelihood (B, H, n) of each query; NaN without visible keys.

    A query i is a sample of the mixture of the keys j that it sees (MGK eq. 3 and 5), which have
    equal weights: -log mean_j sum_r pi_r exp(-|q_i - k_jr|^2 / (2 sigma_r^2)). Without the constant
    (2 pi sigma^2)^(-D / 2) of the densities the value is 0 if all keys are equal to the query.
    """
    inputs = record.inputs
    q = inputs.q.unsqueeze(2)
    keys = inputs.shared(inputs.keys)
    n = q.shape[-2]
    count = keys.shape[2]
    width = keys.shape[4]
    variance = layer.similarity.variances(keys).to(q) * width**0.5
    prior = layer.similarity.log_prior(n)
    distance = torch.cdist(q.expand(-1, -1, count, -1, -1), keys).square()
    logs = -distance / (2 * variance.unsqueeze(-1).unsqueeze(-1))
    if isinstance(prior, Tensor):
        prior = prior.unsqueeze(-2)
    logs = logs + prior
    terms = logs.logsumexp(2)
    all_tokens = slice(0, n)
    visible = inputs.masks.chunk(all_tokens, all_tokens, n, q.device)
    if visible is not None:
        terms = terms.masked_fill(~visible, -torch.inf)
    visible_keys = terms.isfinite().sum(-1)
    return visible_keys.log() - terms.logsumexp(-1)


def key_weights(layer: Attention) -> Tensor:
    """Return the weights (M H', d, D) of every projected key and key head; offsets have none."""
    shared = layer.key_heads * layer.head_dim
    queries = layer.num_heads * layer.head_dim
    weight = layer.qkv.weight[queries : queries + shared]
    more = layer.similarity.extra_key_weights()
    if more is not None:
        weight = torch.cat([weight, more])
    return weight.unflatten(0, (-1, layer.head_dim)).transpose(-1, -2)


def captured_variance(layer: Attention) -> dict[str, float]:
    """Return how few directions the heads of a layer share, in their QK and OV circuits.

    The matrices are the products of the concatenated heads, W_Q W_K^T and W_V W (d x d). The value
    is the mean over k of sum_{i <= k} s_i^2 / sum_i s_i^2, with the r singular values s of a matrix
    of rank at most r. It is 1 if all heads use one direction and (r + 1) / 2r if all directions
    count the same (Cordonnier et al. 2020, Fig. 1; DCMHA Fig. 5).

    Every key of a mixture is a separate circuit, and so is z with itself. A layer that takes keys
    from a latent or from another layer has no W_K, and the result is empty.
    """
    if not layer.projects_keys:
        return {}
    heads, shared, width = layer.num_heads, layer.key_heads, layer.head_dim
    sizes = [heads * width, shared * width, shared * width]

    def repeat_heads(weight: Tensor) -> Tensor:
        """Return (H D, d) from (H' D, d): head m has key head m // (H / H')."""
        groups = weight.unflatten(0, (shared, width))
        return groups.repeat_interleave(heads // shared, 0).flatten(0, 1)

    q, k, v = layer.qkv.weight.split(sizes)
    k = repeat_heads(k)
    v = repeat_heads(v)
    more = layer.similarity.extra_key_weights()
    if more is not None:
        # The sum of the products of all keys is the product of their sum.
        k = k + sum(repeat_heads(weight) for weight in more.split(shared * width))
    if layer.pair.projection is not None:
        # Second queries are circuits with the same keys.
        q = torch.cat([q, layer.pair.projection.weight])
        k = torch.cat([k, k])
    if layer.z is not None:
        q = torch.cat([q, layer.z.weight])
        k = torch.cat([k, layer.z.weight])
    return {"qk": _captured(q.T, k), "ov": _captured(v.T, layer.proj.weight.T)}


def _captured(left: Tensor, right: Tensor) -> float:
    """Return the captured variance of the product of (d, r) and (r, d)."""
    variance = torch.linalg.svdvals(left @ right)[: min(left.shape)].square()
    return float((variance.cumsum(0) / variance.sum()).mean())
