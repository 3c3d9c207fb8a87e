"""A composition and a normaliser of a user, written as docs/adding-a-part.md says."""

from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from lit_attn import ComposeConfig, Composer, LayerShape, Normaliser, NormaliserConfig


class Scale(NamedTuple):
    """Factor of every token, (B, n)."""

    factor: Tensor


class Neighbour(Composer):
    """a_h + factor(x_j) a_(h+1)."""

    def __init__(self, part: Any, shape: LayerShape) -> None:
        super().__init__(part, shape)
        self.factor = nn.Linear(shape.dim, 1)

    def maps(self, x: Tensor) -> dict[str, Any]:
        return {"key": Scale(torch.tanh(self.factor(x)).squeeze(-1))}

    def forward(self, a: Tensor, query: Any, key: Any) -> Tensor:
        return a + a.roll(-1, 1) * key.factor[:, None, None].to(a.dtype)


class NeighbourConfig(ComposeConfig, kind="neighbour"):
    """a_h + tanh(x_j w + b) a_(h+1)."""

    def build(self, shape: LayerShape) -> Neighbour:
        return Neighbour(self, shape)

    def reference(self, module: Any, x: Tensor, a: Tensor, memory: Tensor | None = None) -> Tensor:
        factor = torch.tanh(x @ module.factor.weight[0] + module.factor.bias).unsqueeze(1)
        heads = a.shape[1]
        mixed = [a[:, h] + factor * a[:, (h + 1) % heads] for h in range(heads)]
        return torch.stack(mixed, 1)


class OffByOne(Normaliser):
    """exp(s_ij) / (1 + sum_j exp(s_ij)), computed without overflow."""

    def forward(self, logits: Tensor, visible: Tensor | None) -> Tensor:
        top = logits.amax(-1, keepdim=True).clamp_min(0).detach()
        e = (logits - top).exp()
        return e / ((-top).exp() + e.sum(-1, keepdim=True))


class OffByOneConfig(NormaliserConfig, kind="off-by-one"):
    """a_ij = exp(s_ij) / (1 + sum_j exp(s_ij))."""

    ignores_row_terms: ClassVar[bool] = False

    def build(self, shape: LayerShape) -> OffByOne:
        return OffByOne(self, shape)

    def reference(self, module: Any, logits: Tensor, visible: Tensor | None) -> Tensor:
        e = logits.exp()
        return e / (1 + e.sum(-1, keepdim=True))
