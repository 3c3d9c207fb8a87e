"""Composition across heads: mixing the heads at every pair of tokens (i, j).

- Talking heads: Shazeer et al. 2020, "Talking-Heads Attention", https://arxiv.org/abs/2003.02436.
- DCMHA: Xiao et al. 2024, "Improving Transformers with Dynamically Composable Multi-Head
  Attention", https://arxiv.org/abs/2405.08553, eq. 5-8 and appendix D.

Shapes: B batch, n tokens, d width, H heads, R rank; a: (B, H, c, m), of c queries and m keys.
"""

import functools
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lit_attn.attention.parts import DynamicConfig, LayerShape, StaticConfig

# Added to the mean square in the RMSNorm of w1 over the heads.
EPS = 1e-6

# Heads up to which compiled code mixes heads one by one, because matrix products then take longer:
# for every composition, and without a learned matrix on a CPU.
UNROLLED_HEADS, UNROLLED_LOW_RANK_HEADS = 8, 16


class Maps(NamedTuple):
    """Dynamic maps of tokens: down and up (B, n, R, H), and gate (B, n, H); None if absent."""

    down: Tensor | None
    up: Tensor | None
    gate: Tensor | None


class Composer(nn.Module):
    """Base of the compositions: `forward(a, query, key)` returns a (B, H, c, m) with mixed heads.

    `query` and `key` are what `maps` returned for the c queries and the m keys, or None. The layer
    selects the tokens of a chunk and stores the keys' maps in the cache.
    """

    def __init__(self, part: Any, shape: LayerShape) -> None:
        super().__init__()
        self.part = part

    def maps(self, x: Tensor) -> dict[str, Any]:
        """Return the maps of x (B, n, d): a NamedTuple of tensors (B, n, ...) by "query" and "key".

        A composition that does not depend on tokens returns {}.
        """
        return {}


class HeadMaps(Composer):
    """Sum of the identity, a learned matrix and a map of each token, w2 w1^T + diag(gate), on a."""

    def __init__(self, part: StaticConfig | DynamicConfig, shape: LayerShape) -> None:
        super().__init__(part, shape)
        self.heads = shape.heads
        self.has_identity = part.skip
        self.matrix = None
        if part.static:
            self.matrix = nn.Parameter(torch.empty(shape.heads, shape.heads, **shape.options))
        self.sides = nn.ModuleDict({side: TokenMaps(part, shape) for side in part.sides})
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw a small matrix; where it replaces the identity, add the identity to it."""
        if self.matrix is not None:
            nn.init.normal_(self.matrix, std=0.1 / math.sqrt(self.heads))
            if not self.has_identity:
                with torch.no_grad():
                    self.matrix.add_(torch.eye(self.heads, device=self.matrix.device))

    def maps(self, x: Tensor) -> dict[str, Any]:
        return {side: module(x) for side, module in self.sides.items()}

    def forward(self, a: Tensor, query: Maps | None, key: Maps | None) -> Tensor:
        if torch.compiler.is_compiling():
            if self.heads <= UNROLLED_HEADS:
                return self._unrolled(a, query, key)
            is_low_rank = self.matrix is None and a.device.type == "cpu"
            if is_low_rank and self.heads <= UNROLLED_LOW_RANK_HEADS:
                return _unrolled_low_rank(a, query, key)
        terms = [a] if self.has_identity else []
        if self.matrix is not None:
            terms.append(torch.einsum("gh,bhcm->bgcm", self.matrix.to(a.dtype), a))
        if query is not None:
            terms.append(self._map(a, query, "c"))
        if key is not None:
            terms.append(self._map(a, key, "m"))
        return functools.reduce(torch.add, terms)

    def _map(self, a: Tensor, maps: Maps, token: str) -> Tensor:
        """Return (w2 w1^T + diag(gate)) a for the maps of the queries ("c") or the keys ("m") of a.

        It is one product with every token's H x H matrix. The low-rank products and the gate would
        read a tensor of a's size three times, which takes 1.3 times as long at 6 heads and rank 2.
        """
        if maps.down is None and maps.gate is not None:
            return a * maps.gate.to(a.dtype).transpose(1, 2).unsqueeze(-1 if token == "c" else -2)
        if a.shape[-2] == 1:
            return self._map_one_query(a, maps)
        matrices = _matrices(maps).to(a.dtype)
        if token == "m":
            # Tokens come first and are contiguous: else a CPU's batched product copies each one.
            tokens_first = a.permute(0, 3, 1, 2).contiguous()
            return _GradientInOrder.apply(matrices @ tokens_first).permute(0, 2, 3, 1)
        return torch.einsum("bhcm,bcgh->bgcm", a, matrices)

    def _map_one_query(self, a: Tensor, maps: Maps) -> Tensor:
        """Return the product of `_map` for one query, as in decoding: a is (B, H, 1, m).

        Forming a matrix for each key takes longer than low-rank products. A cache stores the maps
        with their tokens last in memory, so that sums over heads add contiguous rows.
        """
        assert maps.down is not None
        assert maps.up is not None
        down, up = (part.to(a.dtype).permute(0, 2, 3, 1) for part in (maps.down, maps.up))
        heads = a.squeeze(2)
        out = ((heads.unsqueeze(1) * down).sum(2, keepdim=True) * up).sum(1)
        if maps.gate is not None:
            out = out + heads * maps.gate.to(a.dtype).transpose(1, 2)
        return out.unsqueeze(2)

    def _unrolled(self, a: Tensor, query: Maps | None, key: Maps | None) -> Tensor:
        """Return the composition of a, head by head, from the H x H map of every pair of tokens.

        Compiled, it is one pass over a without intermediate tensors: on a CPU 4.6 times as fast as
        the low-rank products at 6 heads. Uncompiled it would be slower.
        """
        fixed = torch.eye(self.heads, device=a.device, dtype=a.dtype) * float(self.has_identity)
        if self.matrix is not None:
            fixed = fixed + self.matrix.to(a.dtype)
        query_maps = fixed.view(1, self.heads, self.heads, 1)
        if query is not None:
            query_maps = query_maps + _matrices(query).permute(0, 2, 3, 1).to(a.dtype)
        key_maps = None if key is None else _matrices(key).permute(0, 2, 3, 1).to(a.dtype)
        heads = a.unbind(1)
        composed = []
        for g in range(self.heads):
            out = torch.zeros_like(heads[0])
            for h in range(self.heads):
                weight = query_maps[:, g, h].unsqueeze(-1)
                if key_maps is not None:
                    weight = weight + key_maps[:, g, h].unsqueeze(-2)
                out = out + weight * heads[h]
            composed.append(out)
        return torch.stack(composed, 1)


class _GradientInOrder(torch.autograd.Function):
    """The identity function, with a contiguous gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.contiguous()


class TokenMaps(nn.Module):
    """Maps of tokens: w = GELU(x W_1) W_2 with w1 normalised over heads, and gate = tanh(x W_g)."""

    def __init__(self, part: Any, shape: LayerShape) -> None:
        super().__init__()
        self.part: DynamicConfig = part
        self.hidden = 2 * part.rank * shape.heads
        if part.projection:
            self.into = nn.Linear(shape.dim, self.hidden, bias=False, **shape.options)
            self.out = nn.Parameter(torch.empty(self.hidden, self.hidden, **shape.options))
        if part.gate:
            self.gate = nn.Linear(shape.dim, shape.heads, bias=False, **shape.options)
        self.dim = shape.dim
        self.heads = shape.heads
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the published initial weights (docs/setups.md): the maps start near zero."""
        if self.part.projection:
            nn.init.normal_(self.into.weight, std=math.sqrt(2 / (self.dim + self.hidden)))
            rank, size = self.part.rank, self.heads
            nn.init.normal_(self.out, std=0.02 / (math.sqrt(2 * size * rank) * (size + rank)))
        if self.part.gate:
            scale = 0.05 if self.part.gate_init == "pytorch" else 0.005
            nn.init.normal_(self.gate.weight, std=scale * math.sqrt(2 / (self.dim + self.heads)))

    def forward(self, x: Tensor) -> Maps:
        down = up = gate = None
        if self.part.projection:
            approximate = "tanh" if self.part.gelu == "tanh" else "none"
            hidden = F.gelu(self.into(x), approximate=approximate)
            weights = (hidden @ self.out).unflatten(-1, (2 * self.part.rank, self.heads))
            down, up = weights.chunk(2, dim=-2)
            down = F.rms_norm(down, (self.heads,), eps=EPS)
        if self.part.gate:
            gate = torch.tanh(self.gate(x))
        return Maps(down, up, gate)


def _matrices(maps: Maps) -> Tensor:
    """Return w2 w1^T + diag(gate) of every token, (B, n, H, H)."""
    terms = []
    if maps.down is not None and maps.up is not None:
        terms.append(torch.einsum("bnrg,bnrh->bngh", maps.up, maps.down))
    if maps.gate is not None:
        terms.append(torch.diag_embed(maps.gate))
    return functools.reduce(torch.add, terms)


def _unrolled_low_rank(a: Tensor, query: Maps | None, key: Maps | None) -> Tensor:
    """Return a + sum_r up_r (down_r.a) + gate * a for both sides, (B, H, c, m), head by head.

    Compiled on a CPU, it is one pass over a. At 12 heads, 65 tokens and batch 128 a block takes
    1.76 times timm's time and 1.80 times its memory; with `_map` it takes 2.0 and 2.68 times.
    """
    heads = a.unbind(1)
    composed = list(heads)
    for axis, maps in ((-1, query), (-2, key)):
        if maps is None:
            continue
        down, up, gate = (
            None if part is None else part.movedim(1, -1).contiguous().to(a.dtype) for part in maps
        )
        if down is not None and up is not None:
            for r in range(down.shape[1]):
                terms = [down[:, r, h].unsqueeze(axis) * head for h, head in enumerate(heads)]
                low = functools.reduce(torch.add, terms)
                weights = [up[:, r, g].unsqueeze(axis) for g in range(len(heads))]
                composed = [total + w * low for total, w in zip(composed, weights, strict=True)]
        if gate is not None:
            for g, head in enumerate(heads):
                composed[g] = composed[g] + gate[:, g].unsqueeze(axis) * head
    return torch.stack(composed, 1)
