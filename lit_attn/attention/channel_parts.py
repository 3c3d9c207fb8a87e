"""Configuration classes of further families of parts, which the standard layer does not have.

- transform: maps of each head's q, k and v, before their norms and the cache.
- values: a mixture of a layer's values with those of the network's first layer.
- scale: a factor of all logits of a query.
- bias: a number that is added to the logit of each pair of tokens.
- gate: a factor of the signal that enters the output projection W.

This file imports no torch: modules and formulas are loaded at first use.

Notation: n tokens, width d, H heads of width D; x_i is the layer's input, s_ij are the logits.
"""

from typing import Any, ClassVar, Literal

from pydantic import Field, PositiveFloat, PositiveInt

from lit_attn.attention.parts import Part
from lit_attn.schema.base import Kind, load

FORMULAS = "lit_attn.attention.channel_formulas"


class ChannelPart(Part):
    """Part of this file, whose formula is the function of lit_attn.attention.channel_formulas."""

    formula: ClassVar[str] = ""

    def reference(self, module: Any, *inputs: Any) -> Any:
        return load(f"{FORMULAS}:{self.formula}")(module, *inputs)


class TransformConfig(ChannelPart, Kind):
    """Family of the maps of each head's q, k and v.

    `build` returns a lit_attn.attention.transform.Transform. The inputs of `reference` are q, k and
    v, (B, n, heads, D) each; it returns the three after their maps.
    """


class NoTransformConfig(TransformConfig, kind="none"):
    """Unchanged q, k and v."""

    fast = "transform:NoTransform"
    formula = "unchanged"


class LinearTransformConfig(TransformConfig, kind="linear"):
    """q T_Q, k T_K and v T_V with D x D matrices that all heads share (knocking heads).

    Zhou et al. 2025, "Knocking-Heads Attention", https://arxiv.org/abs/2510.23052. The matrices
    start as the identity. The paper was read; no official code was available to compare with.
    """

    fast = "transform:LinearTransform"
    formula = "linear_transform"
    maps: Literal["qkv", "v"] = Field("qkv", description="vectors that have a map")

    def exempt_parameters(self) -> tuple[str, ...]:
        return tuple(f"matrices.{name}" for name in self.maps)


class MlpTransformConfig(TransformConfig, kind="mlp"):
    """v becomes 2 (v W_up * sigmoid(v W_gate)) W_down, with matrices that all heads share.

    Zhou et al. 2025, https://arxiv.org/abs/2510.23052. W_up and W_down start as the identity and
    W_gate at 0, so v starts unchanged.
    """

    fast = "transform:MlpTransform"
    formula = "mlp_transform"

    def exempt_parameters(self) -> tuple[str, ...]:
        return ("up", "gate", "down")


class ValuesConfig(ChannelPart, Kind):
    """Family of the mixtures of a layer's values with those of the network's first layer.

    `build` returns a lit_attn.attention.first_values.Values. The inputs of `reference` are the
    layer's v after its map, and the v of the first layer, (B, n, H', D) each; it returns the values
    that the layer uses: for the weighted sums, the residual part and the cache.
    """

    reads_first: ClassVar[bool] = True
    """False for a part that leaves v unchanged, so that a layer needs no values of the first."""


class OwnValuesConfig(ValuesConfig, kind="own"):
    """The layer's own values."""

    fast = "first_values:OwnValues"
    formula = "own_values"
    reads_first = False


class FirstValuesConfig(ValuesConfig, kind="first"):
    """first v^(0) + layer v, where v^(0) are the values of the first layer (value residual).

    Zhou et al. 2024, "Value Residual Learning", https://arxiv.org/abs/2410.17897, section 3. The
    first layer is unchanged. The released code has fixed factors of 0.5; the paper also learns
    them, and tries larger factors of v^(0).
    """

    fast = "first_values:MixedValues"
    formula = "mixed_values"
    needs_self = "reads the values of the first layer of one sequence"
    first: float = Field(0.5, description="factor of the first layer's values, or its start")
    layer: float = Field(0.5, description="factor of the layer's own values, or its start")
    learned: bool = Field(False, description="learn both factors in each layer after the first")


class ScaleConfig(ChannelPart, Kind):
    """Family of the factors of all logits of a query.

    If a token has several keys, the logit of each of them has the factor. `build` returns a
    lit_attn.attention.scale.Scale. The inputs of `reference` are `visible`, broadcastable to
    (B, H, n, n), True where a query attends to a key, and the number of keys n. It returns a
    number, or factors broadcastable to (B, H, n, n).
    """


class NoScaleConfig(ScaleConfig, kind="none"):
    """Unchanged logits."""

    fast = "scale:NoScale"
    formula = "unscaled"


class SsmaxConfig(ScaleConfig, kind="ssmax"):
    """s_ij becomes c_m log(n_i) s_ij, with a learned c_m of each head (scalable softmax, SSMax).

    Nakanishi 2025, "Scalable-Softmax Is Superior for Attention", https://arxiv.org/abs/2501.19399.
    n_i is the number of keys that token i sees, i + 1 in causal order.
    """

    fast = "scale:Ssmax"
    formula = "ssmax"
    start: PositiveFloat = Field(0.43, description="initial c_m")


class BiasConfig(ChannelPart, Kind):
    """Family of the numbers that are added to the logits of pairs of tokens.

    They are added after a composition of the logits and before the masks hide keys. `build` returns
    a lit_attn.attention.bias.Bias. The inputs of `reference` are x (B, n, d), whether attention is
    causal, and which tokens are not padding, (B, H, n) or smaller, or None. It returns
    (B or 1, H, n, n).
    """


class NoBiasConfig(BiasConfig, kind="none"):
    """No bias."""

    fast = "bias:NoBias"
    formula = "no_bias"


class AlibiConfig(BiasConfig, kind="alibi"):
    """-slope_m |i - j|, with a fixed slope of each head (ALiBi).

    Press et al. 2022, "Train Short, Test Long", https://arxiv.org/abs/2108.12409, section 3: the
    slopes are 2^(-8 k / H), k = 1 to H, if H is a power of two. Otherwise they are those of the
    next lower power P, and then every second one of 2 P heads.
    """

    fast = "bias:Alibi"
    formula = "alibi"
    needs_self = "relates positions of one sequence"


class T5BiasConfig(BiasConfig, kind="t5"):
    """A learned number for each head and each bucket of distances.

    Raffel et al. 2020, https://arxiv.org/abs/1910.10683, section 2.1, and its released code. The
    buckets are exact for short distances and logarithmic up to `max_distance`. Every layer has its
    own table here; in T5 all layers share the first one.
    """

    fast = "bias:T5Bias"
    formula = "t5_bias"
    needs_self = "relates positions of one sequence"
    buckets: int = Field(32, ge=4, multiple_of=4, description="number of buckets of distances")
    max_distance: PositiveInt = Field(128, description="distance from which one bucket holds all")
    direction: Literal["both", "before"] = Field(
        "both",
        description="keys that have buckets; both: half of the buckets are for keys after the "
        "query, as in an encoder; before: all are for keys before it, as in a decoder",
    )

    def exempt_parameters(self) -> tuple[str, ...]:
        return ("table",)


class ForgettingConfig(BiasConfig, kind="forgetting"):
    """sum over t = j + 1 to i of log f_t, with the gate f_t = sigmoid(x_t w_m + b_m) of each head.

    Lin et al. 2025, "Forgetting Transformer", https://arxiv.org/abs/2503.02130, eq. 5-7. Without
    causal order the bias is the sum between both tokens. Tokens that are padding have f = 1.
    """

    fast = "bias:Forgetting"
    formula = "forgetting"
    needs_self = "relates positions of one sequence"
    start: float = Field(0.0, description="initial b_m: 0 gives gates near 1/2, 5 near 1")


class GateConfig(ChannelPart, Kind):
    """Family of the factors of the signal that enters the output projection W.

    Further projections of a residual part (W^l, W_p) have no gate. `build` returns a
    lit_attn.attention.gate.Gate. The inputs of `reference` are x (B, n, d) and the signal
    (B, n, H D); it returns the signal with its gates.
    """


class NoGateConfig(GateConfig, kind="none"):
    """No gate."""

    fast = "gate:NoGate"
    formula = "ungated"


class SigmoidGateConfig(GateConfig):
    """sigmoid(x W_g + b) from the layer's input (gated attention).

    Qiu et al. 2025, "Gated Attention for Large Language Models", https://arxiv.org/abs/2505.06708,
    section 2.2, position G1.
    """

    fast = "gate:SigmoidGate"
    formula = "sigmoid_gate"
    factor: PositiveFloat = Field(1.0, description="factor of the sigmoid; with 2, 0 opens to 1")
    columns: PositiveInt | None = Field(
        None, description="number of the first columns of x that the gate reads; null: all"
    )
    bias: float | None = Field(None, description="initial bias b; null: no bias")
    init: Literal["normal", "zeros"] = Field(
        "normal", description="initial W_g: normal with deviation 0.02, or zeros"
    )
    gates_of_head: ClassVar[Literal["D", "1"]]


class ElementGateConfig(SigmoidGateConfig, kind="element"):
    """One gate for each element of each head, as in Qwen3-Next."""

    gates_of_head = "D"


class HeadGateConfig(SigmoidGateConfig, kind="head"):
    """One gate for each head."""

    gates_of_head = "1"
