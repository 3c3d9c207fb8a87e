"""Plug-in for the network of Zoology: a GPT whose blocks add their normalised stream to itself.

The experiment `zoology.yaml` has this model, and its studies name this file under `parts`.

Source: zoology/model.py of github.com/HazyResearch/zoology at 4261f62. Its figure 2 has
`torch.nn.Identity` for the FFN, which keeps the norm before the FFN and the skip connection.

Shapes: B batch, n tokens, d width.
"""

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from pydantic import Field
from torch import Tensor, nn

from lit_attn.attention.cache import Cache
from lit_attn.models.language import GPT, GPTConfig
from lit_attn.models.layers import norm
from lit_attn.models.trunk import Trunk
from lit_attn.schema.base import Share


class ZoologyTrunk(Trunk):
    """Trunk in which y + norm(y) follows each block's output y, with dropout of the embedding."""

    def __init__(self, model: "ZoologyConfig", *sizes: Any, **named_sizes: Any) -> None:
        super().__init__(model, *sizes, **named_sizes)
        device = self.tokens.weight.device
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
