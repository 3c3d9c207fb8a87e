"""Network of attention layers in turn, for tests of channels between layers."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lit_attn.attention.layer import Attention
from lit_attn.attention.network import number_layers


class Chain(nn.Module):
    """Layers in turn, each added to its input."""

    def __init__(self, layers: Sequence[Attention]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.is_checkpointed = False
        number_layers(self)

    def forward(self, x: Tensor, **arguments: Any) -> Tensor:
        for layer in self.layers:
            if self.is_checkpointed:
                x = x + checkpoint(layer, x, use_reentrant=False)
            else:
                x = x + layer(x, **arguments)
        return x


def gradients(chain: Chain, x: Tensor) -> list[Tensor]:
    """Return the gradients of all parameters of `chain`."""
    return list(torch.autograd.grad(chain(x).square().sum(), list(chain.parameters())))
