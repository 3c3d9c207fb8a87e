"""Composition across heads: mixing the heads at every pair of tokens (i, j).

- Talking heads: Shazeer et al. 2020, "Talking-Heads Attention", https://arxiv.org/abs/2003.02436.
- DCMHA: Xiao et al. 2024, "Improving Transformers with Dynamically Composable Multi-Head
  Attention", https://arxiv.org/abs/2405.08553, eq. 5-8 and appendix D.

Shapes: B batch, n tokens, d width, H heads, R rank; a: (B, H, c, m), of c queries and m keys.
"""

import functools
import math
from typing import Any, ClassVar, Literal, NamedTuple, cast

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from lit_attn.attention.parts import LayerShape, Part
from lit_attn.attention.precision import without_autocast
from lit_attn.attention.projections import multiply_together
from lit_attn.schema.base import Kind, consistency_check

# Added to the mean square in the RMSNorm of w1 over the heads.
MAP_NORM_EPS = 1e-6


class Maps(NamedTuple):
    """Dynamic maps of tokens: down and up (B, n, R, H), and gate (B, n, H); None if absent."""

    down: Tensor | None
    up: Tensor | None
    gate: Tensor | None


class ComposeConfig(Part, Kind):
    """Family of the mixing of heads at each pair of tokens (i, j).

    `build` returns a lit_attn.attention.compose.Composer, once for every place. The inputs of
    `reference` are x (B, n, d) and the logits or weights a (B, H, n, n); it returns a mixed. In
    cross-attention the memory (B, m, d) follows them.
    """

    def places(self) -> tuple[str, ...]:
        """Return the places of mixing: "pre" (before the normaliser), "post" (after it) or both."""
        return ("pre", "post")


class Composer(nn.Module):
    """Base of the compositions: `forward(a, query, key)` returns a (B, H, c, m) with mixed heads.

    `query` and `key` are what `maps` returned for the c queries and the m keys, or None. The layer
    selects the tokens of a chunk and stores the keys' maps in the cache.
    """

    keeps_zeros = False
    """True if a pair of tokens with zeros in all heads keeps them, so that it stays masked."""

    def __init__(self, part: Any, shape: LayerShape) -> None:
        super().__init__()
        self.part = part

    def maps(self, x: Tensor) -> dict[str, Any]:
        """Return the maps of x (B, n, d): a NamedTuple of tensors (B, n, ...) by "query" and "key".

        A composition that does not depend on tokens returns {}.
        """
        return {}


class NoComposeConfig(ComposeConfig, kind="none"):
    """Independent heads."""

    def places(self) -> tuple[str, ...]:
        return ()

    def build(self, shape: LayerShape) -> Any:
        return Composer(self, shape)


class PlacedCompose(ComposeConfig):
    """Composition with a choice of its places."""

    place: Literal["pre+post", "pre", "post"] = Field(
        "pre+post", description="mixing of the logits (pre), of the weights (post), or of both"
    )

    def places(self) -> tuple[str, ...]:
        return tuple(self.place.split("+"))

    def reference(self, module: Any, x: Tensor, a: Tensor, memory: Tensor | None = None) -> Tensor:
        """DCMHA, App. D: every pair (i, j) has its own H x H map."""
        heads = a.shape[1]
        maps = torch.zeros(x.shape[0], *a.shape[2:], heads, heads, dtype=x.dtype)
        if module.has_identity:
            maps = maps + torch.eye(heads, dtype=x.dtype)
        if module.matrix is not None:
            maps = maps + module.matrix
        for side, token_maps in module.sides.items():
            tokens = x if side == "query" or memory is None else memory
            side_maps = find_token_maps(token_maps, tokens, heads)
            maps = maps + (side_maps.unsqueeze(2) if side == "query" else side_maps.unsqueeze(1))
        return torch.einsum("bijgh,bhij->bgij", maps, a)


class StaticConfig(PlacedCompose, kind="static"):
    """A learned H x H matrix over the heads (talking heads, Shazeer et al. 2020)."""

    skip: bool = Field(False, description="add the heads too, as in DCMHA's static projection")
    static: ClassVar[bool] = True
    sides: ClassVar[tuple[str, ...]] = ()

    def build(self, shape: LayerShape) -> Any:
        return HeadMaps(self, shape)


class DynamicConfig(PlacedCompose):
    """a + sum_r w2_r (w1_r.a) + a * gate, with weights computed from tokens (DCMHA eq. 5-8).

    The kinds `query`, `key` and `query+key` name the tokens that the weights are computed from.
    """

    skip: ClassVar[bool] = True
    projection: bool = Field(True, description="include the low-rank term sum_r w2_r (w1_r.a)")
    gate: bool = Field(True, description="include the gate a * gate")
    static: bool = Field(False, description="add a learned H x H matrix")
    rank: int = Field(2, ge=1, description="rank of the projection")
    gate_init: Literal["pytorch", "jax"] = Field(
        "pytorch",
        description="scale of the gate's initial weights in a released code: 0.05, or 0.005 (jax)",
    )
    gelu: Literal["exact", "tanh"] = Field(
        "exact",
        description="form of GELU; exact in the released PyTorch code, tanh in the JAX code",
    )

    @consistency_check
    def _makes_sense(self) -> None:
        if not (self.projection or self.gate):
            raise ValueError("needs `projection: true` or `gate: true`")

    @property
    def sides(self) -> tuple[str, ...]:
        """Tokens that weights are computed from: "query", "key" or both."""
        return tuple(self.kind.split("+"))

    def build(self, shape: LayerShape) -> Any:
        return HeadMaps(self, shape)


class QueryComposeConfig(DynamicConfig, kind="query"):
    """Mixing weights computed from the query's token."""


class KeyComposeConfig(DynamicConfig, kind="key"):
    """Mixing weights computed from the key's token."""


class QueryKeyComposeConfig(DynamicConfig, kind="query+key"):
    """Sum of the mixing weights computed from the query's and from the key's token."""


class HeadMaps(Composer):
    """Sum of the identity, a learned matrix and a map of each token, w2 w1^T + diag(gate), on a."""

    keeps_zeros = True

    def __init__(self, part: StaticConfig | DynamicConfig, shape: LayerShape) -> None:
        super().__init__(part, shape)
        self.heads = shape.heads
        self.has_identity = part.skip
        self.matrix = None
        if part.static:
            self.matrix = nn.Parameter(torch.empty(shape.heads, shape.heads, **shape.options))
        self.sides = nn.ModuleDict()
        for side in part.sides:
            self.sides[side] = TokenMaps(part, shape)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw a small matrix; where it replaces the identity, add the identity to it."""
        if self.matrix is not None:
            nn.init.normal_(self.matrix, std=0.1 / math.sqrt(self.heads))
            if not self.has_identity:
                with torch.no_grad():
                    self.matrix.add_(torch.eye(self.heads, device=self.matrix.device))

    def maps(self, x: Tensor) -> dict[str, Any]:
        sides = cast("dict[str, TokenMaps]", self.sides)
        linears = {}
        for side, module in sides.items():
            for name, linear in module.named_children():
                linears[side, name] = cast(nn.Linear, linear)
        if not linears:
            return {}
        products = multiply_together(x, linears)
        maps = {}
        for side, module in sides.items():
            into = products.get((side, "into"))
            gate = products.get((side, "gate"))
            maps[side] = module(into, gate)
        return maps

    def forward(self, a: Tensor, query: Maps | None, key: Maps | None) -> Tensor:
        # Autocast would compute the sums over heads, which are as large as a, in float32.
        with without_autocast(a):
            is_open = self.has_identity
            terms = []
            if self.matrix is not None:
                # With the pairs of tokens in one axis and a matrix for each sequence, this product
                # needs no copies. For a single matrix, compiled code would transpose `a`.
                matrices = self.matrix.to(a.dtype).expand(len(a), -1, -1)
                product = matrices @ a.flatten(2)
                terms.append(product.view_as(a))
            if query is not None:
                terms.append(_map(a, query, "c", is_open))
                is_open = False
            if key is not None:
                terms.append(_map(a, key, "m", is_open))
                is_open = False
            if is_open:
                terms.append(a)
            return functools.reduce(torch.add, terms)


def _map(a: Tensor, maps: Maps, token: str, adds_identity: bool) -> Tensor:
    """Return (w2 w1^T + diag(gate)) a for the maps of the queries ("c") or the keys ("m") of a.

    With `adds_identity` it is added to a. Uncompiled it is one product with every token's H x H
    matrix. The low-rank products and the gate would read a tensor of a's size three times, which
    takes 1.3 times as long at 6 heads and rank 2.
    """
    down, up, gate = maps
    axis_of_others = -1 if token == "c" else -2
    if down is None or up is None:
        assert gate is not None
        factor = gate + 1 if adds_identity else gate
        return a * _beside_pairs(factor, a, axis_of_others)
    if a.shape[-2] == 1 or torch.compiler.is_compiling():
        return _low_rank(a, maps, axis_of_others, adds_identity)
    matrices = torch.einsum("bnrg,bnrh->bngh", up.to(a.dtype), down.to(a.dtype))
    diagonal = None if gate is None else gate.to(a.dtype)
    if adds_identity:
        diagonal = a.new_ones(a.shape[1]) if diagonal is None else diagonal + 1
    if diagonal is not None:
        matrices = matrices + torch.diag_embed(diagonal)
    if token == "c":
        return torch.einsum("bhcm,bcgh->bgcm", a, matrices)
    return torch.einsum("bhcm,bmgh->bgcm", a, matrices)


def _low_rank(a: Tensor, maps: Maps, axis_of_others: int, adds_identity: bool) -> Tensor:
    """Return the result of `_map` for a (B, H, c, m), by sums over the heads.

    `axis_of_others` is the axis of the tokens that the maps do not depend on: m for the maps of
    queries, and c for those of keys. Compiled, each rank reads a once and writes one head.
    """
    assert maps.down is not None
    assert maps.up is not None
    down = _beside_pairs(maps.down, a, axis_of_others)
    up = _beside_pairs(maps.up, a, axis_of_others)
    out = a if adds_identity else torch.zeros_like(a)
    for r in range(down.shape[1]):
        low = (a * down[:, r]).sum(1, keepdim=True)
        out = out + low * up[:, r]
    if maps.gate is not None:
        out = out + a * _beside_pairs(maps.gate, a, axis_of_others)
    return out


def _beside_pairs(part: Tensor, a: Tensor, axis_of_others: int) -> Tensor:
    """Return a map (B, n, ...) as (B, ..., n, 1) or (B, ..., 1, n), in the precision of a."""
    return part.movedim(1, -1).unsqueeze(axis_of_others).to(a.dtype)


class TokenMaps(nn.Module):
    """Maps of tokens: w = GELU(x W_1) W_2 with w1 normalised over heads, and gate = tanh(x W_g)."""

    def __init__(self, part: Any, shape: LayerShape) -> None:
        super().__init__()
        self.part: DynamicConfig = part
        hidden = 2 * part.rank * shape.heads
        if part.projection:
            self.into = nn.Linear(shape.dim, hidden, bias=False, **shape.options)
            self.out = nn.Parameter(torch.empty(hidden, hidden, **shape.options))
        if part.gate:
            self.gate = nn.Linear(shape.dim, shape.heads, bias=False, **shape.options)
        self.heads = shape.heads
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the published initial weights (docs/setups.md): the maps start near zero."""
        if self.part.projection:
            nn.init.xavier_normal_(self.into.weight)
            rank, size = self.part.rank, self.heads
            nn.init.normal_(self.out, std=0.02 / (math.sqrt(2 * size * rank) * (size + rank)))
        if self.part.gate:
            scale = 0.05 if self.part.gate_init == "pytorch" else 0.005
            nn.init.xavier_normal_(self.gate.weight, gain=scale)

    def forward(self, into: Tensor | None, gate: Tensor | None) -> Maps:
        """Return the maps from x W_1 and x W_g, (B, n, columns) each, or None if absent."""
        down = up = None
        if into is not None:
            approximate = "tanh" if self.part.gelu == "tanh" else "none"
            hidden = F.gelu(into, approximate=approximate)
            weights = (hidden @ self.out).unflatten(-1, (2 * self.part.rank, self.heads))
            down, up = weights.chunk(2, dim=-2)
            # The norm adds squares in float32 in any case; autocast would convert its input too.
            with without_autocast(down):
                down = F.rms_norm(down, (self.heads,), eps=MAP_NORM_EPS)
        if gate is not None:
            gate = torch.tanh(gate)
        return Maps(down=down, up=up, gate=gate)


def find_token_maps(module: Any, x: Tensor, heads: int) -> Tensor:
    """Return the maps of the tokens (B, n, H, H): sum_r w2_r w1_r^T + diag(gate)."""
    maps = torch.zeros(*x.shape[:2], heads, heads, dtype=x.dtype)
    part = module.part
    if part.projection:
        hidden = F.gelu(module.into(x), approximate="tanh" if part.gelu == "tanh" else "none")
        w1, w2 = (hidden @ module.out).chunk(2, dim=-1)
        w1, w2 = (w.unflatten(-1, (part.rank, heads)) for w in (w1, w2))
        w1 = w1 / (w1.square().mean(-1, keepdim=True) + MAP_NORM_EPS).sqrt()
        maps = maps + torch.einsum("bnrg,bnrh->bngh", w2, w1)
    if part.gate:
        maps = maps + torch.diag_embed(torch.tanh(module.gate(x)))
    return maps
