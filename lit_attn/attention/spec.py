"""What an ablation may choose about an attention layer, and the presets that carry papers' names.

A layer is a product of independent choices (docs/design.md, section 2):

    x -> similarity (logits) -> compose (heads) -> softmax -> compose -> . V -> residual -> + x

Notation: n tokens, width d, H heads of width D = d / H; per head q, k, v, z of shape (n, D); H_m
the head's weighted sum of v; MH = concat of H_m and V = concat of v over heads, both (n, d).
"""

from typing import Any, Literal

from pydantic import Field, field_validator

from lit_attn.config.base import Config, Kind
from lit_attn.config.errors import nearest

Activation = Literal["identity", "gelu", "silu", "relu", "tanh"]


class Similarity(Kind):
    """The logits s_ij of a head."""


class Dot(Similarity):
    """s_ij = q_i.k_j / sqrt(D) (Vaswani et al. 2017, eq. 1)."""

    kind: Literal["dot"] = "dot"


class Residual(Kind):
    """What goes through the output projection and onto the skip connection.

    alpha_i = <MH_i, V_i> / <V_i, V_i> over all heads (scope global), or the same within each head,
    beta_m,i (scope head).
    """


class Full(Residual):
    """MH W: the standard layer."""

    kind: Literal["full"] = "full"


class Perpendicular(Residual):
    """(MH - alpha V) W; scope both adds (H_m - beta_m v_m) W^l (BeliefFormer eq. 10, 13-15).

    `bias: false` leaves W^l without the bias that W may have.
    """

    kind: Literal["perpendicular"] = "perpendicular"
    scope: Literal["global", "head", "both"] = "global"
    bias: bool = True


class Projected(Residual):
    """alpha V W (Belief2 Fig. 3)."""

    kind: Literal["projected"] = "projected"
    scope: Literal["global", "head"] = "global"


class Value(Residual):
    """V W: attention without attending (Belief2 Fig. 3)."""

    kind: Literal["value"] = "value"


class Discrepancy(Residual):
    """(gamma V - MH) W (AttentionX eq. 9); gamma = 1 for its ViT, 0.5 for its GPT-2."""

    kind: Literal["discrepancy"] = "discrepancy"
    gamma: float = Field(1.0, gt=0, le=1)


class Split(Residual):
    """(MH - alpha V) W + phi(alpha V) W_p (Belief2 eq. 14-15).

    `init: copy` starts W_p as a copy of W: with phi = identity a pretrained layer then computes
    exactly what it did before (Proposition 1). `bias: false` leaves W_p without the bias that W may
    have.
    """

    kind: Literal["split"] = "split"
    scope: Literal["global", "head"] = "global"
    activation: Activation = "gelu"
    init: Literal["fresh", "copy"] = "fresh"
    bias: bool = True


class AttentionSpec(Config):
    """One attention layer: a choice from every family.

    Written in YAML as a preset's name, as the parts themselves, or as `{preset: NAME, ...}` with
    the parts that differ from the preset.
    """

    similarity: Similarity = Dot()
    zz: bool = Field(
        False, description="add z_i.z_j / sqrt(D) to the logits, z = x W_Z (Belief2 11)"
    )
    residual: Residual = Full()

    @field_validator("zz", mode="before")
    @classmethod
    def _with_or_without(cls, value: Any) -> Any:
        return (
            {"with": True, "without": False}.get(value, value) if isinstance(value, str) else value
        )


PRESETS: dict[str, AttentionSpec] = {
    "standard": AttentionSpec(),
    "belief": AttentionSpec(residual=Perpendicular()),
    "belief-star": AttentionSpec(residual=Perpendicular(scope="both")),
    "xsa": AttentionSpec(residual=Perpendicular(scope="head")),
    "attentionx": AttentionSpec(residual=Discrepancy()),
    "belief2": AttentionSpec(zz=True, residual=Split()),
}


def preset(name: str) -> AttentionSpec:
    """The preset called `name`; ValueError with the nearest name where there is none."""
    if name not in PRESETS:
        raise ValueError(f"'{name}' is not a preset{nearest(name, PRESETS)}")
    return PRESETS[name]
