"""Specification of an attention layer, and the presets named after papers (presets.yaml).

A layer is a product of independent choices (docs/design.md, section 2), one part of every family
(lit_attn.attention.layer_spec).

The layers of a model can differ: `layers` has a mechanism for each layer, or rules
(docs/layers.md).
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import (
    Field,
    GetJsonSchemaHandler,
    PositiveInt,
    ValidationError,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from lit_attn.attention import block_choice, linear, mixture, multi_token
from lit_attn.attention.layer_spec import LayerSpec, MixerConfig
from lit_attn.schema.base import Config, Kind, consistency_check
from lit_attn.schema.errors import (
    explain,
    key_error,
    plural,
    suggest,
)
from lit_attn.schema.yaml_text import parse_plain

MEMBERS = (block_choice, linear, mixture, multi_token)
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


def require_layers(key: str, number: int, depth: int) -> None:
    """Raise ValueError, which begins with `key`, if a model of `depth` layers has fewer."""
    if number > depth:
        raise ValueError(f"{key}: {number} exceeds the {depth} layers of the model")


class AttentionSpec(LayerSpec):
    """Specification of an attention layer: one part of every family.

    In YAML it is a preset's name, a mapping of parts, or `{preset: NAME, ...}` with the parts that
    differ from the preset.
    """

    layers: tuple[LayerRule, ...] | None = Field(
        None,
        description="mechanisms of layers that differ: one for each layer, or rules such as "
        "`{last: 3, use: xsa}`, of which the last one that names a layer counts; "
        "null: all layers are equal",
    )

    @property
    def needs_foreign_code(self) -> bool:
        rules = self.layers or ()
        return super().needs_foreign_code or any(rule.needs_foreign_code for rule in rules)

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
        a layer cannot read the values of the first one or the keys of the one before.
        """
        specs = self._choose_layers(depth)
        for number, spec in enumerate(specs):
            _check_first_values(specs[0], spec, number)
        check_shared_keys(specs)
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


def check_shared_keys(specs: Sequence[AttentionSpec]) -> None:
    """Raise ValueError if a layer cannot have the keys and values of the layer before it."""
    source: AttentionSpec | None = None
    for number, spec in enumerate(specs, 1):
        if not spec.shares_keys:
            source = spec
            continue
        start = f"layers: layer {number} has `kv_from: previous`, and"
        if source is None:
            raise ValueError(f"{start} no layer before it has keys; set `kv_from: own` in layer 1")
        if source.mixer is not None:
            raise ValueError(
                f"{start} the layer before it is of `kind: module` and has no keys; "
                "choose attention for that layer"
            )
        if source.latent is not None:
            raise ValueError(
                f"{start} the layer before it has a latent; remove `latent` from that layer"
            )
        use = source.similarity.find_own_keys_use()
        if use:
            raise ValueError(
                f"{start} similarity '{source.similarity.kind}' of the layer before it {use}; "
                "choose a similarity with one key for that layer"
            )
        for key in ("kv_heads", "window"):
            if getattr(source, key) != getattr(spec, key):
                raise ValueError(
                    f"{start} the layer before it has another `{key}`; set the same for both"
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
    for key in others:
        if key not in AttentionSpec.model_fields:
            raise key_error(key, f"unknown key '{key}'{suggest(key, ('import', 'arguments'))}")
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

_CHOICES = parse_plain(Path(__file__).with_name("presets.yaml").read_text("utf-8"), "presets.yaml")
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
