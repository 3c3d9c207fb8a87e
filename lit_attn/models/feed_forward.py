"""Feed-forward networks of the blocks of transformers over tokens.

So et al. 2021, "Primer", https://arxiv.org/abs/2109.08668 (ReLU squared); Shazeer 2020, "GLU
Variants Improve Transformer", https://arxiv.org/abs/2002.05202 (the gated ones).
"""

from collections.abc import Callable
from functools import partial

from torch import Tensor, nn

from lit_attn.models.base import FFN
from lit_attn.models.layers import Device


class SquaredReLU(nn.Module):
    """max(0, x)^2."""

    def forward(self, x: Tensor) -> Tensor:
        return x.relu().square()


ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "gelu": nn.GELU,
    "gelu-tanh": partial(nn.GELU, approximate="tanh"),
    "relu": nn.ReLU,
    "relu2": SquaredReLU,
    "silu": nn.SiLU,
}
"""Functions f of down(f(up(x)))."""

GATES: dict[str, Callable[[], nn.Module]] = {
    "swiglu": nn.SiLU,
    "geglu": nn.GELU,
    "reglu": nn.ReLU,
}
"""Functions f of down(f(gate(x)) * up(x))."""


class FeedForward(nn.Module):
    """down(f(up(x))), or down(f(gate(x)) * up(x)) for an activation of GATES.

    Shapes: (B, n, d) -> (B, n, d). `inner_dropout` follows the activation, `dropout` the last
    Linear.
    """

    def __init__(
        self,
        dim: int,
        ffn: FFN,
        *,
        has_bias: bool,
        dropout: float = 0.0,
        inner_dropout: float = 0.0,
        device: Device = None,
    ) -> None:
        super().__init__()
        self.gate: nn.Linear | None = None
        if ffn.activation in GATES:
            self.gate = nn.Linear(dim, ffn.width, bias=has_bias, device=device)
        self.up = nn.Linear(dim, ffn.width, bias=has_bias, device=device)
        self.activation = (ACTIVATIONS | GATES)[ffn.activation]()
        self.down = nn.Linear(ffn.width, dim, bias=has_bias, device=device)
        self.inner_dropout = nn.Dropout(inner_dropout)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        if self.gate is None:
            hidden = self.activation(self.up(x))
        else:
            hidden = self.activation(self.gate(x)) * self.up(x)
        return self.dropout(self.down(self.inner_dropout(hidden)))
