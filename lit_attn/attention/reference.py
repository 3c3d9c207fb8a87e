"""The formulas of all parts, written to be compared with the papers' equations.

They are slow and form all n x n numbers. The tests compare values and gradients of the fast modules
with them in float64. `form` is the fast module, whose parameters the formula uses.

Shapes: n tokens, H heads, D head width, d = H D; q, k, v, z: (B, H, n, D); logits: (B, H, n, n).
"""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lit_attn.attention.compose import EPS
from lit_attn.attention.layer import Attention
from lit_attn.attention.linear import LINEAR_OFFSET
from lit_attn.attention.masks import HIDES_FROM
from lit_attn.attention.normaliser import EPS as DIFFERENTIAL_EPS
from lit_attn.attention.normaliser import SOFTPICK_EPS
from lit_attn.attention.residual import FLOOR
from lit_attn.attention.rotary import Rotary


def attention(
    layer: Attention,
    x: Tensor,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    rotary: Rotary | None = None,
    memory: Tensor | None = None,
    first_values: Tensor | None = None,
) -> Tensor:
    """Return the output (B, n, d) of `layer` by its formulas, without dropout.

    `first_values` are the values (B, n, H', D) of the network's first layer; None in that layer.
    """
    parts, tokens = layer.spec, x if memory is None else memory
    if attn_mask is not None and attn_mask.ndim > 2 and attn_mask.shape[-3] > 1:
        # The mask of a head is that of each of its queries.
        attn_mask = attn_mask.repeat_interleave(parts.pair.queries, dim=-3)
    q, keys, v = project(layer, x, rotary, tokens, first_values)
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
    return out


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
) -> tuple[Tensor, list[Tensor], Tensor]:
    """Return q of x, and the M keys and v of `memory` (x if None), (B, H, n, D) each.

    `first_values` are the values (B, n, H', D) of the network's first layer.
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
    q, k, own_v = mapped
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


def concat(h: Tensor) -> Tensor:
    """Return (B, n, H D) from (B, H, n, D)."""
    return h.transpose(1, 2).flatten(-2)


def rotate(x: Tensor, rotary: Rotary) -> Tensor:
    """Su et al. 2021, section 3.2.2: coordinates j and j + D/2 as one complex number, turned."""
    width = 2 * rotary.cos.shape[-1]  # Further coordinates are not turned.
    first, second = x[..., :width].chunk(2, dim=-1)
    turned = torch.complex(first, second) * torch.complex(*(part.to(x) for part in rotary))
    return torch.cat([turned.real, turned.imag, x[..., width:]], dim=-1)


def dot_product(form: Any, q: Tensor, keys: list[Tensor], tau: Tensor | float) -> Tensor:
    """Vaswani et al. 2017, eq. 1: the scaled dot product."""
    return tau * q @ keys[0].transpose(-1, -2) / math.sqrt(q.shape[-1])


def mixture(form: Any, q: Tensor, keys: list[Tensor], tau: Tensor | float) -> Tensor:
    """MGK (7); with the hard assignment the largest of its terms, without pi."""
    unit = math.sqrt(q.shape[-1])
    variances = [1.0] * len(keys)
    if form.part.variance == "learned":
        # (M,), or (M, H, 1, 1) if each head has its own
        variances = form.log_variance.exp()
        if form.part.variance_scope == "head":
            variances = variances.T.unsqueeze(-1).unsqueeze(-1)
    elif form.part.variance is not None:
        variances = form.part.variance
    terms = []
    for r, key in enumerate(keys):
        if form.part.kernel == "dot":
            term = q @ key.transpose(-1, -2) / unit
        else:
            term = -distance(q, key) / (2 * variances[r] * unit)
        if form.part.assignment == "soft":
            term = term + log_prior(form, r, key.shape[-2]).unsqueeze(-2)
        terms.append(tau * term)
    stacked = torch.stack(terms)
    return stacked.amax(0) if form.part.assignment == "hard" else stacked.logsumexp(0)


def linear(form: Any, q: Tensor, keys: list[Tensor], visible: Tensor, is_causal: bool) -> Tensor:
    """MGK section 2.4: phi(q_i).sum_r pi_r phi(k_jr) over its sum in j."""

    def phi(t: Tensor) -> Tensor:
        plain = feature_map(form.part.phi, t)
        total = plain.sum(-1, keepdim=True)
        total = total.masked_fill(total == 0, 1.0)
        return plain / total if form.part.features == "sum-to-one" else plain

    (queries, width), n = q.shape[-2:], keys[0].shape[-2]
    weights = [log_prior(form, r, n).exp().unsqueeze(-1) for r in range(len(keys))]
    if form.part.mixing == "before":
        mixed = phi(torch.stack([w * key for w, key in zip(weights, keys, strict=True)]).sum(0))
    else:
        mixed = torch.stack([w * phi(key) for w, key in zip(weights, keys, strict=True)]).sum(0)
    similarity = (phi(q) @ mixed.transpose(-1, -2)).masked_fill(~visible, 0)
    factor = math.sqrt(width) if form.part.divide_by == "scaled-sum" else 1.0
    total = factor * similarity.sum(-1, keepdim=True) + LINEAR_OFFSET * math.sqrt(width)
    if form.part.divide_by == "root-length":
        lengths = [i + 1 if is_causal else n for i in range(queries)]
        total = torch.tensor(lengths).double().sqrt().unsqueeze(-1)
    return similarity / total


def feature_map(name: str, t: Tensor) -> Tensor:
    """Return the features of t (..., D); lit_attn.attention.mixture_parts has their sources."""
    width = t.shape[-1]
    if name == "relu":
        return torch.where(t > 0, t, torch.zeros_like(t))
    if name == "softmax":
        exponentials = torch.exp(t - t.detach().amax(-1, keepdim=True))
        return exponentials / exponentials.sum(-1, keepdim=True)
    if name == "dpfp":
        r = [t[..., c] for c in range(width)]
        r += [-t[..., c] for c in range(width)]
        r = [torch.where(element > 0, element, torch.zeros_like(element)) for element in r]
        return torch.stack([r[c] * r[c - 1] for c in range(2 * width)], dim=-1)
    if name == "taylor":
        t = t / width**0.25
        elements = [torch.ones_like(t[..., 0])]
        elements += [t[..., a] for a in range(width)]
        for a in range(width):
            elements += [t[..., a] * t[..., b] / 2**0.5 for b in range(width)]
        return torch.stack(elements, dim=-1)
    return F.elu(t) + 1


def mixed_keys(form: Any, x: Tensor, k: Tensor) -> list[Tensor]:
    """MGK section 2.2: projections of every key (option A), or one key plus offsets (option B)."""
    if form.part.source == "shifted":
        return [k + form.shift[r].flatten() for r in range(form.part.keys)]
    if form.part.keys == 1:
        return [k]
    return [k, *form.more(x).chunk(form.part.keys - 1, dim=-1)]


def distance(q: Tensor, k: Tensor) -> Tensor:
    """|q_i - k_j|^2, pair by pair."""
    return (q.unsqueeze(-2) - k.unsqueeze(-3)).square().sum(-1)


def log_prior(form: Any, r: int, n: int) -> Tensor:
    """log pi_r, broadcastable to (H, n)."""
    if form.part.prior == "fixed" or form.part.keys == 1:
        return torch.tensor([[1 / form.part.keys]], dtype=torch.double).log()
    prior = form.prior[..., :n]
    if form.part.prior == "learned":
        return torch.log_softmax(prior, dim=0)[r]
    return prior[r].clamp(1e-38, 1).log()


def head_maps(form: Any, x: Tensor, a: Tensor, memory: Tensor | None = None) -> Tensor:
    """DCMHA, App. D: every pair (i, j) has its own H x H map."""
    heads = a.shape[1]
    maps = torch.zeros(x.shape[0], *a.shape[2:], heads, heads, dtype=x.dtype)
    if form.has_identity:
        maps = maps + torch.eye(heads, dtype=x.dtype)
    if form.matrix is not None:
        maps = maps + form.matrix
    for side, module in form.sides.items():
        tokens = x if side == "query" or memory is None else memory
        side_maps = token_maps(module, tokens, heads)
        maps = maps + (side_maps.unsqueeze(2) if side == "query" else side_maps.unsqueeze(1))
    return torch.einsum("bijgh,bhij->bgij", maps, a)


def token_maps(form: Any, x: Tensor, heads: int) -> Tensor:
    """Return the maps of the tokens (B, n, H, H): sum_r w2_r w1_r^T + diag(gate)."""
    maps = torch.zeros(*x.shape[:2], heads, heads, dtype=x.dtype)
    part = form.part
    if part.projection:
        hidden = F.gelu(form.into(x), approximate="tanh" if part.gelu == "tanh" else "none")
        w1, w2 = (hidden @ form.out).chunk(2, dim=-1)
        w1, w2 = (w.unflatten(-1, (part.rank, heads)) for w in (w1, w2))
        w1 = w1 / (w1.square().mean(-1, keepdim=True) + EPS).sqrt()
        maps = maps + torch.einsum("bnrg,bnrh->bngh", w2, w1)
    if part.gate:
        maps = maps + torch.diag_embed(torch.tanh(form.gate(x)))
    return maps


def softmax(form: Any, logits: Tensor, visible: Tensor) -> Tensor:
    """Vaswani et al. 2017, eq. 1."""
    return torch.softmax(logits, dim=-1)


def sigmoid(form: Any, logits: Tensor, visible: Tensor) -> Tensor:
    """Ramapuram et al. 2024, section 2: sigmoid(s_ij + b), b = -log n."""
    n = visible.expand(*visible.shape[:-1], logits.shape[-1]).sum(-1, keepdim=True).clamp_min(1)
    return 1 / (1 + torch.exp(-(logits - n.double().log()).clamp_min(-700)))


def offset_softmax(form: Any, logits: Tensor, visible: Tensor) -> Tensor:
    """transformer-mgk, language modelling: exp(s_ij) / (sum_j exp(s_ij) + 1e-6)."""
    largest = largest_logit(logits)
    exponentials = torch.exp(logits - largest)
    offset = form.part.offset * torch.exp(-largest)
    return exponentials / (exponentials.sum(-1, keepdim=True) + offset)


def largest_logit(logits: Tensor) -> Tensor:
    """Return a number for each query by whose exponential both sides of a ratio can be divided."""
    # Without a visible key all logits are -1e300, and the exponential of 1e300 has no gradient.
    return logits.detach().amax(-1, keepdim=True).clamp_min(-700)


def sink(form: Any, logits: Tensor, visible: Tensor) -> Tensor:
    """gpt-oss: exp(s_ij) / (exp(b_m) + sum_j exp(s_ij))."""
    largest = largest_logit(logits)
    exponentials = torch.exp(logits - largest)
    sink = torch.exp(form.logit.view(-1, 1, 1) - largest)
    return exponentials / (sink + exponentials.sum(-1, keepdim=True))


def softpick(form: Any, logits: Tensor, visible: Tensor) -> Tensor:
    """Zuhri et al. 2025, eq. 3, with the scaled epsilon of its released code."""
    largest = largest_logit(logits).clamp_min(0)
    difference = torch.exp(logits - largest) - torch.exp(-largest)
    difference = difference.masked_fill(~visible, 0)
    total = difference.abs().sum(-1, keepdim=True) + SOFTPICK_EPS
    return difference.clamp_min(0) / total


def capped_softmax(form: Any, logits: Tensor, visible: Tensor) -> Tensor:
    """Gemma 2, section 2: softmax of c tanh(s / c) over the visible keys."""
    capped = form.part.cap * torch.tanh(logits / form.part.cap)
    return torch.softmax(capped.masked_fill(~visible, -1e300), dim=-1)


def differential(form: Any, logits: Tensor, visible: Tensor) -> Tensor:
    """Ye et al. 2024, eq. 1 and 2: the weights of a pair of heads, for both of them."""
    q1, q2, k1, k2 = form.vectors
    factor = torch.exp(q1 @ k1) - torch.exp(q2 @ k2) + form.lambda_init
    # A head that sees no key has no weights.
    a = torch.softmax(logits, dim=-1).masked_fill(~visible, 0)
    weights = []
    for m in range(0, logits.shape[1], 2):
        weights += [a[:, m] - factor * a[:, m + 1]] * 2
    return torch.stack(weights, dim=1)


def differential_heads(form: Any, h: Tensor) -> Tensor:
    """Ye et al. 2024, eq. 3: (1 - lambda_init) LN(head), with RMSNorm over a pair's 2 D values."""
    heads = []
    for m in range(0, h.shape[1], 2):
        head = torch.cat([h[:, m], h[:, m + 1]], dim=-1)
        head = head / (head.square().mean(-1, keepdim=True) + DIFFERENTIAL_EPS).sqrt()
        if form.weight is not None:
            head = head * form.weight
        heads += list(((1 - form.lambda_init) * head).chunk(2, dim=-1))
    return torch.stack(heads, dim=1)


def along_values(h: Tensor, v: Tensor, scope: str) -> Tensor:
    """alpha V over all heads (BeliefFormer 10) or beta_m v_m in each head (13), (B, n, d)."""
    if scope == "global":
        h, v = concat(h), concat(v)
    factor = (h * v).sum(-1, keepdim=True) / (v * v).sum(-1, keepdim=True).clamp_min(FLOOR)
    return factor * v if scope == "global" else concat(factor * v)


def full(form: Any, x: Tensor, h: Tensor, v: Tensor, project: nn.Linear) -> Tensor:
    """BeliefFormer (8)."""
    return project(concat(h))


def perpendicular(form: Any, x: Tensor, h: Tensor, v: Tensor, project: nn.Linear) -> Tensor:
    """Return the perpendicular part (BeliefFormer eq. 12), or both scopes (eq. 15)."""
    along = along_values(h, v, "head")
    if form.part.strength == "tanh":
        strengths = torch.tanh(form.strength).repeat_interleave(h.shape[-1])
        return project(concat(h) - strengths * along)
    across = concat(h) - along
    if form.part.scope == "head":
        return project(across)
    out = project(concat(h) - along_values(h, v, "global"))
    return out + form.local(across) if form.part.scope == "both" else out


def projected(form: Any, x: Tensor, h: Tensor, v: Tensor, project: nn.Linear) -> Tensor:
    """Belief2, Fig. 3; both scopes are added as the perpendicular ones are in eq. 7."""
    if form.part.scope == "both":
        return project(along_values(h, v, "global")) + form.local(along_values(h, v, "head"))
    return project(along_values(h, v, form.part.scope))


def value(form: Any, x: Tensor, h: Tensor, v: Tensor, project: nn.Linear) -> Tensor:
    """Belief2, Fig. 3."""
    return project(concat(v))


def discrepancy(form: Any, x: Tensor, h: Tensor, v: Tensor, project: nn.Linear) -> Tensor:
    """AttentionX (9), (10); a learned gamma is a parameter of the layer or of each head."""
    gamma = form.part.gamma
    if form.part.gamma_scope == "layer":
        gamma = form.gamma
    elif form.part.gamma_scope == "head":
        gamma = form.gamma.repeat_interleave(v.shape[-1])
    return project(gamma * concat(v) - concat(h))


def split(form: Any, x: Tensor, h: Tensor, v: Tensor, project: nn.Linear) -> Tensor:
    """Belief2 (14), (15); scope both adds the components of each head as in (7)."""
    scope = "head" if form.part.scope == "head" else "global"
    along = along_values(h, v, scope)
    width = h.shape[-1]
    out = project(concat(h) - along) + form.projected(phi(form, along, width))
    if form.part.scope == "both":
        along = along_values(h, v, "head")
        out = out + form.local(concat(h) - along) + form.local_projected(phi(form, along, width))
    return out


def phi(form: Any, t: Tensor, width: int) -> Tensor:
    """Belief2 (15): phi of the projected part (B, n, d); `width` is D. Learned phi: Remark 2."""
    functions = {
        "identity": t,
        "gelu": t * (1 + torch.erf(t / math.sqrt(2))) / 2,
        "silu": t / (1 + torch.exp(-t)),
        "relu": torch.where(t > 0, t, torch.zeros_like(t)),
        "tanh": torch.tanh(t),
    }
    if form.part.phi_scope == "fixed":
        return functions[form.part.activation]
    weights = form.phi.expand(t.shape[-1] // width, -1).repeat_interleave(width, dim=0)
    total = torch.zeros_like(t)
    for number, value in enumerate(functions.values()):
        total = total + weights[:, number] * value
    return total
