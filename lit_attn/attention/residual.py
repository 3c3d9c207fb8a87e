"""Residual parts: what passes the output projection and is added to the residual stream.

- Belief-Attention: "BeliefFormer: Belief Attention in Transformer" (2025),
  https://openreview.net/forum?id=Ard2QzPAUK.
- Belief2-Attention: "Improved Belief-Attention in Vision Tasks" (2026),
  https://arxiv.org/abs/2606.00077.
- XSA: "Exclusive self attention" (Zhai 2026), https://arxiv.org/abs/2603.09078.
- AttentionX: "AttentionX: Exploiting Consensus Discrepancy In Attention from A Distributed
  Optimization Perspective" (2024), https://arxiv.org/abs/2409.04275.

Shapes: B batch, n tokens, d width, H heads, D head width.
    x: (B, n, d), the layer's input; heads, values: (B, n, H, D), H_m and v_m of every head
    `project` is W, the layer's output projection (H D -> d); every part returns (B, n, d).
"""

import math
from collections.abc import Callable
from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lit_attn.attention.parts import LayerChoices, LayerShape, Part
from lit_attn.attention.precision import wide
from lit_attn.attention.projections import add_outputs
from lit_attn.schema.base import Kind, consistency_check

# Lower bound of <V, V> as a divisor: a zero value vector projects to zero instead of NaN. It
# belongs to the definition; the reference uses the same bound.
FLOOR = 1e-12


def unchanged(x: Tensor) -> Tensor:
    return x


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "identity": unchanged,
    "gelu": F.gelu,
    "silu": F.silu,
    "relu": F.relu,
    "tanh": torch.tanh,
}
"""Functions phi of the projected part by name, of which a learned phi is a weighted sum."""


def projected(heads: Tensor, values: Tensor, scope: str) -> Tensor:
    """Return alpha V (scope global) or beta_m v_m (scope head), (B, n, H, D) (BeliefFormer 10, 13).

    The dot products are computed in float32 or wider: in half precision <V, V> overflows from
    values of about 16 at d = 256.
    """
    axes = (-2, -1) if scope == "global" else (-1,)
    mh = wide(heads)
    v = wide(values)
    products = (mh * v).sum(axes, keepdim=True)
    squares = v.square().sum(axes, keepdim=True).clamp_min(FLOOR)
    alpha = products / squares
    return (alpha * v).to(heads.dtype)


class ResidualConfig(Part, Kind):
    """Family of the signals that pass the output projection W and are added to the residual stream.

    alpha_i = <MH_i, V_i> / <V_i, V_i> over all heads (scope global), or beta_m,i, the same ratio
    within each head (scope head).

    `build` returns a lit_attn.attention.residual.Residual. The inputs of `reference` are x
    (B, n, d), the heads' sums and values, (B, H, n, D) each, and W; it returns (B, n, d).
    """

    needs_self = "uses the value of the query's own token"


class Residual(nn.Module):
    """Base of the residual parts: `forward(x, heads, values, project)` returns the layer's output.

    Further projections (W^l, W_p, W_p^l) have the sizes of W.
    """

    uses_heads = True
    """False if the output does not depend on `heads`: on which tokens attend to which."""

    def __init__(self, part: Any, shape: LayerShape) -> None:
        super().__init__()
        self.part = part

    def initial_state(self, projection: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the parameters that start as functions of W's state; none by default."""
        return {}


class FullConfig(ResidualConfig, kind="full"):
    """MH W: the standard layer."""

    needs_self = ""

    def build(self, shape: LayerShape) -> Any:
        return Full(self, shape)

    def reference(self, module: Any, x: Tensor, h: Tensor, v: Tensor, project: nn.Linear) -> Tensor:
        """BeliefFormer (8)."""
        return project(join_heads(h))


class Full(Residual):
    """MH W."""

    def forward(self, x: Tensor, heads: Tensor, values: Tensor, project: nn.Linear) -> Tensor:
        return project(heads.flatten(-2))


class PerpendicularConfig(ResidualConfig, kind="perpendicular"):
    """(MH - alpha V) W; scope both adds (H_m - beta_m v_m) W^l (BeliefFormer eq. 10, 13-15)."""

    scope: Literal["global", "head", "both"] = Field(
        "global",
        description="projection over all heads (global), in each head (head), or both added (both)",
    )
    bias: bool = Field(True, description="give W^l the bias that W has, for `scope: both`")
    strength: Literal["fixed", "tanh"] = Field(
        "fixed",
        description="factor of the removed part; tanh: tanh(a_m), learned by each head from 0, for "
        "`scope: head`",
    )

    @consistency_check
    def _has_strength_in_heads(self) -> None:
        if self.strength == "tanh" and self.scope != "head":
            raise ValueError("strength: `tanh` is learned by each head; set `scope: head`")

    def build(self, shape: LayerShape) -> Any:
        return Perpendicular(self, shape)

    def reference(self, module: Any, x: Tensor, h: Tensor, v: Tensor, project: nn.Linear) -> Tensor:
        """Return the perpendicular part (BeliefFormer eq. 12), or both scopes (eq. 15)."""
        along = along_values(h, v, "head")
        if module.part.strength == "tanh":
            strengths = torch.tanh(module.strength).repeat_interleave(h.shape[-1])
            return project(join_heads(h) - strengths * along)
        across = join_heads(h) - along
        if module.part.scope == "head":
            return project(across)
        out = project(join_heads(h) - along_values(h, v, "global"))
        return out + module.local(across) if module.part.scope == "both" else out


class Perpendicular(Residual):
    """(MH - alpha V) W, and with scope both + (H_m - beta_m v_m) W^l.

    With a learned strength in each head: (H_m - tanh(a_m) beta_m v_m) W. a_m starts at 0, where
    the layer is the standard one (modded-nanogpt, pull request 264, gated XSA).
    """

    def __init__(self, part: PerpendicularConfig, shape: LayerShape) -> None:
        super().__init__(part, shape)
        self.local = another_projection(shape, part.bias) if part.scope == "both" else None
        self.strength = None
        if part.strength == "tanh":
            self.strength = nn.Parameter(torch.zeros(shape.heads, **shape.options))

    def reset_parameters(self) -> None:
        """Set the learned strengths to 0."""
        if self.strength is not None:
            nn.init.zeros_(self.strength)

    def forward(self, x: Tensor, heads: Tensor, values: Tensor, project: nn.Linear) -> Tensor:
        scope = "head" if self.part.scope == "head" else "global"
        along = projected(heads, values, scope)
        if self.strength is not None:
            strength = torch.tanh(wide(self.strength)).unsqueeze(-1)
            along = (strength * along).to(along.dtype)
        across = heads - along
        if self.local is None:
            return project(across.flatten(-2))
        across_in_heads = heads - projected(heads, values, "head")
        return add_outputs([project, self.local], [across.flatten(-2), across_in_heads.flatten(-2)])


class ProjectedConfig(ResidualConfig, kind="projected"):
    """alpha V W; scope both adds (beta_m v_m) W^l (Belief2 Fig. 3, section 2.2).

    The paper speaks of local and global components and prints no equation of their sum. Scope both
    is the sum that Belief-Attention has of the perpendicular components (Belief2 eq. 7).
    """

    scope: Literal["global", "head", "both"] = Field(
        "global",
        description="projection over all heads (global), in each head (head), or both added (both)",
    )
    bias: bool = Field(True, description="give W^l the bias that W has, for `scope: both`")

    def build(self, shape: LayerShape) -> Any:
        return Projected(self, shape)

    def reference(self, module: Any, x: Tensor, h: Tensor, v: Tensor, project: nn.Linear) -> Tensor:
        """Belief2, Fig. 3; both scopes are added as the perpendicular ones are in eq. 7."""
        if module.part.scope == "both":
            return project(along_values(h, v, "global")) + module.local(along_values(h, v, "head"))
        return project(along_values(h, v, module.part.scope))


class Projected(Residual):
    """alpha V W, and with scope both + (beta_m v_m) W^l."""

    def __init__(self, part: ProjectedConfig, shape: LayerShape) -> None:
        super().__init__(part, shape)
        self.local = another_projection(shape, part.bias) if part.scope == "both" else None

    def forward(self, x: Tensor, heads: Tensor, values: Tensor, project: nn.Linear) -> Tensor:
        scope = "head" if self.part.scope == "head" else "global"
        along = projected(heads, values, scope)
        if self.local is None:
            return project(along.flatten(-2))
        along_in_heads = projected(heads, values, "head")
        return add_outputs([project, self.local], [along.flatten(-2), along_in_heads.flatten(-2)])


class ValueConfig(ResidualConfig, kind="value"):
    """V W: attention without attending (Belief2 Fig. 3).

    The output does not depend on the attention weights, so choices of them are refused.
    """

    def check(self, layer: LayerChoices) -> None:
        reason = "has no effect, because `residual: value` does not use the attention weights"
        if layer.similarity.kind != "dot":
            raise ValueError(f"similarity: '{layer.similarity.kind}' {reason}; remove it")
        if layer.zz:
            raise ValueError(f"zz: {reason}; set `zz: without`")
        if layer.compose.places():
            raise ValueError(f"compose: {reason}; set `compose: none`")
        if layer.normaliser.kind != "softmax":
            raise ValueError(f"normaliser: '{layer.normaliser.kind}' {reason}; remove it")
        for family in ("scale", "bias", "filter", "pair"):
            part = layer.parts[family]
            if part.kind != "none":
                raise ValueError(f"{family}: '{part.kind}' {reason}; remove it")
        if layer.window:
            raise ValueError(f"window: {reason}; remove it")

    def build(self, shape: LayerShape) -> Any:
        return Value(self, shape)

    def reference(self, module: Any, x: Tensor, h: Tensor, v: Tensor, project: nn.Linear) -> Tensor:
        """Belief2, Fig. 3."""
        return project(join_heads(v))


class Value(Residual):
    """V W: the token's own values, without attention."""

    uses_heads = False

    def forward(self, x: Tensor, heads: Tensor, values: Tensor, project: nn.Linear) -> Tensor:
        return project(values.flatten(-2))


class DiscrepancyConfig(ResidualConfig, kind="discrepancy"):
    """(gamma V - MH) W (AttentionX eq. 9)."""

    gamma: float = Field(
        1.0, gt=0, le=1, description="factor of V; 1 for the paper's ViT, 0.5 for its GPT-2"
    )
    gamma_scope: Literal["fixed", "layer", "head"] = Field(
        "fixed",
        description="fixed: gamma is a constant, as in the paper; layer, head: each layer or each "
        "head learns its gamma, which starts at `gamma` and can leave (0, 1]",
    )

    def build(self, shape: LayerShape) -> Any:
        return Discrepancy(self, shape)

    def reference(self, module: Any, x: Tensor, h: Tensor, v: Tensor, project: nn.Linear) -> Tensor:
        """AttentionX (9), (10); a learned gamma is a parameter of the layer or of each head."""
        gamma = module.part.gamma
        if module.part.gamma_scope == "layer":
            gamma = module.gamma
        elif module.part.gamma_scope == "head":
            gamma = module.gamma.repeat_interleave(v.shape[-1])
        return project(gamma * join_heads(v) - join_heads(h))


class Discrepancy(Residual):
    """(gamma V - MH) W, with a constant gamma, or one that each layer or each head learns."""

    def __init__(self, part: DiscrepancyConfig, shape: LayerShape) -> None:
        super().__init__(part, shape)
        self.gamma = None
        if part.gamma_scope != "fixed":
            count = shape.heads if part.gamma_scope == "head" else 1
            self.gamma = nn.Parameter(torch.empty(count, **shape.options))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the learned gammas to their start."""
        if self.gamma is not None:
            nn.init.constant_(self.gamma, self.part.gamma)

    def forward(self, x: Tensor, heads: Tensor, values: Tensor, project: nn.Linear) -> Tensor:
        if self.gamma is None:
            return project((self.part.gamma * values - heads).flatten(-2))
        gamma = wide(self.gamma).unsqueeze(-1)
        difference = gamma * values - heads
        return project(difference.to(heads.dtype).flatten(-2))


class SplitConfig(ResidualConfig, kind="split"):
    """(MH - alpha V) W + phi(alpha V) W_p (Belief2 eq. 14-15).

    Scope both adds the same sum of the components in each head, (H_m - beta_m v_m) W^l and
    phi(beta_m v_m) W_p^l: Belief-Attention with both scopes (Belief2 eq. 7), whose projected
    components are kept too.
    """

    scope: Literal["global", "head", "both"] = Field(
        "global",
        description="projection over all heads (global), in each head (head), or both added (both)",
    )
    activation: Literal["identity", "gelu", "silu", "relu", "tanh"] = Field(
        "gelu", description="phi, applied to the projected part"
    )
    phi_scope: Literal["fixed", "layer", "head"] = Field(
        "fixed",
        description="fixed: phi is `activation`; layer, head: each layer or each head learns phi "
        "(Belief2, Remark 2) as a weighted sum of the five activations (Manessi and Rozza 2018, "
        "https://arxiv.org/abs/1801.09403), which starts as `activation`",
    )
    init: Literal["fresh", "copy"] = Field(
        "fresh",
        description="initial W_p; fresh: as any Linear; copy: equal to W, with W^l and W_p^l of "
        "`scope: both` at 0, so that a pretrained layer computes the same with "
        "`activation: identity` (Proposition 1)",
    )
    bias: bool = Field(True, description="give W_p, W^l and W_p^l the bias that W has")

    def exempt_parameters(self) -> tuple[str, ...]:
        return () if self.phi_scope == "fixed" else ("phi",)

    def stacked_vectors(self) -> tuple[str, ...]:
        return self.exempt_parameters()

    def build(self, shape: LayerShape) -> Any:
        return Split(self, shape)

    def reference(self, module: Any, x: Tensor, h: Tensor, v: Tensor, project: nn.Linear) -> Tensor:
        """Belief2 (14), (15); scope both adds the components of each head as in (7)."""
        scope = "head" if module.part.scope == "head" else "global"
        along = along_values(h, v, scope)
        width = h.shape[-1]
        out = project(join_heads(h) - along) + module.projected(apply_phi(module, along, width))
        if module.part.scope == "both":
            along = along_values(h, v, "head")
            out = (
                out
                + module.local(join_heads(h) - along)
                + module.local_projected(apply_phi(module, along, width))
            )
        return out


class Split(Residual):
    """(MH - alpha V) W + phi(alpha V) W_p, and with scope both the same sum in each head.

    The sum in each head is (H_m - beta_m v_m) W^l + phi(beta_m v_m) W_p^l.
    """

    def __init__(self, part: SplitConfig, shape: LayerShape) -> None:
        super().__init__(part, shape)
        self.phi = None
        if part.phi_scope != "fixed":
            groups = shape.heads if part.phi_scope == "head" else 1
            self.phi = nn.Parameter(torch.empty(groups, len(ACTIVATIONS), **shape.options))
        self.reset_parameters()
        self.projected = another_projection(shape, part.bias)
        self.local = None
        self.local_projected = None
        if part.scope == "both":
            self.local = another_projection(shape, part.bias)
            self.local_projected = another_projection(shape, part.bias)

    def reset_parameters(self) -> None:
        """Let a learned phi start as `activation`: a comparison starts from equal outputs."""
        if self.phi is not None:
            start = list(ACTIVATIONS).index(self.part.activation)
            with torch.no_grad():
                self.phi.zero_()
                self.phi[:, start] = 1

    def activation(self, along: Tensor) -> Tensor:
        """Return phi of the projected part (B, n, H, D)."""
        if self.phi is None:
            return ACTIVATIONS[self.part.activation](along)
        weights = wide(self.phi)
        terms = []
        for number, function in enumerate(ACTIVATIONS.values()):
            # (H, 1), or (1, 1) if the heads share phi
            weight = weights[:, number, None]
            terms.append(weight * function(along))
        return torch.stack(terms).sum(0).to(along.dtype)

    def forward(self, x: Tensor, heads: Tensor, values: Tensor, project: nn.Linear) -> Tensor:
        if torch.compiler.is_compiling():
            # All parts are computed from heads and values in one pass, so only these are kept.
            parts = checkpoint(self.parts, heads, values, use_reentrant=False)
        else:
            parts = self.parts(heads, values)
        projections = [project, self.projected]
        if self.local is not None and self.local_projected is not None:
            projections += [self.local, self.local_projected]
        return add_outputs(projections, parts)

    def initial_state(self, projection: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return a copy of W for W_p if `init: copy` (Proposition 1), and zeros for W^l and W_p^l.

        All biases start at zero, because the output already contains the bias of W: a copy would
        add it twice, and change the outputs at step 0.
        """
        if self.part.init != "copy":
            return {}
        state = {"projected.weight": projection["weight"]}
        if self.phi is not None:
            state["phi"] = self.phi.detach()
        if self.projected.bias is not None:
            state["projected.bias"] = torch.zeros_like(projection["bias"])
        if self.part.scope == "both":
            for name in ("local", "local_projected"):
                state[f"{name}.weight"] = torch.zeros_like(projection["weight"])
                if self.projected.bias is not None:
                    state[f"{name}.bias"] = torch.zeros_like(projection["bias"])
        return state

    def parts(self, heads: Tensor, values: Tensor) -> tuple[Tensor, ...]:
        """Return MH - alpha V and phi(alpha V), (B, n, H D), and with scope both those of heads."""
        scopes = ["global", "head"] if self.part.scope == "both" else [self.part.scope]
        parts = []
        for scope in scopes:
            along = projected(heads, values, scope)
            across = heads - along
            parts.append(across.flatten(-2))
            parts.append(self.activation(along).flatten(-2))
        return tuple(parts)


def another_projection(shape: LayerShape, bias: bool) -> nn.Linear:
    """Return a second output projection of W's sizes; with `bias` it has a bias if W has one.

    Only with this rule are the parameter counts of Belief2's CIFAR-100 tables exact.
    """
    inner = shape.heads * shape.head_dim
    return nn.Linear(inner, shape.dim_out, bias=bias and shape.proj_bias, **shape.options)


def along_values(h: Tensor, v: Tensor, scope: str) -> Tensor:
    """alpha V over all heads (BeliefFormer 10) or beta_m v_m in each head (13), (B, n, d)."""
    if scope == "global":
        h, v = join_heads(h), join_heads(v)
    factor = (h * v).sum(-1, keepdim=True) / (v * v).sum(-1, keepdim=True).clamp_min(FLOOR)
    return factor * v if scope == "global" else join_heads(factor * v)


def apply_phi(module: Any, t: Tensor, width: int) -> Tensor:
    """Belief2 (15): phi of the projected part (B, n, d); `width` is D. Learned phi: Remark 2."""
    functions = {
        "identity": t,
        "gelu": t * (1 + torch.erf(t / math.sqrt(2))) / 2,
        "silu": t / (1 + torch.exp(-t)),
        "relu": torch.where(t > 0, t, torch.zeros_like(t)),
        "tanh": torch.tanh(t),
    }
    if module.part.phi_scope == "fixed":
        return functions[module.part.activation]
    weights = module.phi.expand(t.shape[-1] // width, -1).repeat_interleave(width, dim=0)
    total = torch.zeros_like(t)
    for number, value in enumerate(functions.values()):
        total = total + weights[:, number] * value
    return total


def join_heads(h: Tensor) -> Tensor:
    """Return (B, n, H D) from (B, H, n, D)."""
    return h.transpose(1, 2).flatten(-2)
