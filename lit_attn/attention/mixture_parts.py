"""Configuration classes of the similarities with several keys per token (MGK, arXiv:2110.08678).

Notation: n tokens, width d, H heads of width D = d / H; k_jr key r of token j, pi_r its weight.
"""

from typing import Any, Literal

from pydantic import Field, PositiveFloat

from lit_attn.attention.parts import LayerChoices, LayerShape, SimilarityConfig
from lit_attn.schema.base import consistency_check, load


class MixedKeysConfig(SimilarityConfig):
    """Several keys for every token (MGK section 2)."""

    keys: int = Field(2, ge=1, le=16, description="keys of every token, M")
    source: Literal["projected", "shifted"] = Field(
        "projected",
        description="projected: a projection for each key (option A); shifted: one "
        "projected key plus learned offsets (option B)",
    )
    prior: Literal["learned", "clamped", "m-step", "fixed"] = Field(
        "learned",
        description="weights pi_r of the keys; learned: softmax of parameters; clamped: parameters "
        "clamped to [0, 1], as the released code; m-step: after every training step, the mean "
        "responsibility in its complete batch, over all micro-batches and devices (Soft-E), with "
        "1e-6 in its divisor, as the released code; fixed: 1 / M",
    )
    prior_scope: Literal["head", "layer", "position"] = Field(
        "head",
        description="unit with its own pi: each head (paper), each layer (released LRA code), "
        "or every head and key position (released language model code)",
    )
    positions: int = Field(
        256, ge=1, description="key positions with their own pi, for `prior_scope: position`"
    )
    shift_init: Literal["normal", "released"] = Field(
        "normal",
        description="initial offsets; normal: N(0, 1) (paper); released: the first is 0, "
        "the others N(0, 1/4)",
    )

    @consistency_check
    def _refuse_choices_without_effect(self) -> None:
        """Refuse a choice without effect: two cells would then compute the same."""
        if self.source == "projected" and self.shift_init != "normal":
            raise ValueError("shift_init: projected keys have no offsets")
        if self.prior == "fixed" and self.prior_scope != "head":
            raise ValueError("prior_scope: has no effect with `prior: fixed`")
        if self.prior_scope != "position" and self.positions != 256:
            raise ValueError("positions: has no effect without `prior_scope: position`")

    @property
    def learns_prior(self) -> bool:
        """True if pi is a parameter: with several keys, unless their largest logit counts."""
        is_hard = getattr(self, "assignment", "soft") == "hard"
        return self.keys > 1 and self.prior in ("learned", "clamped") and not is_hard

    def exempt_parameters(self) -> tuple[str, ...]:
        names = []
        if self.learns_prior:
            names.append("prior")
        if self.source == "shifted":
            names.append("shift")
        return tuple(names)

    @property
    def counts_queries(self) -> bool:
        return self.prior == "m-step"

    def reference_keys(self, module: Any, x: Any, k: Any) -> list[Any]:
        return load("lit_attn.attention.reference:mixed_keys")(module, x, k)

    @property
    def max_tokens(self) -> int | None:
        return self.positions if self.prior_scope == "position" else None


class MixtureConfig(MixedKeysConfig, kind="mixture"):
    """Soft: log sum_r pi_r exp(s_ijr); hard: max_r s_ijr (MGK eq. 7, 8; Hard-E)."""

    fast = "mixture:Mixture"
    kernel: Literal["gaussian", "dot"] = Field(
        "gaussian", description="logits of each key: Gaussian distance or scaled dot product"
    )
    assignment: Literal["soft", "hard"] = Field(
        "soft", description="soft: log of the sum over keys; hard: the largest logit (Hard-E)"
    )
    variance: tuple[PositiveFloat, ...] | Literal["learned"] | None = Field(
        None,
        description="sigma_r^2 of each key's Gaussian in units of sqrt(D); null: 1; (1, 3) in the "
        "paper's section 3.4, (1, 1/3) in the released language model code; learned: exp of a "
        "parameter for each r, 1 at first",
    )
    variance_scope: Literal["layer", "head"] = Field(
        "layer",
        description="unit with its own sigma_r^2 for `variance: learned`: each layer or each head; "
        "all tokens share it (sigma_jr in MGK eq. 5-7 is that of key r of token j)",
    )

    @consistency_check
    def _makes_sense(self) -> None:
        if isinstance(self.variance, tuple) and len(self.variance) != self.keys:
            raise ValueError(f"variance: has {len(self.variance)} values for {self.keys} keys")
        if self.variance is not None and self.kernel == "dot":
            raise ValueError("variance: has no effect with `kernel: dot`")
        if self.variance_scope != "layer" and self.variance != "learned":
            raise ValueError("variance_scope: has no effect without `variance: learned`")
        for key, default in (("prior", "learned"), ("prior_scope", "head")):
            if self.assignment == "hard" and getattr(self, key) != default:
                raise ValueError(f"{key}: has no effect with `assignment: hard`")

    def exempt_parameters(self) -> tuple[str, ...]:
        return (*super().exempt_parameters(), *self.stacked_vectors())

    def stacked_vectors(self) -> tuple[str, ...]:
        return ("log_variance",) if self.variance_scope == "head" else ()


class GaussianConfig(SimilarityConfig, kind="gaussian"):
    """s_ij = -|q_i - k_j|^2 / (2 sqrt(D)) (MGK eq. 7 with one key)."""

    fast = "mixture:Mixture"

    def build(self, shape: LayerShape) -> Any:
        return MixtureConfig(keys=1).build(shape)


class LinearConfig(MixedKeysConfig, kind="linear"):
    """phi(q_i).sum_r pi_r phi(k_jr): linear in n (MGK section 2.4).

    The feature maps phi of a vector t of the head's width D, by their sources:

    - elu: elu(t) + 1 (Katharopoulos et al. 2020, https://arxiv.org/abs/2006.16236, eq. 7), that of
      MGK's linear attention.
    - relu: max(t, 0) (Choromanski et al. 2021, https://arxiv.org/abs/2009.14794).
    - softmax: exp(t) divided by its sum over the D elements, as for the queries of efficient
      attention (Shen et al. 2021, https://arxiv.org/abs/1812.01243), whose keys are
      divided by a sum over the tokens instead, which has no causal form.
    - dpfp: the 2 D products of neighbours of r = [max(t, 0), max(-t, 0)], r_c r_(c - 1), where r_0
      is the last one (Schlag et al. 2021, https://arxiv.org/abs/2102.11174, section 5.3, nu = 1;
      MGK's language models extend its code).
    - taylor: [1, t', t'_a t'_b / sqrt(2)] with t' = t / D^(1/4), 1 + D + D^2 elements, so that
      phi(q).phi(k) = 1 + s + s^2 / 2 with s = q.k / sqrt(D), the second-order series of softmax's
      exp(s) (Arora et al. 2024, https://arxiv.org/abs/2402.18668).
    """

    has_logits = False
    fast = "linear:Linear"
    keys: int = Field(1, ge=1, le=16, description="keys of every token, M")
    mixing: Literal["after", "before"] = Field(
        "after",
        description="order of mixing the keys and phi; after (paper) or before (released LRA code)",
    )
    phi: Literal["elu", "relu", "softmax", "dpfp", "taylor"] = Field(
        "elu",
        description="feature map; elu: elu + 1 (paper); relu, softmax over the head's width, dpfp: "
        "products of neighbours (fast weights), taylor: series of exp up to second order",
    )
    features: Literal["plain", "sum-to-one"] = Field(
        "plain",
        description="sum-to-one: phi divided by the sum of its elements (released LM code)",
    )
    divide_by: Literal["sum", "scaled-sum", "root-length"] = Field(
        "sum",
        description="divisor of the sum over keys; sum of the similarities (paper), or "
        "scaled-sum: that times sqrt(D), both plus 1e-5 sqrt(D) (released language model code); "
        "root-length: root of the number of tokens (released LRA code)",
    )

    @consistency_check
    def _makes_sense(self) -> None:
        if self.prior == "m-step":
            raise ValueError("prior: responsibilities need the logits that linear keys never form")
        if self.features == "sum-to-one" and self.phi == "softmax":
            raise ValueError("features: the elements of `phi: softmax` sum to one; remove it")
        if self.features == "sum-to-one" and self.phi == "taylor":
            raise ValueError(
                "features: elements of `phi: taylor` can be negative, and their sum near zero; "
                "remove it"
            )

    def reference_weights(
        self, module: Any, q: Any, keys: Any, visible: Any, is_causal: bool
    ) -> Any:
        return self.reference(module, q, keys, visible, is_causal)

    def check(self, layer: LayerChoices) -> None:
        reason = "linear keys never form the logits"
        if layer.compose.places():
            raise ValueError(f"compose: {reason} that it would compose")
        if layer.normaliser.kind != "softmax":
            raise ValueError(f"normaliser: {reason} that it would normalise")
        if layer.zz:
            raise ValueError(f"zz: {reason} to which it would add z_i.z_j")
        if layer.window:
            raise ValueError(f"window: {reason} that it would mask")
        scale = layer.parts["scale"]
        if scale.kind != "none":
            raise ValueError(f"scale: {reason} that '{scale.kind}' would multiply")
        bias = layer.parts["bias"]
        if bias.kind != "none":
            raise ValueError(f"bias: {reason} to which '{bias.kind}' would add")
        chosen_filter = layer.parts["filter"]
        if chosen_filter.kind != "none":
            raise ValueError(f"filter: {reason} that '{chosen_filter.kind}' would filter")
