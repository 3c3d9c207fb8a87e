"""Factors of the signal that enters the output projection.

Gated attention: Qiu et al. 2025, https://arxiv.org/abs/2505.06708, section 2.2.

Shapes: B batch, n tokens, d width, H heads, D head width.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from lit_attn.attention.parts import LayerShape
from lit_attn.attention.precision import wide

Projection = Callable[[Tensor], Tensor]


class Gate(nn.Module):
    """Base of the gates.

    `forward(x, project)` returns a function that projects a signal (B, n, H D) of the tokens
    x (B, n, d) after its gates.
    """

    def __init__(self, part: Any, shape: LayerShape) -> None:
        super().__init__()
        self.part = part


class NoGate(Gate):
    """No gate: the projection itself."""

    def forward(self, x: Tensor, project: Projection) -> Projection:
        return project


class SigmoidGate(Gate):
    """factor sigmoid(x W_g + b), for each element or for each head."""

    def __init__(self, part: Any, shape: LayerShape) -> None:
        super().__init__(part, shape)
        if part.columns is not None and part.columns > shape.dim:
            raise ValueError(
                f"gate: columns: {part.columns} exceeds the width of the layer, {shape.dim}"
            )
        self.repeats = 1 if part.gates_of_head == "D" else shape.head_dim
        gates = shape.heads * shape.head_dim // self.repeats
        has_bias = part.bias is not None
        self.linear = nn.Linear(part.columns or shape.dim, gates, bias=has_bias, **shape.options)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        if self.part.init == "zeros":
            nn.init.zeros_(self.linear.weight)
        else:
            nn.init.normal_(self.linear.weight, std=0.02)
        if self.part.bias is not None:
            nn.init.constant_(self.linear.bias, self.part.bias)

    def forward(self, x: Tensor, project: Projection) -> Projection:
        logits = self.linear(x[..., : self.part.columns])
        gates = self.part.factor * torch.sigmoid(wide(logits))
        gates = gates.repeat_interleave(self.repeats, dim=-1)

        def project_gated(signal: Tensor) -> Tensor:
            return project(signal * gates.to(signal.dtype))

        return project_gated
