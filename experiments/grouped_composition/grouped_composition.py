"""Plug-in with dynamic composition inside groups of heads: DCMHA, section 3.2 (arXiv:2405.08553).

    parts: [experiments/grouped_composition/grouped_composition.py]
    cells: {grouped: {attention: {preset: standard, compose: {kind: grouped, groups: 4, rank: 1}}}}

The heads of a layer form `groups` groups of neighbours, and each group composes its own heads with
weights of its own. In tensor-parallel training the heads of one group are on one device, so the
composition needs no communication. The paper prints no numbers for it: "little difference" in
performance and speed, with 32 heads in 4 groups and a rank of 1 for each group.
"""

from typing import Any

from pydantic import Field

from lit_attn.attention.parts import LayerShape, QueryKeyComposeConfig


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
        # PyTorch is imported when a layer is built, and not by a dry run.
        from grouped_composition_network import Grouped

        return Grouped(self, shape)

    def reference(self, module: Any, x: Any, a: Any, *memory: Any) -> Any:
        import torch

        formula = super().reference
        parts = zip(module.parts, a.chunk(self.groups, 1), strict=True)
        return torch.cat([formula(part, x, heads, *memory) for part, heads in parts], 1)
