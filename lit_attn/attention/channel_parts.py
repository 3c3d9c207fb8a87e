"""Configuration classes of further families of parts, which the standard layer does not have.

- transform: maps of each head's q, k and v, before their norms and the cache.
- values: a mixture of a layer's values with those of the network's first layer.
- scale: a factor of all logits of a query.
- bias: a number that is added to the logit of each pair of tokens.
- pair: a combination of two queries of each head.
- filter: a map of the matrix of logits, in which other pairs of tokens count.
- gate: a factor of the signal that enters the output projection W.

This file imports no torch: modules and formulas are loaded at first use.

Notation: n tokens, width d, H heads of width D; x_i is the layer's input, s_ij are the logits.
"""

from typing import Any, ClassVar, Literal

from pydantic import Field, PositiveFloat, PositiveInt

from lit_attn.attention.parts import LayerChoices, Part
from lit_attn.schema.base import Kind, consistency_check, load
from lit_attn.schema.errors import find_nearest_divisor

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

    def with_order(self, is_causal: bool) -> "BiasConfig":
        """Return the bias for layers whose order is known, causal or not.

        A bias that follows the order of a call needs this where a mask alone has the order.
        """
        return self


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
    direction: Literal["by-order", "both", "before"] = Field(
        "by-order",
        description="keys that have buckets; both: half of the buckets are for keys after the "
        "query, as in an encoder; before: all are for keys before it, as in a decoder; by-order: "
        "before where attention is causal, otherwise both",
    )

    def with_order(self, is_causal: bool) -> BiasConfig:
        return self.model_copy(update={"direction": self.choose_direction(is_causal)})

    def choose_direction(self, is_causal: bool) -> str:
        """Return "both" or "before" for a call in causal order, or in none."""
        if self.direction != "by-order":
            return self.direction
        return "before" if is_causal else "both"

    def identity(self) -> dict[str, Any]:
        """Return the identity without `both`: the default before `by-order`.

        Without causal order both compute the same. In causal order the experiment names the order.
        """
        identity = dict(super().identity())
        if self.direction == "both":
            del identity["direction"]
        return identity

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


class FilterConfig(ChannelPart, Kind):
    """Family of the filters of the matrix of logits, whose numbers depend on other pairs of tokens.

    A filter follows a composition and the biases, and sees all queries at once, so the memory of a
    layer is O(n^2). `build` returns a lit_attn.attention.filters.Filter. The inputs of `reference`
    are the logits (B, H, n, n), `visible`, broadcastable to them, True where a query attends to a
    key, and `present` (B, H, n), False where a token is padding, or None. It returns the logits.
    """

    needs_row_terms: ClassVar[bool] = True
    """False if adding one number to all logits of a query leaves the weights unchanged."""

    def reference_weights(self, module: Any, weights: Any, visible: Any, present: Any) -> Any:
        """Return the filtered weights (B, H, n, n), unchanged by default."""
        return weights

    def reference_heads(self, module: Any, heads: Any) -> Any:
        """Return the heads' sums (B, H, n, D) after what follows the weighted sum of values."""
        return heads


class NoFilterConfig(FilterConfig, kind="none"):
    """Unchanged logits and weights."""

    fast = "filters:NoFilter"
    formula = "unfiltered"
    needs_row_terms = False


class ActiveFilterConfig(FilterConfig):
    """Filter that sees the logits of earlier queries."""

    needs_self = "orders the tokens of one sequence"

    def check(self, layer: LayerChoices) -> None:
        if layer.window:
            raise ValueError(
                f"window: filter '{self.kind}' needs the logits of all earlier tokens; "
                "remove the window or the filter"
            )


class SelectiveConfig(ActiveFilterConfig, kind="selective"):
    """s_ij minus the sum over u = j + 1 to i - 1 of max(s_uj, 0) of the first head (selective).

    Leviathan et al. 2024, "Selective Attention Improves Transformer",
    https://arxiv.org/abs/2410.02703, section 3. A token can ask later tokens to ignore a token
    before it, but not the first token, and not itself. The votes come from the logits that the
    normaliser would get. Without causal order, tokens vote on the tokens before them too.
    """

    fast = "filters:Selective"
    formula = "selective"


class MultiTokenConfig(ActiveFilterConfig, kind="multi-token"):
    """Convolutions of logits and of weights over queries and keys, with maps of the heads.

    Golovneva et al. 2025, "Multi-Token Attention", https://arxiv.org/abs/2504.00927, section 3, as
    in the released code: each head has a kernel over the last queries and the keys around a key; an
    H x H map mixes the heads' logits, and one map of each group of heads the weights; the heads
    then have an RMSNorm with shared weights and a gate sigmoid(h w + b). The paper multiplies the
    norm by a factor of the layer instead of the gate: `gate: false, rescale: depth`.
    """

    fast = "multi_token:MultiToken"
    formula = "multi_token_logits"
    queries: int = Field(6, ge=1, description="queries of a kernel: the query and those before it")
    keys: int = Field(11, ge=1, description="keys of a kernel, an odd number, around the key")
    group: PositiveInt | None = Field(
        None, description="heads whose weights are mixed with each other; null: all"
    )
    rescale: Literal["none", "depth"] = Field(
        "none",
        description="factor of the norm; depth: 0.2 + 0.6 exp(-0.3 l) in layer l, from 0",
    )
    gate: bool = Field(True, description="multiply each head by a gate from the head itself")

    @consistency_check
    def _has_a_middle_key(self) -> None:
        if self.keys % 2 == 0:
            raise ValueError(f"keys: {self.keys} keys have no middle; choose an odd number")

    def check_heads(self, heads: int) -> None:
        if self.group is not None and heads % self.group:
            raise ValueError(
                f"filter.group: groups of {self.group} heads do not divide {heads} heads; "
                f"the nearest that do have {find_nearest_divisor(self.group, heads)}"
            )

    def exempt_parameters(self) -> tuple[str, ...]:
        return ("logit_kernel", "weight_kernel", "logit_heads", "weight_heads")

    def reference_weights(self, module: Any, weights: Any, visible: Any, present: Any) -> Any:
        return load(f"{FORMULAS}:multi_token_weights")(module, weights, visible, present)

    def reference_heads(self, module: Any, heads: Any) -> Any:
        return load(f"{FORMULAS}:multi_token_heads")(module, heads)


class PairConfig(ChannelPart, Kind):
    """Family of the combinations of two queries of each head.

    `build` returns a lit_attn.attention.pairs.Pair. The inputs of `reference` are x (B, n, d) and
    the sums or weights of all queries, (B, Q H, n, E); it returns those of the heads, (B, H, n, E).
    """

    queries: ClassVar[int] = 1
    """Number of queries of each head, Q."""

    def reference_queries(self, module: Any, x: Any, q: Any) -> Any:
        """Return the queries (B, n, Q H, D) of x, from those of the layer, q (B, n, H, D)."""
        return q


class OneQueryConfig(PairConfig, kind="none"):
    """One query of each head."""

    fast = "pairs:OneQuery"
    formula = "one_query"


class DifferenceConfig(PairConfig, kind="difference"):
    """h_2m - sigmoid(x w_m) h_2m+1 for two queries of head m (differential attention, version 2).

    Microsoft 2026, "Differential Transformer V2", released code in microsoft/unilm,
    Diff-Transformer-V2. Both queries use the key and the value of the head. Nothing follows the
    difference: no norm, and no lambda_init. The second queries have a projection of their own here,
    so that the weights of a standard layer fit; in the released code they are rows of W_Q.
    """

    fast = "pairs:Difference"
    formula = "difference"
    queries = 2

    def reference_queries(self, module: Any, x: Any, q: Any) -> Any:
        return load(f"{FORMULAS}:two_queries")(module, x, q)

    def check(self, layer: LayerChoices) -> None:
        if layer.normaliser.kind == "differential":
            raise ValueError(
                "pair: 'difference' and `normaliser: differential` both subtract heads; remove one"
            )
