"""Specification of an attention layer, and the presets named after papers (presets.yaml).

A layer is a product of independent choices (docs/design.md, section 2), one part of every family in
lit_attn/attention:

    x -> transform (q, k, v) -> convolution -> similarity (logits) -> scale -> compose (heads)
      -> bias -> normaliser (weights) -> compose (heads) -> weighted sum of V -> residual -> gate
      -> + x

The layers of a model can differ: `layers` has a mechanism for each layer, or rules
(docs/mixers.md).
"""

from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import (
    Field,
    GetJsonSchemaHandler,
    PositiveInt,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from lit_attn.attention import linear, mixture, multi_token
from lit_attn.attention.bias import BiasConfig, NoBiasConfig
from lit_attn.attention.compose import ComposeConfig, NoComposeConfig
from lit_attn.attention.convolution import ConvolutionConfig, NoConvolutionConfig
from lit_attn.attention.filters import FilterConfig, NoFilterConfig
from lit_attn.attention.first_values import OwnValuesConfig, ValuesConfig
from lit_attn.attention.gate import GateConfig, NoGateConfig
from lit_attn.attention.mixer import MixerConfig
from lit_attn.attention.normaliser import NormaliserConfig, SoftmaxConfig
from lit_attn.attention.pairs import OneQueryConfig, PairConfig
from lit_attn.attention.parts import Part
from lit_attn.attention.residual import FullConfig, ResidualConfig
from lit_attn.attention.scale import NoScaleConfig, ScaleConfig
from lit_attn.attention.similarity import DotConfig, SimilarityConfig
from lit_attn.attention.transform import NoTransformConfig, TransformConfig
from lit_attn.schema.base import Config, Kind, consistency_check
from lit_attn.schema.errors import (
    explain,
    find_nearest_divisor,
    key_error,
    plural,
    suggest,
)
from lit_attn.schema.trust import find_code

MEMBERS = (linear, mixture, multi_token)
"""Modules whose import registers further members of the families."""


class LayerRule(Config):
    """Layers of a model, and the mechanism that they have instead of that of `attention`.

    In YAML it is a mapping such as `{last: 3, use: xsa}`. Without `first`, `last` and `every` it is
    the mechanism of one layer; then `xsa` alone stands for `{use: xsa}`.
    """

    first: PositiveInt | None = Field(None, description="number of layers at the start")
    last: PositiveInt | None = Field(None, description="number of layers at the end")
    every: PositiveInt | None = Field(
        None, description="n: every n-th layer, which are layers n, 2 n, 3 n, ..., counted from 1"
    )
    start: PositiveInt | None = Field(
        None, description="first layer of `every`, counted from 1; null: layer n"
    )
    use: "AttentionSpec" = Field(
        description="mechanism of these layers: a preset, or parts that differ from `attention`"
    )

    @property
    def is_single(self) -> bool:
        """True for the mechanism of one layer, in a list with one for each layer."""
        return self.first is None and self.last is None and self.every is None

    def choose_layers(self, depth: int) -> range:
        """Return the indices, from 0, of the layers of a model with `depth` layers.

        Raises ValueError, which begins with a key, if the model has too few layers.
        """
        if self.first is not None:
            require_layers("first", self.first, depth)
            return range(self.first)
        if self.last is not None:
            require_layers("last", self.last, depth)
            return range(depth - self.last, depth)
        assert self.every is not None
        key = "every" if self.start is None else "start"
        start = self.start or self.every
        require_layers(key, start, depth)
        return range(start - 1, depth, self.every)

    @consistency_check
    def _makes_sense(self) -> None:
        """Refuse two choices of layers in one rule, and layers that have layers."""
        keys = [key for key in ("first", "last", "every") if getattr(self, key) is not None]
        if len(keys) > 1:
            raise ValueError(f"{keys[1]}: a rule has one of first, last and every; write two rules")
        if self.start is not None and self.every is None:
            raise ValueError("start: is the first layer of `every`, which this rule does not have")
        if self.use.layers is not None:
            raise ValueError("use: is the mechanism of one layer and cannot have `layers`")

    @classmethod
    def name_code(cls, written: dict[Any, Any]) -> dict[str, Any]:
        """Return the code that a mechanism without the key `use` names, in it and in its parts."""
        return {} if "use" in written else find_code(AttentionSpec, written)


def require_layers(key: str, number: int, depth: int) -> None:
    """Raise ValueError, which begins with `key`, if a model of `depth` layers has fewer."""
    if number > depth:
        raise ValueError(f"{key}: {number} exceeds the {depth} layers of the model")


class AttentionSpec(Config):
    """Specification of an attention layer: one part of every family.

    In YAML it is a preset's name, a mapping of parts, or `{preset: NAME, ...}` with the parts that
    differ from the preset.
    """

    similarity: SimilarityConfig = Field(DotConfig(), description="logits of a head")
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
    mixer: MixerConfig | None = Field(
        None,
        description="layer of yours instead of attention, written as "
        "`attention: {kind: module, import: CLASS, arguments: {...}}`",
    )
    layers: tuple[LayerRule, ...] | None = Field(
        None,
        description="mechanisms of layers that differ: one for each layer, or rules such as "
        "`{last: 3, use: xsa}`, of which the last one that names a layer counts; "
        "null: all layers are equal",
    )

    @property
    def parts(self) -> dict[str, Part]:
        """Chosen member of each family, by the family's key."""
        members = {name: getattr(self, name) for name in type(self).model_fields}
        return {name: member for name, member in members.items() if isinstance(member, Part)}

    @property
    def needs_foreign_code(self) -> bool:
        rules = self.layers or ()
        return super().needs_foreign_code or any(rule.needs_foreign_code for rule in rules)

    @classmethod
    def name_code(cls, written: dict[Any, Any]) -> dict[str, Any]:
        """Return the class of a layer that is written as `{kind: module, import: CLASS}`."""
        return MixerConfig.name_code(written)

    @property
    def mechanisms(self) -> "tuple[AttentionSpec, ...]":
        """Specifications that layers of a model can have, each without `layers`."""
        if self.layers is None:
            return (self,)
        rules = tuple(rule.use for rule in self.layers)
        if self.layers[0].is_single:
            return rules
        return (self.model_copy(update={"layers": None}), *rules)

    def by_layer(self, depth: int) -> "tuple[AttentionSpec, ...]":
        """Return the specification of each of the `depth` layers of a model.

        Raises ValueError, which begins with `layers`, if it is for another number of layers, or if
        a layer cannot read the values of the first one.
        """
        specs = self._choose_layers(depth)
        for number, spec in enumerate(specs):
            _check_first_values(specs[0], spec, number)
        return specs

    def _choose_layers(self, depth: int) -> "tuple[AttentionSpec, ...]":
        """Return the specification of each layer by the list or the rules of `layers`."""
        if self.layers is None:
            return (self,) * depth
        if self.layers[0].is_single:
            if len(self.layers) != depth:
                raise ValueError(
                    f"layers: {plural(len(self.layers), 'mechanism')} for a model of "
                    f"{plural(depth, 'layer')}; write one for each layer, or a rule such as "
                    "{last: 1, use: xsa}"
                )
            return self.mechanisms
        specs = [self.mechanisms[0]] * depth
        for number, rule in enumerate(self.layers):
            try:
                chosen = rule.choose_layers(depth)
            except ValueError as error:
                raise ValueError(f"layers.{number}.{error}") from error
            for layer in chosen:
                specs[layer] = rule.use
        return tuple(specs)

    def with_order(self, is_causal: bool) -> "AttentionSpec":
        """Return the specification for layers whose order is known, causal or not."""
        bias = self.bias.with_order(is_causal)
        return self if bias == self.bias else self.model_copy(update={"bias": bias})

    @property
    def follows_order(self) -> bool:
        """True if a layer without `layers` computes another bias in causal order."""
        return self.with_order(True) != self.with_order(False)

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

    @consistency_check
    def _layers_are_of_one_form(self) -> None:
        """Refuse an empty list, and a list of rules and of mechanisms for single layers."""
        if self.layers is None:
            return
        forms = {rule.is_single for rule in self.layers}
        if not forms:
            raise ValueError("layers: is empty; write a mechanism for each layer, or a rule")
        if len(forms) == 2:
            raise ValueError(
                "layers: has rules (first, last, every) and mechanisms of single layers; "
                "write one of both forms"
            )
        self._require_different_layers()

    def _require_different_layers(self) -> None:
        """Refuse rules that give every layer of every model one mechanism."""
        rules = self.layers or ()
        if not rules or rules[0].is_single:
            return
        uses = {rule.use for rule in rules}
        if rules[-1].every == 1 and rules[-1].start in (None, 1):
            raise ValueError(
                "layers: the last rule names all layers; write its `use` as `attention`"
            )
        if uses == {self.mechanisms[0]}:
            raise ValueError(
                "layers: the rules have the mechanism of the other layers; remove `layers`"
            )

    @model_validator(mode="before")
    @classmethod
    def _expand_preset(cls, value: Any) -> Any:
        """Replace a preset's name by its parts; a mapping without another kind refines a part."""
        choices = {"preset": value} if isinstance(value, str) else value
        if not isinstance(choices, dict | AttentionSpec):
            raise ValueError(f"needs a preset's name or a mapping, not {value}")
        if isinstance(choices, AttentionSpec):
            return choices
        if "kind" in choices:
            choices = _read_mixer(choices)
        for key in choices:
            if key != "preset" and key not in cls.model_fields:
                nearest = suggest(str(key), ["preset", *cls.model_fields])
                raise key_error(key, f"unknown key '{key}'{nearest}")
        if "preset" not in choices:
            return _complete_layers(choices)
        name = str(choices["preset"])
        if name not in PRESETS:
            raise ValueError(f"'{name}' is not a preset{suggest(name, PRESETS)}")
        parts: dict[str, Any] = dict(PRESETS[name])
        for key, change in choices.items():
            if key != "preset":
                parts[key] = _change_part(parts[key], change)
        return _complete_layers(parts)

    @classmethod
    def __get_pydantic_json_schema__(
        cls, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        """Return the JSON schema of a preset's name, of parts, and of a layer of `kind: module`."""
        mapping = handler(schema)
        properties = handler.resolve_ref_schema(mapping)["properties"]
        names = {"enum": sorted(PRESETS)}
        properties["preset"] = {**names, "description": "preset that the other keys refine"}
        properties["kind"] = {"const": "module"}
        mixer = handler(MixerConfig.__pydantic_core_schema__)
        properties |= handler.resolve_ref_schema(mixer)["properties"]
        # A layer can be written by the name of a preset, as parts, or as a rule.
        properties["layers"] = {"description": properties["layers"]["description"]}
        return {"anyOf": [names, mapping]}

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


def _check_first_values(first: AttentionSpec, spec: AttentionSpec, number: int) -> None:
    """Raise ValueError if layer `number`, from 0, cannot mix values with those of the first."""
    if not spec.values.reads_first:
        return
    if first.mixer is not None:
        raise ValueError(
            f"layers: layer {number + 1} mixes its values with those of the first layer, which is "
            "of `kind: module` and has none; choose attention for the first layer"
        )
    if first.kv_heads != spec.kv_heads:
        raise ValueError(
            f"layers: layer {number + 1} mixes its values with those of the first layer, which has "
            "another number of key heads; set the same `kv_heads` for both"
        )


def _change_part(part: Any, change: Any) -> Any:
    """Return a preset's part with `change`: a mapping of the same kind refines it."""
    if not isinstance(part, Kind) or not isinstance(change, dict):
        return change
    if change.get("kind", part.kind) != part.kind:
        return change
    return part.model_dump() | change


def _read_mixer(choices: dict[str, Any]) -> dict[str, Any]:
    """Return the choices with the layer of `kind: module` as the value of `mixer`."""
    if choices["kind"] != "module":
        raise key_error(
            "kind",
            f"unknown kind '{choices['kind']}'; `kind: module` is a layer of yours, and attention "
            "has a preset or parts",
        )
    names = ("import", "target", "arguments")
    mixer = {key: choice for key, choice in choices.items() if key in names}
    others = {key: choice for key, choice in choices.items() if key not in (*names, "kind")}
    return others | {"mixer": mixer}


def _complete_layers(choices: dict[str, Any]) -> dict[str, Any]:
    """Return the choices of a specification with complete mechanisms in its `layers`."""
    written = choices.get("layers")
    if written is None:
        return choices
    shared = {key: choice for key, choice in choices.items() if key != "layers"}
    try:
        base = AttentionSpec.model_validate(shared)
    except ValidationError:
        # The validation of these choices follows, and it reports the mistake with its key.
        return shared
    rules = written if isinstance(written, list | tuple) else [written]
    return choices | {"layers": [_complete_rule(base, rule) for rule in rules]}


def _complete_rule(base: AttentionSpec, written: Any) -> Any:
    """Return a rule as written, with a mapping of parts completed by those of `base`."""
    if isinstance(written, LayerRule):
        return written
    is_rule = isinstance(written, dict) and not RULE_KEYS.isdisjoint(written)
    rule = dict(written) if is_rule else {"use": written}
    use = rule.get("use")
    if isinstance(use, dict) and "preset" not in use and "kind" not in use:
        parts: dict[str, Any] = dict(base)
        for key, change in use.items():
            parts[key] = _change_part(parts.get(key), change)
        rule["use"] = parts
    return rule


RULE_KEYS = {"first", "last", "every", "start", "use"}
"""Keys of a rule, by which it differs from the mechanism of a layer."""

LayerRule.model_rebuild()
AttentionSpec.model_rebuild(force=True)

_CHOICES = yaml.safe_load(Path(__file__).with_name("presets.yaml").read_text("utf-8"))
PRESETS = {name: AttentionSpec.model_validate(parts) for name, parts in _CHOICES.items()}
"""Specifications by the name of the preset."""


def attention_spec(choice: AttentionSpec | str | dict[str, Any], caller: str) -> AttentionSpec:
    """Return the specification that `attention:` with the value `choice` describes in YAML.

    Raises ConfigError, which begins with `caller`, for a value that YAML could not contain either.
    """
    try:
        return AttentionSpec.model_validate(choice)
    except ValidationError as error:
        raise explain(error, f"{caller}: attention") from error
