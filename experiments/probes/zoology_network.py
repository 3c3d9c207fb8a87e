"""Plug-in for the network of Zoology: a GPT whose blocks add their normalised stream to itself.

The experiment `zoology.yaml` has this model, and its studies name this file under `parts`.

Source: zoology/model.py of github.com/HazyResearch/zoology at 4261f62. Its figure 2 has
`torch.nn.Identity` for the FFN, which keeps the norm before the FFN and the skip connection.

Shapes: B batch, n tokens, d width.
"""

from collections.abc import Callable, Sequence
from typing import ClassVar

from pydantic import Field
from torch import Tensor, nn

from lit_attn.attention.cache import Cache
from lit_attn.models.language import GPT, GPTConfig
from lit_attn.models.layers import Device, norm
from lit_attn.models.trunk import Trunk
from lit_attn.schema.base import Share, consistency_check


class ZoologyTrunk(Trunk):
    """Trunk in which y + norm(y) follows each block's output y, with dropout of the embedding."""

    def __init__(
        self,
        model: "ZoologyConfig",
        vocabulary: int,
        context: int,
        is_causal: bool,
        device: Device = None,
    ) -> None:
        super().__init__(model, vocabulary, context, is_causal, device)
        added = [norm(model.norm, model.dim, model.norm_eps, device) for _ in self.blocks]
        self.added_norms = nn.ModuleList(added)
        self.embedding_dropout = nn.Dropout(model.embedding_dropout)

    def embed(self, tokens: Tensor, positions: Tensor, caches: Sequence[Cache] = ()) -> Tensor:
        return self.embedding_dropout(super().embed(tokens, positions, caches))

    def pass_blocks(self, x: Tensor, call_block: Callable[[int, Tensor], Tensor]) -> Tensor:
        for number, added_norm in enumerate(self.added_norms):
            x = call_block(number, x)
            x = x + added_norm(x)
        return x


class ZoologyGPT(GPT):
    """GPT with a `ZoologyTrunk`."""

    trunk_class: ClassVar[type[Trunk]] = ZoologyTrunk


class ZoologyConfig(GPTConfig, kind="zoology"):
    """Causal language model with Zoology's residual stream."""

    runs_foreign_code = False  # Tests try it out, so a dry run need not.
    builder = (ZoologyGPT, "vocabulary", "context")
    embedding_dropout: Share = Field(0.0, description="dropout rate of the embedding alone")

    @consistency_check
    def _blocks_are_zoologys(self) -> None:
        """Refuse blocks to which y + norm(y) would add another sum than that of the source."""
        if self.ffn is not None:
            raise ValueError("ffn: Zoology's network has none; write null")
        if self.norm_order != "pre":
            raise ValueError(f"norm_order: Zoology's blocks are not '{self.norm_order}'; write pre")
