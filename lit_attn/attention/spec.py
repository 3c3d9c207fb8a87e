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
    """Several keys for every token (MGK section 2).

    `source`: each key has its own projection (projected, option A), or is the one key plus a
    learned offset (shifted, option B). `prior`, the weights pi_r of the keys: *learned* sums to one
    by a softmax, *clamped* is the released code's (free, clamped to [0, 1]), *m-step* is set at
    every training step to the mean responsibility (Soft-E), *fixed* stays 1 / M. `prior_scope` says
    what has a pi of its own: every head (the paper), the layer (the released LRA code), or every
    head and key position up to `positions` (the released language model code). `responsibilities`
    are averaged over the pairs of tokens that attend, or over all, future queries included, as the
    released code does.

    `shift_init`: offsets from N(0, 1) (the paper), or the first zero and the others N(0, 1/4) (the
    released code).
    """

    kind: str
    keys: int = Field(2, ge=1, le=16)
    source: Literal["projected", "shifted"] = "projected"
    prior: Literal["learned", "clamped", "m-step", "fixed"] = "learned"
    prior_scope: Literal["head", "layer", "position"] = "head"
    positions: int = Field(256, ge=1)
    responsibilities: Literal["attending", "all"] = "attending"
    shift_init: Literal["normal", "released"] = "normal"

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
    """Soft: log sum_r pi_r exp(s_ijr); hard: max_r s_ijr (MGK eq. 7, 8; Hard-E).

    `variance` gives sigma_r^2 of the Gaussian kernel in units of sqrt(D), one per key: the paper's
    appendix has (1, 1), its section 3.4 (1, 3), the released language model code (1, 1/3).
    """

    kind: Literal["mixture"] = "mixture"
    kernel: Literal["gaussian", "dot"] = "gaussian"
    assignment: Literal["soft", "hard"] = "soft"
    variance: tuple[PositiveFloat, ...] | None = None

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
    """phi(q_i).sum_r pi_r phi(k_jr), phi = elu + 1: linear in n (MGK section 2.4).

    `mixing`: keys are mixed after phi (the paper) or before it (the released LRA code).
    `features`: phi as it is, or divided by its own sum over the head's width (the released language
    model code). `divide_by`, what the sum over keys is divided by: the similarities' own *sum* (the
    paper), *scaled-sum*, that times sqrt(D) (the released language model code), or *root-length*,
    the root of n, where causal of the tokens so far (the released LRA code).
    """

    kind: Literal["linear"] = "linear"
    keys: int = Field(1, ge=1, le=16)
    mixing: Literal["after", "before"] = "after"
    features: Literal["plain", "sum-to-one"] = "plain"
    divide_by: Literal["sum", "scaled-sum", "root-length"] = "sum"

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
    """A learned H x H matrix (talking heads, Shazeer et al. 2020); with `skip` it is added to the
    heads as they are, as in DCMHA's ablation (static proj.)."""

    kind: Literal["static"] = "static"
    place: Literal["pre+post", "pre", "post"] = "pre+post"
    skip: bool = False


class DynamicConfig(Compose):
    """a + sum_r w2_r (w1_r.a) + a * gate, the weights computed from tokens (DCMHA eq. 5-8).

    The kinds `query`, `key` and `query+key` say from which token. `projection` is the low-rank term
    of rank `rank`, `gate` the last one; `static` adds a learned matrix beside the identity. Heads
    compose within `groups` equal groups. `gate_init`: the scale of the gate's initial weights, 0.05
    in the released PyTorch code and 0.005 in the JAX code; `gelu`: exact or tanh likewise.
    """

    kind: str
    place: Literal["pre+post", "pre", "post"] = "pre+post"
    projection: bool = True
    gate: bool = True
    static: bool = False
    rank: int = Field(2, ge=1)
    groups: int = Field(1, ge=1)
    gate_init: Literal["pytorch", "jax"] = "pytorch"
    gelu: Literal["exact", "tanh"] = "exact"

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
    """(MH - alpha V) W; scope both adds (H_m - beta_m v_m) W^l (BeliefFormer eq. 10, 13-15).

    `bias: false` leaves W^l without the bias that W may have.
    """

    kind: Literal["perpendicular"] = "perpendicular"
    scope: Literal["global", "head", "both"] = "global"
    bias: bool = True


class ProjectedConfig(Residual):
    """alpha V W (Belief2 Fig. 3)."""

    kind: Literal["projected"] = "projected"
    scope: Literal["global", "head"] = "global"


class ValueConfig(Residual):
    """V W: attention without attending (Belief2 Fig. 3)."""

    kind: Literal["value"] = "value"


class DiscrepancyConfig(Residual):
    """(gamma V - MH) W (AttentionX eq. 9); gamma = 1 for its ViT, 0.5 for its GPT-2."""

    kind: Literal["discrepancy"] = "discrepancy"
    gamma: float = Field(1.0, gt=0, le=1)


class SplitConfig(Residual):
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

    similarity: Similarity = DotConfig()
    zz: bool = Field(
        False, description="add z_i.z_j / sqrt(D) to the logits, z = x W_Z (Belief2 11)"
    )
    compose: Compose = NoComposeConfig()
    residual: Residual = FullConfig()
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
