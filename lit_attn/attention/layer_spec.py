"""Specification of one attention layer: one part of every family.

    x -> transform (q, k, v) -> convolution -> similarity (logits) -> scale -> compose (heads)
      -> bias -> normaliser (weights) -> compose (heads) -> weighted sum of V -> residual -> gate
      -> + x

lit_attn.attention.spec adds the presets, and the layers of a model that differ.
"""

from typing import Any, Literal, Self

from pydantic import Field, PositiveInt, field_validator

from lit_attn.attention.bias import BiasConfig, NoBiasConfig
from lit_attn.attention.compose import ComposeConfig, NoComposeConfig
from lit_attn.attention.convolution import ConvolutionConfig, NoConvolutionConfig
from lit_attn.attention.filters import FilterConfig, NoFilterConfig
from lit_attn.attention.first_values import OwnValuesConfig, ValuesConfig
from lit_attn.attention.gate import GateConfig, NoGateConfig
from lit_attn.attention.latent import LatentConfig
from lit_attn.attention.normaliser import NormaliserConfig, SoftmaxConfig
from lit_attn.attention.pairs import OneQueryConfig, PairConfig
from lit_attn.attention.parts import Part
from lit_attn.attention.residual import FullConfig, ResidualConfig
from lit_attn.attention.scale import NoScaleConfig, ScaleConfig
from lit_attn.attention.similarity import DotConfig, SimilarityConfig
from lit_attn.attention.transform import NoTransformConfig, TransformConfig
from lit_attn.schema.base import Config, OwnClass, consistency_check
from lit_attn.schema.errors import ConfigError, find_nearest_divisor


class MixerConfig(OwnClass):
    """Layer of yours that maps tokens (B, n, d) to tokens (B, n, d) (docs/mixers.md).

    The class is called with the width, the number of heads, and `arguments`.
    """

    base_class = "torch.nn:Module"

    @property
    def needs_foreign_code(self) -> bool:
        return True

    @property
    def needs_gpu(self) -> bool:
        """True if the class has the attribute `needs_gpu = True`."""
        try:
            return bool(getattr(self.load(), "needs_gpu", False))
        except ConfigError:
            # The trial of the layer reports a class that cannot be imported.
            return False

    def __hash__(self) -> int:
        # The arguments are a dictionary, which has no hash.
        return hash(self.identity_json())


class LayerSpec(Config):
    """Specification of one attention layer: one part of every family."""

    similarity: SimilarityConfig = Field(DotConfig(), description="logits of a head")
    # zz is no kind of similarity, because it adds to the logits of any softmax similarity.
    zz: bool | Literal["like-k"] = Field(
        False,
        description="add z_i.z_j / sqrt(D) to the logits, z = x W_Z (Belief2 11); `like-k`: z is "
        "normalised and rotated wherever k is",
    )
    compose: ComposeConfig = Field(
        NoComposeConfig(), description="mixing of the heads before and after the normaliser"
    )
    normaliser: NormaliserConfig = Field(
        SoftmaxConfig(), description="function that turns the logits into weights"
    )
    residual: ResidualConfig = Field(
        FullConfig(),
        description="part that goes through the output projection to the skip connection",
    )
    transform: TransformConfig = Field(
        NoTransformConfig(), description="maps of each head's q, k and v"
    )
    convolution: ConvolutionConfig = Field(
        NoConvolutionConfig(),
        description="convolution over neighbouring tokens, of q, k and v or of the output",
    )
    values: ValuesConfig = Field(
        OwnValuesConfig(),
        description="mixture of the layer's values with those of the network's first layer",
    )
    scale: ScaleConfig = Field(NoScaleConfig(), description="factor of all logits of a query")
    bias: BiasConfig = Field(
        NoBiasConfig(), description="number added to the logit of a pair of tokens"
    )
    pair: PairConfig = Field(
        OneQueryConfig(), description="combination of two queries of each head"
    )
    filter: FilterConfig = Field(
        NoFilterConfig(),
        description="map of the matrix of logits, in which other pairs of tokens count",
    )
    gate: GateConfig = Field(NoGateConfig(), description="factor of the output projection's input")
    window: PositiveInt | None = Field(
        None,
        description="keys that a query sees up to its token; without causal mask as many after it",
    )
    kv_heads: PositiveInt | None = Field(
        None, description="heads of keys and values, shared by groups of query heads"
    )
    kv_from: Literal["own", "previous"] = Field(
        "own",
        description="layer that computes keys and values; previous: the nearest layer before with "
        "`own`, so that this layer projects queries alone (cross-layer attention)",
    )
    latent: LatentConfig | None = Field(
        None,
        description="latents from which all heads have their keys and values, for a small cache "
        "(MLA); null: a projection for each",
    )
    mixer: MixerConfig | None = Field(
        None,
        description="layer of yours instead of attention, written as "
        "`attention: {kind: module, import: CLASS, arguments: {...}}`",
    )

    @property
    def parts(self) -> dict[str, Part]:
        """Chosen member of each family, by the family's key."""
        members = {name: getattr(self, name) for name in type(self).model_fields}
        return {name: member for name, member in members.items() if isinstance(member, Part)}

    def with_order(self, is_causal: bool) -> Self:
        """Return the specification for layers whose order is known, causal or not."""
        bias = self.bias.with_order(is_causal)
        return self if bias == self.bias else self.model_copy(update={"bias": bias})

    @property
    def follows_order(self) -> bool:
        """True if a layer without `layers` computes another bias in causal order."""
        return self.with_order(True) != self.with_order(False)

    @property
    def shares_keys(self) -> bool:
        """True for a layer with the keys and values of an earlier layer."""
        return self.kv_from == "previous"

    @property
    def needs_row_terms(self) -> bool:
        """True if adding one number to all logits of a query changes the output of the layer."""
        is_mixed = "pre" in self.compose.places() or self.filter.needs_row_terms
        return is_mixed or not self.normaliser.ignores_row_terms

    def find_cross_problem(self) -> str:
        """Return why cross-attention has no such layer, beginning with a key, or an empty text."""
        problems = []
        if self.mixer is not None:
            problems.append("kind: 'module' mixes the tokens of one sequence")
        for family, part in self.parts.items():
            if part.needs_self:
                problems.append(f"{family}: '{part.kind}' {part.needs_self}")
        if self.zz:
            problems.append("zz: relates two tokens of one sequence")
        if self.window:
            problems.append("window: is a distance within one sequence")
        if self.shares_keys:
            problems.append("kv_from: 'previous' reads keys of the sequence's earlier layer")
        if self.latent is not None:
            problems.append("latent: stands for the tokens of one sequence")
        if not problems:
            return ""
        return (
            f"{problems[0]}, which cross-attention does not have; "
            "set `cross_attention`, for example to standard"
        )

    def find_document_problem(self) -> str:
        """Return why masks cannot separate packed documents, beginning with a key, or ""."""
        if self.mixer is not None:
            return "kind: 'module' mixes the tokens of one sequence"
        for family, part in self.parts.items():
            problem = part.find_document_problem()
            if problem:
                return f"{family}: '{part.kind}' {problem}"
        return ""

    def check_heads(self, heads: int) -> None:
        """Raise ValueError, which begins with a key, if a layer of `heads` heads is impossible."""
        if self.kv_heads is not None and heads % self.kv_heads:
            raise ValueError(
                f"kv_heads: {self.kv_heads} key heads do not divide {heads} heads; "
                f"the nearest that do are {find_nearest_divisor(self.kv_heads, heads)}"
            )
        for part in self.parts.values():
            part.check_heads(self.pair.queries * heads)

    @consistency_check
    def _makes_sense(self) -> None:
        for family, part in self.parts.items():
            if type(part).build is Part.build:
                raise ValueError(
                    f"{family}: '{part.kind}' cannot be built: "
                    f"its class {type(part).__name__} needs a method `build(self, shape)` "
                    "that returns a torch module (docs/adding-a-part.md)"
                )
            part.check(self)

    @consistency_check
    def _parts_need_no_own_keys(self) -> None:
        """Refuse parts that act on keys or values in a layer that projects none."""
        if not self.shares_keys:
            return
        if self.latent is not None:
            raise ValueError(
                "latent: computes keys and values, and a layer with `kv_from: previous` has none "
                "of its own; remove one of both"
            )
        for family, part in self.parts.items():
            use = part.find_own_keys_use()
            if use:
                raise ValueError(
                    f"kv_from: 'previous' leaves this layer without keys and values of its own, "
                    f"and {family} '{part.kind}' {use}; remove one of both"
                )

    @consistency_check
    def _parts_suit_a_latent(self) -> None:
        """Refuse parts that act on keys or values, or need others than those of a latent."""
        if self.latent is None:
            return
        uses = {family: part.find_own_keys_use() for family, part in self.parts.items()}
        if self.pair.queries > 1:
            uses["pair"] = "projects queries of the width of a head"
        if not self.similarity.has_logits:
            uses["similarity"] = "forms no logits"
        for family, use in uses.items():
            if use:
                raise ValueError(
                    f"latent: all heads have keys from one latent, and {family} "
                    f"'{self.parts[family].kind}' {use}; remove one of both"
                )
        if self.zz:
            raise ValueError(
                "latent: queries and keys have a further part, and zz has no definition with it; "
                "remove one of both"
            )

    @consistency_check
    def _mixer_has_no_parts(self) -> None:
        """Refuse parts of attention beside a layer of a user."""
        if self.mixer is None:
            return
        for name, field in type(self).model_fields.items():
            is_part = name not in ("mixer", "layers")
            if is_part and getattr(self, name) != field.default:
                raise ValueError(
                    f"{name}: is a part of attention, and a layer of `kind: module` has none; "
                    "its options are `arguments`"
                )

    @field_validator(
        "zz", mode="before", json_schema_input_type=bool | Literal["like-k", "with", "without"]
    )
    @classmethod
    def _with_or_without(cls, value: Any) -> Any:
        """Return the truth value of the words that an axis `zz` of a study may use."""
        if value == "with":
            return True
        if value == "without":
            return False
        return value
