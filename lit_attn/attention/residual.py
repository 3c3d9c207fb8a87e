"""Fast forms of the residual parts: an epilogue on what scaled-dot-product attention returns.

Shapes: B batch, n tokens, H heads, D head width, d = H D.
    heads, values: (B, n, H, D), H_m and v_m of every head;  output: (B, n, d)
`project` is W, the layer's output projection (d -> d).
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lit_attn.attention import spec

# Smallest <V, V> that divides. Below it alpha goes to zero with V, so a zero value vector projects
# to zero instead of NaN. Part of the definition: the reference uses the same floor.
FLOOR = 1e-12


def identity(x: Tensor) -> Tensor:
    """x: a function with a name, so that a layer that uses it can be pickled."""
    return x


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "identity": identity,
    "gelu": F.gelu,
    "silu": F.silu,
    "relu": F.relu,
    "tanh": torch.tanh,
}


def projected(heads: Tensor, values: Tensor, scope: str) -> Tensor:
    """alpha V (scope global) or beta_m v_m (scope head); (B, n, H, D) each (BeliefFormer 10, 13).

    The dot products are taken in float32 (in float64 where the input is): in half precision <V, V>
    overflows from values of about 16 at d = 256.
    """
    axes = (-2, -1) if scope == "global" else (-1,)
    wide = torch.promote_types(heads.dtype, torch.float32)
    mh, v = heads.to(wide), values.to(wide)
    alpha = (mh * v).sum(axes, keepdim=True) / v.square().sum(axes, keepdim=True).clamp_min(FLOOR)
    return (alpha * v).to(heads.dtype)


class Epilogue(nn.Module):
    """Base of the residual parts: `forward(heads, values, project)` -> (B, n, d).

    Most have no parameters of their own; what they have (W^l, W_p) is shaped like `project`.
    """

    def __init__(self, part: Any, project: nn.Linear) -> None:
        super().__init__()
        self.part = part


class Full(Epilogue):
    """MH W."""

    def forward(self, heads: Tensor, values: Tensor, project: nn.Linear) -> Tensor:
        return project(heads.flatten(-2))


class Perpendicular(Epilogue):
    """(MH - alpha V) W, and with scope both + (H_m - beta_m v_m) W^l."""

    def __init__(self, part: spec.PerpendicularConfig, project: nn.Linear) -> None:
        super().__init__(part, project)
        self.local = like(project, part.bias) if part.scope == "both" else None

    def forward(self, heads: Tensor, values: Tensor, project: nn.Linear) -> Tensor:
        scope = "head" if self.part.scope == "head" else "global"
        out = project((heads - projected(heads, values, scope)).flatten(-2))
        if self.local is not None:
            out = out + self.local((heads - projected(heads, values, "head")).flatten(-2))
        return out


class Projected(Epilogue):
    """alpha V W."""

    def forward(self, heads: Tensor, values: Tensor, project: nn.Linear) -> Tensor:
        return project(projected(heads, values, self.part.scope).flatten(-2))


class Value(Epilogue):
    """V W: nothing of what was attended to."""

    def forward(self, heads: Tensor, values: Tensor, project: nn.Linear) -> Tensor:
        return project(values.flatten(-2))


class Discrepancy(Epilogue):
    """(gamma V - MH) W."""

    def forward(self, heads: Tensor, values: Tensor, project: nn.Linear) -> Tensor:
        return project((self.part.gamma * values - heads).flatten(-2))


class Split(Epilogue):
    """(MH - alpha V) W + phi(alpha V) W_p."""

    def __init__(self, part: spec.SplitConfig, project: nn.Linear) -> None:
        super().__init__(part, project)
        self.activation = ACTIVATIONS[part.activation]
        self.projected = like(project, part.bias)

    def forward(self, heads: Tensor, values: Tensor, project: nn.Linear) -> Tensor:
        if torch.compiler.is_compiling():
            # What follows from heads and values in one pass is not kept beside them.
            across, along = checkpoint(self.parts, heads, values, use_reentrant=False)
        else:
            across, along = self.parts(heads, values)
        return project(across) + self.projected(along)

    def parts(self, heads: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """MH - alpha V and phi(alpha V), each (B, n, d)."""
        along = projected(heads, values, self.part.scope)
        return (heads - along).flatten(-2), self.activation(along.flatten(-2))


def like(project: nn.Linear, bias: bool) -> nn.Linear:
    """A second output projection of W's shape; with `bias` it has one where W does."""
    return nn.Linear(
        project.in_features,
        project.out_features,
        bias=bias and project.bias is not None,
        device=project.weight.device,
        dtype=project.weight.dtype,
    )


RESIDUALS: dict[type[spec.Residual], type[Epilogue]] = {
    spec.FullConfig: Full,
    spec.PerpendicularConfig: Perpendicular,
    spec.ProjectedConfig: Projected,
    spec.ValueConfig: Value,
    spec.DiscrepancyConfig: Discrepancy,
    spec.SplitConfig: Split,
}
