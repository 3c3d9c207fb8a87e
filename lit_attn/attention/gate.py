"""Factors of the signal that enters the output projection.

Gated attention: Qiu et al. 2025, https://arxiv.org/abs/2505.06708, section 2.2.

Shapes: B batch, n tokens, d width, H heads, D head width.
"""

from collections.abc import Callable
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field, PositiveFloat, PositiveInt
from torch import Tensor, nn

from lit_attn.attention.parts import LayerShape, Part
from lit_attn.attention.precision import wide
from lit_attn.schema.base import Kind

Projection = Callable[[Tensor], Tensor]


class GateConfig(Part, Kind):
    """Family of the factors of the signal that enters the output projection W.

    Further projections of a residual part (W^l, W_p) have no gate. `build` returns a
    lit_attn.attention.gate.Gate. The inputs of `reference` are x (B, n, d) and the signal
    (B, n, H D); it returns the signal with its gates.
    """


class Gate(nn.Module):
    """Base of the gates.

    `forward(x, project)` returns a function that projects a signal (B, n, H D) of the tokens
    x (B, n, d) after its gates.
    """

    def __init__(self, part: Any, shape: LayerShape) -> None:
        super().__init__()
        self.part = part


class NoGateConfig(GateConfig, kind="none"):
    """No gate."""

    def build(self, shape: LayerShape) -> Any:
        return NoGate(self, shape)

    def reference(self, module: Any, x: Tensor, signal: Tensor) -> Tensor:
        return signal


class NoGate(Gate):
    """No gate: the projection itself."""

    def forward(self, x: Tensor, project: Projection) -> Projection:
        return project


class SigmoidGateConfig(GateConfig):
    """sigmoid(x W_g + b) from the layer's input (gated attention).

    Qiu et al. 2025, "Gated Attention for Large Language Models", https://arxiv.org/abs/2505.06708,
    section 2.2, position G1.
    """

    factor: PositiveFloat = Field(1.0, description="factor of the sigmoid; with 2, 0 opens to 1")
    columns: PositiveInt | None = Field(
        None, description="number of the first columns of x that the gate reads; null: all"
    )
    bias: float | None = Field(None, description="initial bias b; null: no bias")
    init: Literal["normal", "zeros"] = Field(
        "normal", description="initial W_g: normal with deviation 0.02, or zeros"
    )
    gates_of_head: ClassVar[Literal["D", "1"]]

    def build(self, shape: LayerShape) -> Any:
        return SigmoidGate(self, shape)

    def reference(self, module: Any, x: Tensor, signal: Tensor) -> Tensor:
        """Qiu et al. 2025, section 2.2: signal * sigmoid(x W_g + b)."""
        read = x if module.part.columns is None else x[..., : module.part.columns]
        gates = module.part.factor / (1 + torch.exp(-module.linear(read)))
        parts = signal.unflatten(-1, (gates.shape[-1], -1))
        return (parts * gates.unsqueeze(-1)).flatten(-2)


class ElementGateConfig(SigmoidGateConfig, kind="element"):
    """One gate for each element of each head, as in Qwen3-Next."""

    gates_of_head = "D"


class HeadGateConfig(SigmoidGateConfig, kind="head"):
    """One gate for each head."""

    gates_of_head = "1"


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
