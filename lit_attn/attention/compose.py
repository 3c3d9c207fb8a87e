"""Fast forms of composition across heads: an H x H map at every pair of tokens (i, j).

Shapes: B batch, n tokens, d width, H heads, G groups of h = H / G heads, R rank; a: (B, H, c, m),
logits or weights of c queries and m keys.

A dynamic map is the sum of one that depends on the query's token and one that depends on the key's,
each w2 w1^T + diag(gate). Both read the same a (DCMHA, App. D).
"""

import functools
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lit_attn.attention import spec
from lit_attn.attention.similarity import Shape

# Heads up to which a compiled composition is unrolled: H^2 terms.
UNROLLED_UP_TO = 8

# RMSNorm of w1 over the heads of a group.
EPS = 1e-6


class Maps(NamedTuple):
    """What one token's maps are made of: down, up (B, n, G, R, h) and gate (B, n, H), or None."""

    down: Tensor | None
    up: Tensor | None
    gate: Tensor | None

    def rows(self, which: slice) -> "Maps":
        """Those of some tokens."""
        return Maps(*(None if part is None else part[:, which] for part in self))


class Composer(nn.Module):
    """The composition at one place, before or after the softmax."""

    def __init__(self, part: spec.StaticConfig | spec.DynamicConfig, shape: Shape) -> None:
        """Raise ValueError where the groups do not divide the heads."""
        super().__init__()
        self.part = part
        self.heads = shape.heads
        fixed = isinstance(part, spec.StaticConfig) or part.static
        self.matrix = None
        if fixed:
            self.matrix = nn.Parameter(torch.empty(shape.heads, shape.heads, **shape.factory))
        self.sides = nn.ModuleDict()
        self.skip = True
        if isinstance(part, spec.StaticConfig):
            self.skip = part.skip
        else:
            self.sides.update({side: TokenMaps(part, shape) for side in part.kind.split("+")})
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Talking heads start near their heads as they are; a matrix beside them starts small."""
        if self.matrix is not None:
            nn.init.normal_(self.matrix, std=0.1 / math.sqrt(self.heads))
            if not self.skip:
                with torch.no_grad():
                    self.matrix.add_(torch.eye(self.heads, device=self.matrix.device))

    def maps(self, x: Tensor) -> dict[str, Maps]:
        """What x (B, n, d) says about its tokens' maps, as query and as key."""
        return {side: module(x) for side, module in self.sides.items()}

    def forward(self, a: Tensor, query: Maps | None, key: Maps | None) -> Tensor:
        """a (B, H, c, m) composed; the maps are those of its c queries and m keys."""
        one_group = isinstance(self.part, spec.StaticConfig) or self.part.groups == 1
        if torch.compiler.is_compiling() and one_group and self.heads <= UNROLLED_UP_TO:
            return self._unrolled(a, query, key)
        terms = [a] if self.skip else []
        if self.matrix is not None:
            terms.append(torch.einsum("gh,bhcm->bgcm", self.matrix.to(a.dtype), a))
        if query is not None:
            terms.append(self._of_tokens(a, query, "c"))
        if key is not None:
            terms.append(self._of_tokens(a, key, "m"))
        return functools.reduce(torch.add, terms)

    def _of_tokens(self, a: Tensor, maps: Maps, token: str) -> Tensor:
        """(w2 w1^T + diag(gate)) a, with the maps of the queries (c) or the keys (m) of a.

        One product with each token's whole matrix: the low-rank products and the gate would go over
        a, or as much, three times. At 6 heads and rank 2 that takes 1.3 times as long.
        """
        if maps.down is None and maps.gate is not None:
            return a * maps.gate.to(a.dtype).transpose(1, 2).unsqueeze(-1 if token == "c" else -2)
        assert isinstance(self.part, spec.DynamicConfig)
        if token == "m" and a.shape[-2] == 1:
            return self._of_keys_alone(a, maps)
        matrices = _matrices(maps, self.part.groups).to(a.dtype)
        if token == "m":
            # Tokens first and in order: else a CPU's batched product copies them one by one.
            groups = a.unflatten(1, (self.part.groups, -1)).permute(0, 4, 1, 2, 3).contiguous()
            composed = _GradientInOrder.apply(matrices @ groups)
            return composed.permute(0, 2, 3, 4, 1).flatten(1, 2)
        groups = a.unflatten(1, (self.part.groups, -1))
        return torch.einsum("bkhcm,bckgh->bkgcm", groups, matrices).flatten(1, 2)

    def _of_keys_alone(self, a: Tensor, maps: Maps) -> Tensor:
        """The same with the maps of the keys for one query, as in decoding: a is (B, H, 1, m).

        Each key's matrix would be used once, so forming it costs more than its low rank: on a CPU
        three times as much at 6 heads, six times at 32.
        """
        assert isinstance(self.part, spec.DynamicConfig)
        assert maps.down is not None
        assert maps.up is not None
        groups = a.unflatten(1, (self.part.groups, -1)).permute(0, 4, 1, 3, 2)
        low = groups @ maps.down.to(a.dtype).transpose(-1, -2)
        out = low @ maps.up.to(a.dtype)
        if maps.gate is not None:
            gate = maps.gate.to(a.dtype).unflatten(-1, (self.part.groups, 1, -1))
            out = out + groups * gate
        return out.permute(0, 2, 4, 3, 1).flatten(1, 2)

    def _unrolled(self, a: Tensor, query: Maps | None, key: Maps | None) -> Tensor:
        """The same, one head at a time, with every pair's H x H map spelled out.

        Compiled, this is one pass over a with nothing in between written to memory: on a CPU 4.6
        times as fast as the low-rank products at 6 heads. Uncompiled it would be slower.
        """

        def matrices(maps: Maps) -> Tensor:
            """(B, H, H, n)."""
            return _matrices(maps, 1).squeeze(2).permute(0, 2, 3, 1).to(a.dtype)

        fixed = torch.eye(self.heads, device=a.device, dtype=a.dtype) * float(self.skip)
        if self.matrix is not None:
            fixed = fixed + self.matrix.to(a.dtype)
        of_query = fixed.view(1, self.heads, self.heads, 1)
        if query is not None:
            of_query = of_query + matrices(query)
        of_key = None if key is None else matrices(key)
        heads = a.unbind(1)
        composed = []
        for g in range(self.heads):
            out = torch.zeros_like(heads[0])
            for h in range(self.heads):
                weight = of_query[:, g, h].unsqueeze(-1)
                if of_key is not None:
                    weight = weight + of_key[:, g, h].unsqueeze(-2)
                out = out + weight * heads[h]
            composed.append(out)
        return torch.stack(composed, 1)


class _GradientInOrder(torch.autograd.Function):
    """The identity, whose gradient is contiguous."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.contiguous()


class TokenMaps(nn.Module):
    """A token's maps: w = GELU(x W_1) W_2, its w1 normalised over heads; gate = tanh(x W_g)."""

    def __init__(self, part: spec.DynamicConfig, shape: Shape) -> None:
        super().__init__()
        if shape.heads % part.groups:
            raise ValueError(f"{part.groups} groups do not divide {shape.heads} heads")
        self.part = part
        self.size = shape.heads // part.groups
        self.hidden = 2 * part.rank * self.size
        if part.projection:
            inner = part.groups * self.hidden
            self.into = nn.Linear(shape.dim, inner, bias=False, **shape.factory)
            self.out = nn.Parameter(
                torch.empty(part.groups, self.hidden, self.hidden, **shape.factory)
            )
        if part.gate:
            self.gate = nn.Linear(shape.dim, shape.heads, bias=False, **shape.factory)
        self.dim = shape.dim
        self.heads = shape.heads
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """The published initialisations (docs/setups.md): the maps start near nothing."""
        if self.part.projection:
            nn.init.normal_(self.into.weight, std=math.sqrt(2 / (self.dim + self.hidden)))
            rank, size = self.part.rank, self.size
            nn.init.normal_(self.out, std=0.02 / (math.sqrt(2 * size * rank) * (size + rank)))
        if self.part.gate:
            scale = 0.05 if self.part.gate_init == "pytorch" else 0.005
            nn.init.normal_(self.gate.weight, std=scale * math.sqrt(2 / (self.dim + self.heads)))

    def forward(self, x: Tensor) -> Maps:
        down = up = gate = None
        if self.part.projection:
            approximate = "tanh" if self.part.gelu == "tanh" else "none"
            hidden = F.gelu(self.into(x), approximate=approximate)
            hidden = hidden.unflatten(-1, (self.part.groups, self.hidden))
            weights = torch.einsum("bngi,gio->bngo", hidden, self.out)
            weights = weights.unflatten(-1, (2 * self.part.rank, self.size))
            down, up = weights.chunk(2, dim=-2)
            down = F.rms_norm(down, (self.size,), eps=EPS)
        if self.part.gate:
            gate = torch.tanh(self.gate(x))
        return Maps(down, up, gate)


def _matrices(maps: Maps, groups: int) -> Tensor:
    """w2 w1^T + diag(gate) of every token and group, (B, n, G, h, h)."""
    found = []
    if maps.down is not None and maps.up is not None:
        found.append(torch.einsum("bnkrg,bnkrh->bnkgh", maps.up, maps.down))
    if maps.gate is not None:
        found.append(torch.diag_embed(maps.gate.unflatten(-1, (groups, -1))))
    return functools.reduce(torch.add, found)


def all_maps(composers: nn.ModuleDict, x: Tensor) -> dict[str, dict[str, Maps]]:
    """Every composer's maps of all tokens of x, by place and side."""
    found = {}
    for place, composer in composers.items():
        assert isinstance(composer, Composer)
        found[place] = composer.maps(x)
    return found


def make_composers(part: Any, shape: Shape) -> nn.ModuleDict:
    """The composers that `part` asks for, by place: "pre", "post", both or none."""
    if isinstance(part, spec.NoComposeConfig):
        return nn.ModuleDict()
    return nn.ModuleDict({place: Composer(part, shape) for place in part.place.split("+")})
