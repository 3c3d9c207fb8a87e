"""Configuration classes of the parts of an attention layer, in four families.

A part's configuration class says how the module that computes it is built (`build`) and where its
formula is (`reference`). This file imports no torch: modules and formulas are loaded at first use.

Notation: n tokens, width d, H heads of width D = d / H; per head q, k, v, z of shape (n, D); H_m
the head's weighted sum of v; MH = concat of H_m and V = concat of v over heads, both (n, d).
"""

from importlib import import_module
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Protocol

from pydantic import Field, PositiveFloat
from pydantic.alias_generators import to_snake

from lit_attn.schema.base import Config, Kind, consistency_check, load
from lit_attn.schema.errors import ConfigError


class LayerShape(NamedTuple):
    """Sizes of the layer that a part is built for, and the options of its parameters.

    `key_heads` is H, or the number of groups of heads that share keys and values. `needs_row_terms`
    is True if a term that is equal for all keys of a query changes the layer's output: the
    similarity must then include these terms in its logits. `options` are the `device` and `dtype`
    of parameters.
    """

    dim: int
    dim_out: int
    heads: int
    key_heads: int
    head_dim: int
    qkv_bias: bool
    proj_bias: bool
    needs_row_terms: bool
    options: dict[str, Any]


class LayerChoices(Protocol):
    """Choices of a complete layer, as one of its parts sees them (lit_attn.attention.spec)."""

    @property
    def similarity(self) -> "SimilarityConfig":
        """Part that computes the logits."""

    @property
    def compose(self) -> "ComposeConfig":
        """Part that mixes the heads."""

    @property
    def normaliser(self) -> "NormaliserConfig":
        """Part that turns logits into weights."""

    @property
    def zz(self) -> bool | Literal["like-k"]:
        """True if a second inner product is added to the logits."""

    @property
    def window(self) -> int | None:
        """Number of keys that a query sees, or None without a window."""

    @property
    def parts(self) -> "dict[str, Part]":
        """Chosen member of each family, by the family's key."""


class Part(Config):
    """Configuration of one part of a layer: how it is built, and with what it can be combined.

    A part outside this package overrides `build` and `reference`. The parts of this package name
    their module instead, as "file:Class" in `fast`; the formula of `OffsetSoftmax` is the function
    `offset_softmax` in lit_attn.attention.reference. Subclasses inherit both.
    """

    fast: ClassVar[str] = ""
    needs_self: ClassVar[str] = ""
    """Why the part has no meaning in cross-attention; empty if it has one."""
    kind: str = ""

    def build(self, shape: LayerShape) -> Any:
        """Return the torch module that computes this part in a layer of `shape`."""
        return load(f"lit_attn.attention.{self.fast}")(self, shape)

    def reference(self, module: Any, *inputs: Any) -> Any:
        """Return the value of this part's formula, with the parameters of `module`.

        The family's docstring names the inputs. Raises ConfigError if the part has no formula.
        """
        formulas = import_module("lit_attn.attention.reference")
        name = to_snake(self.fast.rpartition(":")[2])
        if not hasattr(formulas, name):
            raise ConfigError(
                f"'{self.kind}' cannot be compared with its formula: "
                f"its class {type(self).__name__} needs a method `reference` "
                "(docs/adding-a-part.md)"
            )
        return getattr(formulas, name)(module, *inputs)

    def exempt_parameters(self) -> tuple[str, ...]:
        """Return the parameters of the module that have no weight decay with `decay: weights`.

        Only parameters of two or more axes need to be named: scales, positions, gates and priors.
        Vectors and biases never decay with this rule.
        """
        return ()

    def stacked_vectors(self) -> tuple[str, ...]:
        """Return the parameters of the module whose rows are vectors in the released code.

        They have no weight decay with `decay: matrices` and `decay: weights`.
        """
        return ()

    def check(self, layer: "LayerChoices") -> None:
        """Raise ValueError if this part cannot be combined with the other parts of `layer`."""

    def check_heads(self, heads: int) -> None:
        """Raise ValueError if this part cannot be used in a layer of `heads` heads."""


class SimilarityConfig(Part, Kind):
    """Family of the logits s_ij of a head.

    `build` returns a lit_attn.attention.similarity.Similarity. The inputs of `reference` are q
    (B, H, n, D), the list of every token's keys, (B, H, n, D) each, and tau: the factor of the
    logits that a learned temperature sets, else 1. It returns the logits (B, H, n, n).
    """

    has_logits: ClassVar[bool] = True
    """False for a similarity that never forms logits, so that nothing can mask or compose them."""

    @property
    def counts_queries(self) -> bool:
        """True if training counts the queries, so that masks must hide queries that are padding."""
        return False

    def reference_keys(self, module: Any, x: Any, k: Any) -> list[Any]:
        """Return the keys of every token, (B, n, H' D) each, from x (B, n, d) and the layer's k."""
        return [k]

    def reference_weights(
        self, module: Any, q: Any, keys: Any, visible: Any, is_causal: bool
    ) -> Any:
        """Return the weights (B, H, n, n) of a similarity without logits, else None.

        `visible` (n, n) is True where a query attends to a key.
        """
        return None

    @property
    def max_tokens(self) -> int | None:
        """Number of tokens that the similarity has parameters for, or None if there is no limit."""
        return None


class DotConfig(SimilarityConfig, kind="dot"):
    """s_ij = q_i.k_j / sqrt(D) (Vaswani et al. 2017, eq. 1)."""

    fast = "similarity:DotProduct"


class ComposeConfig(Part, Kind):
    """Family of the mixing of heads at each pair of tokens (i, j).

    `build` returns a lit_attn.attention.compose.Composer, once for every place. The inputs of
    `reference` are x (B, n, d) and the logits or weights a (B, H, n, n); it returns a mixed. In
    cross-attention the memory (B, m, d) follows them.
    """

    def places(self) -> tuple[str, ...]:
        """Return the places of mixing: "pre" (before the normaliser), "post" (after it) or both."""
        return ("pre", "post")


class NoComposeConfig(ComposeConfig, kind="none"):
    """Independent heads."""

    fast = "compose:Composer"

    def places(self) -> tuple[str, ...]:
        return ()


class PlacedCompose(ComposeConfig):
    """Composition with a choice of its places."""

    place: Literal["pre+post", "pre", "post"] = Field(
        "pre+post", description="mixing of the logits (pre), of the weights (post), or of both"
    )

    def places(self) -> tuple[str, ...]:
        return tuple(self.place.split("+"))


class StaticConfig(PlacedCompose, kind="static"):
    """A learned H x H matrix over the heads (talking heads, Shazeer et al. 2020)."""

    fast = "compose:HeadMaps"
    skip: bool = Field(False, description="add the heads too, as in DCMHA's static projection")
    static: ClassVar[bool] = True
    sides: ClassVar[tuple[str, ...]] = ()


class DynamicConfig(PlacedCompose):
    """a + sum_r w2_r (w1_r.a) + a * gate, with weights computed from tokens (DCMHA eq. 5-8).

    The kinds `query`, `key` and `query+key` name the tokens that the weights are computed from.
    """

    fast = "compose:HeadMaps"
    skip: ClassVar[bool] = True
    projection: bool = Field(True, description="include the low-rank term sum_r w2_r (w1_r.a)")
    gate: bool = Field(True, description="include the gate a * gate")
    static: bool = Field(False, description="add a learned H x H matrix")
    rank: int = Field(2, ge=1, description="rank of the projection")
    gate_init: Literal["pytorch", "jax"] = Field(
        "pytorch",
        description="scale of the gate's initial weights in a released code: 0.05, or 0.005 (jax)",
    )
    gelu: Literal["exact", "tanh"] = Field(
        "exact",
        description="form of GELU; exact in the released PyTorch code, tanh in the JAX code",
    )

    @consistency_check
    def _makes_sense(self) -> None:
        if not (self.projection or self.gate):
            raise ValueError("needs `projection: true` or `gate: true`")

    @property
    def sides(self) -> tuple[str, ...]:
        """Tokens that weights are computed from: "query", "key" or both."""
        return tuple(self.kind.split("+"))


class QueryComposeConfig(DynamicConfig, kind="query"):
    """Mixing weights computed from the query's token."""


class KeyComposeConfig(DynamicConfig, kind="key"):
    """Mixing weights computed from the key's token."""


class QueryKeyComposeConfig(DynamicConfig, kind="query+key"):
    """Sum of the mixing weights computed from the query's and from the key's token."""


class NormaliserConfig(Part, Kind):
    """Family of the functions that turn logits into weights.

    `build` returns a lit_attn.attention.normaliser.Normaliser. The inputs of `reference` are the
    logits (B, H, n, n) and `visible`, broadcastable to them, True where a query attends to a key;
    it returns the weights. Set `ignores_row_terms` to True if adding one number to all logits of a
    query leaves its weights unchanged: similarities then leave such terms out.
    """

    ignores_row_terms: ClassVar[bool] = False

    def reference_heads(self, module: Any, heads: Any) -> Any:
        """Return the heads' sums (B, H, n, D) after what follows the weighted sum of values."""
        return heads


class SoftmaxConfig(NormaliserConfig, kind="softmax"):
    """a_ij = exp(s_ij) / sum_j exp(s_ij) (Vaswani et al. 2017, eq. 1)."""

    ignores_row_terms = True
    fast = "normaliser:Softmax"


class SigmoidConfig(NormaliserConfig, kind="sigmoid"):
    """a_ij = 1 / (1 + exp(-(s_ij + b))), b = -log n (Ramapuram et al. 2024, section 2).

    n is the number of keys that the query may attend to: without causal and padding masks it is the
    number of tokens, as in the paper.
    """

    fast = "normaliser:Sigmoid"


class OffsetSoftmaxConfig(NormaliserConfig, kind="offset-softmax"):
    """a_ij = exp(s_ij) / (offset + sum_j exp(s_ij)), as in MGK's released language models."""

    fast = "normaliser:OffsetSoftmax"
    offset: PositiveFloat = Field(1e-6, description="term added to the sum over keys")


class SinkConfig(NormaliserConfig, kind="sink"):
    """a_ij = exp(s_ij) / (exp(b_m) + sum_j exp(s_ij)), with a learned b_m of each head.

    The learned attention sink of gpt-oss (OpenAI 2025, https://arxiv.org/abs/2508.10925, section
    2.3): a key without a value, which no mask hides.
    """

    fast = "normaliser:Sink"
    start: float = Field(0.0, description="initial b_m")


class SoftpickConfig(NormaliserConfig, kind="softpick"):
    """a_ij = max(e^s_ij - 1, 0) / (sum_j |e^s_ij - 1| + 1e-8 e^mu_i), mu_i = max(0, max_j s_ij).

    Zuhri et al. 2025, "Softpick: No Attention Sink, No Massive Activations with Rectified Softmax",
    https://arxiv.org/abs/2504.20966, eq. 3.
    """

    fast = "normaliser:Softpick"


class CappedSoftmaxConfig(NormaliserConfig, kind="capped-softmax"):
    """Softmax of c tanh(s_ij / c), so that no logit exceeds c (Gemma 2).

    Gemma Team 2024, "Gemma 2", https://arxiv.org/abs/2408.00118, section 2. Biases are added before
    the cap and masks act after it.
    """

    fast = "normaliser:CappedSoftmax"
    cap: PositiveFloat = Field(50.0, description="c, the largest logit")


class DifferentialConfig(NormaliserConfig, kind="differential"):
    """softmax(s_1) - lambda softmax(s_2) of each pair of heads (Ye et al. 2024, eq. 1-3).

    Heads 2m and 2m + 1 have the queries and keys 1 and 2 of the paper's head m; their values, side
    by side, are its values of width 2 D. Each head m is then normalised (RMSNorm without weights)
    and multiplied by 1 - lambda_init. `lambda_init: depth` is 0.8 - 0.6 exp(-0.3 l) in layer l,
    which counts from 0, as in the released code; the paper also tries 0.8 in all layers.
    """

    ignores_row_terms = True
    fast = "normaliser:Differential"
    lambda_init: Annotated[float, Field(gt=0, lt=1)] | Literal["depth"] = Field(
        0.8, description="initial lambda of all layers, or depth: it grows with the layer"
    )
    weight: bool = Field(
        False, description="learned weights of the norm, shared by the heads, as in released code"
    )

    def stacked_vectors(self) -> tuple[str, ...]:
        return ("vectors",)

    def reference_heads(self, module: Any, heads: Any) -> Any:
        return load("lit_attn.attention.reference:differential_heads")(module, heads)

    def check_heads(self, heads: int) -> None:
        if heads % 2:
            raise ValueError(
                f"normaliser: differential attention needs an even number of heads, not {heads}"
            )


class ResidualConfig(Part, Kind):
    """Family of the signals that pass the output projection W and are added to the residual stream.

    alpha_i = <MH_i, V_i> / <V_i, V_i> over all heads (scope global), or beta_m,i, the same ratio
    within each head (scope head).

    `build` returns a lit_attn.attention.residual.Residual. The inputs of `reference` are x
    (B, n, d), the heads' sums and values, (B, H, n, D) each, and W; it returns (B, n, d).
    """

    needs_self = "uses the value of the query's own token"


class FullConfig(ResidualConfig, kind="full"):
    """MH W: the standard layer."""

    needs_self = ""
    fast = "residual:Full"


class PerpendicularConfig(ResidualConfig, kind="perpendicular"):
    """(MH - alpha V) W; scope both adds (H_m - beta_m v_m) W^l (BeliefFormer eq. 10, 13-15)."""

    fast = "residual:Perpendicular"
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


class ProjectedConfig(ResidualConfig, kind="projected"):
    """alpha V W; scope both adds (beta_m v_m) W^l (Belief2 Fig. 3, section 2.2).

    The paper speaks of local and global components and prints no equation of their sum. Scope both
    is the sum that Belief-Attention has of the perpendicular components (Belief2 eq. 7).
    """

    fast = "residual:Projected"
    scope: Literal["global", "head", "both"] = Field(
        "global",
        description="projection over all heads (global), in each head (head), or both added (both)",
    )
    bias: bool = Field(True, description="give W^l the bias that W has, for `scope: both`")


class ValueConfig(ResidualConfig, kind="value"):
    """V W: attention without attending (Belief2 Fig. 3).

    The output does not depend on the attention weights, so choices of them are refused.
    """

    fast = "residual:Value"

    def check(self, layer: "LayerChoices") -> None:
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


class DiscrepancyConfig(ResidualConfig, kind="discrepancy"):
    """(gamma V - MH) W (AttentionX eq. 9)."""

    fast = "residual:Discrepancy"
    gamma: float = Field(
        1.0, gt=0, le=1, description="factor of V; 1 for the paper's ViT, 0.5 for its GPT-2"
    )
    gamma_scope: Literal["fixed", "layer", "head"] = Field(
        "fixed",
        description="fixed: gamma is a constant, as in the paper; layer, head: each layer or each "
        "head learns its gamma, which starts at `gamma` and can leave (0, 1]",
    )


class SplitConfig(ResidualConfig, kind="split"):
    """(MH - alpha V) W + phi(alpha V) W_p (Belief2 eq. 14-15).

    Scope both adds the same sum of the components in each head, (H_m - beta_m v_m) W^l and
    phi(beta_m v_m) W_p^l: Belief-Attention with both scopes (Belief2 eq. 7), whose projected
    components are kept too.
    """

    fast = "residual:Split"
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
