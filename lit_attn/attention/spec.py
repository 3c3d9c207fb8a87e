"""What an ablation may choose about an attention layer, and the presets that carry papers' names.

A layer is a product of independent choices (docs/design.md, section 2):

    x -> similarity (logits) -> compose (heads) -> softmax -> compose -> . V -> residual -> + x

Notation: n tokens, width d, H heads of width D = d / H; per head q, k, v, z of shape (n, D); H_m
the head's weighted sum of v; MH = concat of H_m and V = concat of v over heads, both (n, d).
"""

from typing import Any, Literal

from pydantic import Field, PositiveFloat, PositiveInt, field_validator, model_validator

from lit_attn.schema.base import Config, Kind
from lit_attn.schema.errors import suggest

Activation = Literal["identity", "gelu", "silu", "relu", "tanh"]


class Similarity(Kind):
    """The logits s_ij of a head."""


class DotConfig(Similarity):
    """s_ij = q_i.k_j / sqrt(D) (Vaswani et al. 2017, eq. 1)."""

    kind: Literal["dot"] = "dot"


class GaussianConfig(Similarity):
    """s_ij = -|q_i - k_j|^2 / (2 sqrt(D)) (MGK eq. 7 with one key)."""

    kind: Literal["gaussian"] = "gaussian"


class MixedKeysConfig(Similarity):
    """Several keys for every token (MGK section 2)."""

    kind: str
    keys: int = Field(2, ge=1, le=16, description="keys of every token, M")
    source: Literal["projected", "shifted"] = Field(
        "projected",
        description="projected: a projection for each key (option A); shifted: one "
        "projected key plus learned offsets (option B)",
    )
    prior: Literal["learned", "clamped", "m-step", "fixed"] = Field(
        "learned",
        description="weights pi_r of the keys; learned: softmax of parameters; clamped: "
        "parameters clamped to [0, 1], as the released code; m-step: mean "
        "responsibility at every training step (Soft-E); fixed: 1 / M",
    )
    prior_scope: Literal["head", "layer", "position"] = Field(
        "head",
        description="owner of a set of pi; head (paper), layer (released LRA code), or "
        "every head and key position (released language model code)",
    )
    positions: int = Field(
        256, ge=1, description="key positions with their own pi, for `prior_scope: position`"
    )
    responsibilities: Literal["attending", "all"] = Field(
        "attending",
        description="pairs of tokens that `prior: m-step` averages over; all includes "
        "future keys, as the released code",
    )
    shift_init: Literal["normal", "released"] = Field(
        "normal",
        description="initial offsets; normal: N(0, 1) (paper); released: the first is 0, "
        "the others N(0, 1/4)",
    )

    @model_validator(mode="after")
    def _nothing_idle(self) -> "MixedKeysConfig":
        """A choice without effect would make two cells of one computation."""
        if self.source == "projected" and self.shift_init != "normal":
            raise ValueError("shift_init: projected keys have no offsets")
        if self.prior != "m-step" and self.responsibilities != "attending":
            raise ValueError("responsibilities: only `prior: m-step` counts them")
        if self.prior == "fixed" and self.prior_scope != "head":
            raise ValueError("prior_scope: a fixed prior is the same everywhere")
        if self.prior_scope != "position" and self.positions != 256:
            raise ValueError("positions: only `prior_scope: position` has them")
        return self


class MixtureConfig(MixedKeysConfig):
    """Soft: log sum_r pi_r exp(s_ijr); hard: max_r s_ijr (MGK eq. 7, 8; Hard-E)."""

    kind: Literal["mixture"] = "mixture"
    kernel: Literal["gaussian", "dot"] = Field(
        "gaussian", description="logits of each key: Gaussian distance or scaled dot product"
    )
    assignment: Literal["soft", "hard"] = Field(
        "soft", description="soft: log of the sum over keys; hard: the largest logit (Hard-E)"
    )
    variance: tuple[PositiveFloat, ...] | None = Field(
        None,
        description="sigma_r^2 of each key's Gaussian in units of sqrt(D); null: 1; (1, 3) "
        "in the paper's section 3.4, (1, 1/3) in the released language model "
        "code",
    )

    @model_validator(mode="after")
    def _makes_sense(self) -> "MixtureConfig":
        if self.variance is not None and len(self.variance) != self.keys:
            raise ValueError(f"variance: {len(self.variance)} given for {self.keys} keys")
        if self.variance is not None and self.kernel == "dot":
            raise ValueError("variance: the dot kernel has none")
        if self.assignment == "hard" and self.prior != "learned":
            raise ValueError("prior: the largest of the keys' logits is not weighted")
        if self.assignment == "hard" and self.prior_scope != "head":
            raise ValueError("prior_scope: the largest of the keys' logits is not weighted")
        return self


class LinearConfig(MixedKeysConfig):
    """phi(q_i).sum_r pi_r phi(k_jr), phi = elu + 1: linear in n (MGK section 2.4)."""

    kind: Literal["linear"] = "linear"
    keys: int = Field(1, ge=1, le=16, description="keys of every token, M")
    mixing: Literal["after", "before"] = Field(
        "after",
        description="order of mixing the keys and phi; after (paper) or before (released LRA code)",
    )
    features: Literal["plain", "sum-to-one"] = Field(
        "plain",
        description="plain: phi; sum-to-one: phi divided by its sum over the head's width "
        "(released language model code)",
    )
    divide_by: Literal["sum", "scaled-sum", "root-length"] = Field(
        "sum",
        description="divisor of the sum over keys; sum of the similarities (paper); scaled-"
        "sum: that times sqrt(D) (released language model code); root-length: "
        "root of the number of tokens (released LRA code)",
    )

    @model_validator(mode="after")
    def _makes_sense(self) -> "LinearConfig":
        if self.prior == "m-step":
            raise ValueError("prior: responsibilities need the logits that linear keys never form")
        return self


class Compose(Kind):
    """What mixes the heads at each pair of tokens (i, j), before and after the softmax."""


class NoComposeConfig(Compose):
    """Heads stay apart."""

    kind: Literal["none"] = "none"


class StaticConfig(Compose):
    """A learned H x H matrix over the heads (talking heads, Shazeer et al. 2020)."""

    kind: Literal["static"] = "static"
    place: Literal["pre+post", "pre", "post"] = Field(
        "pre+post",
        description="composition of the logits (pre), of the weights after the softmax "
        "(post), or of both",
    )
    skip: bool = Field(
        False, description="add the heads themselves, as in DCMHA's static projection"
    )


class DynamicConfig(Compose):
    """a + sum_r w2_r (w1_r.a) + a * gate, with weights computed from tokens (DCMHA eq. 5-8).

    The kinds `query`, `key` and `query+key` name the tokens that the weights are computed from.
    """

    kind: str
    place: Literal["pre+post", "pre", "post"] = Field(
        "pre+post",
        description="composition of the logits (pre), of the weights after the softmax "
        "(post), or of both",
    )
    projection: bool = Field(True, description="include the low-rank term sum_r w2_r (w1_r.a)")
    gate: bool = Field(True, description="include the gate a * gate")
    static: bool = Field(False, description="add a learned H x H matrix")
    rank: int = Field(2, ge=1, description="rank of the projection")
    groups: int = Field(
        1, ge=1, description="equal groups of heads that compose separately; must divide the heads"
    )
    gate_init: Literal["pytorch", "jax"] = Field(
        "pytorch",
        description="scale of the gate's initial weights; pytorch: 0.05, jax: 0.005 (both "
        "released codes)",
    )
    gelu: Literal["exact", "tanh"] = Field(
        "exact",
        description="form of GELU; exact in the released PyTorch code, tanh in the JAX code",
    )

    @model_validator(mode="after")
    def _makes_sense(self) -> "DynamicConfig":
        if not (self.projection or self.gate):
            raise ValueError("without projection and gate nothing is dynamic")
        return self


class QueryComposeConfig(DynamicConfig):
    """Weights from the query's token."""

    kind: Literal["query"] = "query"


class KeyComposeConfig(DynamicConfig):
    """Weights from the key's token."""

    kind: Literal["key"] = "key"


class QueryKeyComposeConfig(DynamicConfig):
    """Weights from both tokens, added."""

    kind: Literal["query+key"] = "query+key"


class Residual(Kind):
    """What goes through the output projection and onto the skip connection.

    alpha_i = <MH_i, V_i> / <V_i, V_i> over all heads (scope global), or the same within each head,
    beta_m,i (scope head).
    """


class FullConfig(Residual):
    """MH W: the standard layer."""

    kind: Literal["full"] = "full"


class PerpendicularConfig(Residual):
    """(MH - alpha V) W; scope both adds (H_m - beta_m v_m) W^l (BeliefFormer eq. 10, 13-15)."""

    kind: Literal["perpendicular"] = "perpendicular"
    scope: Literal["global", "head", "both"] = Field(
        "global",
        description="projection over all heads (global), in each head (head), or both added (both)",
    )
    bias: bool = Field(True, description="give W^l the bias that W has, for `scope: both`")


class ProjectedConfig(Residual):
    """alpha V W (Belief2 Fig. 3)."""

    kind: Literal["projected"] = "projected"
    scope: Literal["global", "head"] = Field(
        "global", description="projection over all heads (global) or in each head (head)"
    )


class ValueConfig(Residual):
    """V W: attention without attending (Belief2 Fig. 3)."""

    kind: Literal["value"] = "value"


class DiscrepancyConfig(Residual):
    """(gamma V - MH) W (AttentionX eq. 9)."""

    kind: Literal["discrepancy"] = "discrepancy"
    gamma: float = Field(
        1.0, gt=0, le=1, description="factor of V; 1 for the paper's ViT, 0.5 for its GPT-2"
    )


class SplitConfig(Residual):
    """(MH - alpha V) W + phi(alpha V) W_p (Belief2 eq. 14-15)."""

    kind: Literal["split"] = "split"
    scope: Literal["global", "head"] = Field(
        "global", description="projection over all heads (global) or in each head (head)"
    )
    activation: Activation = Field("gelu", description="phi, applied to the projected part")
    init: Literal["fresh", "copy"] = Field(
        "fresh",
        description="initial W_p; fresh: as any Linear; copy: equal to W, so that a "
        "pretrained layer computes the same with `activation: identity` "
        "(Proposition 1)",
    )
    bias: bool = Field(True, description="give W_p the bias that W has")


class AttentionSpec(Config):
    """One attention layer: a choice from every family.

    Written in YAML as a preset's name, as the parts themselves, or as `{preset: NAME, ...}` with
    the parts that differ from the preset.
    """

    similarity: Similarity = Field(DotConfig(), description="logits of a head")
    zz: bool = Field(
        False, description="add z_i.z_j / sqrt(D) to the logits, z = x W_Z (Belief2 11)"
    )
    compose: Compose = Field(
        NoComposeConfig(), description="mixing of the heads before and after the softmax"
    )
    residual: Residual = Field(
        FullConfig(),
        description="part that goes through the output projection to the skip connection",
    )
    window: PositiveInt | None = Field(
        None, description="keys a token sees, itself included; also ahead where not causal"
    )
    kv_heads: PositiveInt | None = Field(
        None, description="heads of keys and values, shared by groups of query heads"
    )

    @model_validator(mode="after")
    def _makes_sense(self) -> "AttentionSpec":
        if isinstance(self.similarity, LinearConfig):
            reason = "linear keys never form the logits"
            if not isinstance(self.compose, NoComposeConfig):
                raise ValueError(f"compose: {reason} that heads would be composed from")
            if self.zz:
                raise ValueError(f"zz: {reason} that z_i.z_j would be added to")
            if self.window:
                raise ValueError(f"window: {reason} that a window would mask")
        return self

    @field_validator("zz", mode="before")
    @classmethod
    def _with_or_without(cls, value: Any) -> Any:
        return (
            {"with": True, "without": False}.get(value, value) if isinstance(value, str) else value
        )


def _dcmha(**choices: Any) -> AttentionSpec:
    return AttentionSpec(compose=QueryKeyComposeConfig(**choices))


PRESETS: dict[str, AttentionSpec] = {
    "standard": AttentionSpec(),
    # BeliefFormer, XSA, AttentionX, Belief2
    "belief": AttentionSpec(residual=PerpendicularConfig()),
    "belief-star": AttentionSpec(residual=PerpendicularConfig(scope="both")),
    "xsa": AttentionSpec(residual=PerpendicularConfig(scope="head")),
    "attentionx": AttentionSpec(residual=DiscrepancyConfig()),
    "belief2": AttentionSpec(zz=True, residual=SplitConfig()),
    # MGK, Tables 5 and 6
    "gaussian": AttentionSpec(similarity=GaussianConfig()),
    "mgk": AttentionSpec(similarity=MixtureConfig()),
    "smgk": AttentionSpec(similarity=MixtureConfig(source="shifted")),
    "mgk-hard": AttentionSpec(similarity=MixtureConfig(assignment="hard")),
    "smgk-hard": AttentionSpec(similarity=MixtureConfig(source="shifted", assignment="hard")),
    "mgk-soft-e": AttentionSpec(similarity=MixtureConfig(prior="m-step")),
    "smgk-soft-e": AttentionSpec(similarity=MixtureConfig(source="shifted", prior="m-step")),
    "softmax-mgk": AttentionSpec(similarity=MixtureConfig(kernel="dot")),
    "softmax-smgk": AttentionSpec(similarity=MixtureConfig(kernel="dot", source="shifted")),
    "linear": AttentionSpec(similarity=LinearConfig()),
    "mlk": AttentionSpec(similarity=LinearConfig(keys=2)),
    "smlk": AttentionSpec(similarity=LinearConfig(keys=2, source="shifted")),
    # DCMHA and its Table 9
    "talking-heads": AttentionSpec(compose=StaticConfig()),
    "static-projection": AttentionSpec(compose=StaticConfig(skip=True)),
    "dcmha": _dcmha(),
    "dcmha-projection": _dcmha(gate=False),
    "dcmha-gate": _dcmha(projection=False),
    "dcmha-all": _dcmha(static=True),
    "dcmha-query": AttentionSpec(compose=QueryComposeConfig()),
    "dcmha-key": AttentionSpec(compose=KeyComposeConfig()),
    "dcmha-pre": _dcmha(place="pre"),
    "dcmha-post": _dcmha(place="post"),
    "dcmha-rank-1": _dcmha(rank=1),
    "dcmha-rank-4": _dcmha(rank=4),
}


def preset(name: str) -> AttentionSpec:
    """The preset called `name`; ValueError with the nearest name where there is none."""
    if name not in PRESETS:
        raise ValueError(f"'{name}' is not a preset{suggest(name, PRESETS)}")
    return PRESETS[name]
