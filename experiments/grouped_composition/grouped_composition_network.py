"""Network of the plug-in grouped_composition.py: one composition for each group of heads."""

from typing import Any

import torch
from torch import Tensor, nn

from lit_attn.attention.compose import Composer, HeadMaps, Maps
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
