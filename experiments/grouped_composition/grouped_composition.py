"""Plug-in with dynamic composition inside groups of heads: DCMHA, section 3.2 (arXiv:2405.08553).

    parts: [experiments/grouped_composition/grouped_composition.py]
    cells: {grouped: {attention: {preset: standard, compose: {kind: grouped, groups: 4, rank: 1}}}}

The heads of a layer form `groups` groups of neighbours, and each group composes its own heads with
weights of its own. In tensor-parallel training the heads of one group are on one device, so the
composition needs no communication. The paper prints no numbers for it: "little difference" in
performance and speed, with 32 heads in 4 groups and a rank of 1 for each group.
"""

from typing import Any

import torch
from pydantic import Field
from torch import Tensor, nn

from lit_attn.attention.compose import Composer, HeadMaps, Maps, QueryKeyComposeConfig
from lit_attn.attention.parts import LayerShape


class Grouped(Composer):
    """Composition of each group of heads; the maps of all groups stand side by side."""

    def __init__(self, part: Any, shape: LayerShape) -> None:
        super().__init__(part, shape)
        self.heads = shape.heads // part.groups
        group = shape._replace(heads=self.heads)
        self.parts = nn.ModuleList(HeadMaps(part, group) for _ in range(part.groups))

    def maps(self, x: Tensor) -> dict[str, Maps]:
        parts: list[Any] = list(self.parts)
        by_group: list[dict[str, Maps]] = [part.maps(x) for part in parts]
        joined = {}
        for side in by_group[0]:
            joined[side] = join([maps[side] for maps in by_group])
        return joined

    def forward(self, a: Tensor, query: Maps | None, key: Maps | None) -> Tensor:
        groups = a.chunk(len(self.parts), 1)
        composed = []
        for place, (part, heads) in enumerate(zip(self.parts, groups, strict=True)):
            composed.append(part(heads, self._select(query, place), self._select(key, place)))
        return torch.cat(composed, 1)

    def _select(self, maps: Maps | None, group: int) -> Maps | None:
        """Return the maps of one group; the heads are the last axis of every map."""
        if maps is None:
            return None
        start = group * self.heads
        heads = slice(start, start + self.heads)
        return Maps(*[None if m is None else m[..., heads] for m in maps])


def join(groups: list[Maps]) -> Maps:
    """Return the maps of all groups side by side along the heads."""
    joined = (
        None if parts[0] is None else torch.cat(parts, -1) for parts in zip(*groups, strict=True)
    )
    return Maps(*joined)


class GroupedConfig(QueryKeyComposeConfig, kind="grouped"):
    """Sum of the mixing weights of the query's and of the key's token, in each group of heads."""

    groups: int = Field(4, ge=1, description="groups of neighbouring heads")

    @property
    def sides(self) -> tuple[str, ...]:
        return ("query", "key")

    def check_heads(self, heads: int) -> None:
        if heads % self.groups:
            raise ValueError(f"groups: {self.groups} groups do not divide {heads} heads")

    def build(self, shape: LayerShape) -> Any:
        return Grouped(self, shape)

    def reference(self, module: Any, x: Any, a: Any, *memory: Any) -> Any:
        formula = super().reference
        parts = zip(module.parts, a.chunk(self.groups, 1), strict=True)
        return torch.cat([formula(part, x, heads, *memory) for part, heads in parts], 1)
