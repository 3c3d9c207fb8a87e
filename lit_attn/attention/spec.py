"""Specification of an attention layer, and the presets named after papers (presets.yaml).

A layer is a product of independent choices (docs/design.md, section 2), one part of every family in
lit_attn.attention.parts:

    x -> transform (q, k, v) -> similarity (logits) -> scale -> compose (heads) -> bias
      -> normaliser (weights) -> compose (heads) -> weighted sum of V -> residual -> gate -> + x
"""

from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import Field, PositiveInt, ValidationError, field_validator, model_validator

# Importing these modules registers the members of the families.
from lit_attn.attention import channel_parts, mixture_parts, parts
from lit_attn.schema.base import Config, Kind, consistency_check
from lit_attn.schema.errors import explain, find_nearest_divisor, key_error, suggest

MEMBERS = (parts, mixture_parts, channel_parts)
"""Modules with the parts of this package."""


class AttentionSpec(Config):
    """Specification of an attention layer: one part of every family.

    In YAML it is a preset's name, a mapping of parts, or `{preset: NAME, ...}` with the parts that
    differ from the preset.
    """

    similarity: parts.SimilarityConfig = Field(parts.DotConfig(), description="logits of a head")
    zz: bool | Literal["like-k"] = Field(
        False,
        description="add z_i.z_j / sqrt(D) to the logits, z = x W_Z (Belief2 11); `like-k`: z is "
        "normalised and rotated wherever k is",
    )
    compose: parts.ComposeConfig = Field(
        parts.NoComposeConfig(), description="mixing of the heads before and after the normaliser"
    )
    normaliser: parts.NormaliserConfig = Field(
        parts.SoftmaxConfig(), description="function that turns the logits into weights"
    )
    residual: parts.ResidualConfig = Field(
        parts.FullConfig(),
        description="part that goes through the output projection to the skip connection",
    )
    transform: channel_parts.TransformConfig = Field(
        channel_parts.NoTransformConfig(), description="maps of each head's q, k and v"
    )
    scale: channel_parts.ScaleConfig = Field(
        channel_parts.NoScaleConfig(), description="factor of all logits of a query"
    )
    bias: channel_parts.BiasConfig = Field(
        channel_parts.NoBiasConfig(), description="number added to the logit of a pair of tokens"
    )
    gate: channel_parts.GateConfig = Field(
        channel_parts.NoGateConfig(), description="factor of the output projection's input"
    )
    window: PositiveInt | None = Field(
        None,
        description="keys that a query sees up to its token; without causal mask as many after it",
    )
    kv_heads: PositiveInt | None = Field(
        None, description="heads of keys and values, shared by groups of query heads"
    )

    @property
    def parts(self) -> dict[str, parts.Part]:
        """Chosen member of each family, by the family's key."""
        members = {name: getattr(self, name) for name in type(self).model_fields}
        return {name: member for name, member in members.items() if isinstance(member, parts.Part)}

    def find_cross_problem(self) -> str:
        """Return why cross-attention has no such layer, beginning with a key, or an empty text."""
        problems = []
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

    def check_heads(self, heads: int) -> None:
        """Raise ValueError, which begins with a key, if a layer of `heads` heads is impossible."""
        if self.kv_heads is not None and heads % self.kv_heads:
            raise ValueError(
                f"kv_heads: {self.kv_heads} key heads do not divide {heads} heads; "
                f"the nearest that do are {find_nearest_divisor(self.kv_heads, heads)}"
            )
        for part in self.parts.values():
            part.check_heads(heads)

    @consistency_check
    def _makes_sense(self) -> None:
        for family, part in self.parts.items():
            if not part.fast and type(part).build is parts.Part.build:
                raise ValueError(
                    f"{family}: '{part.kind}' cannot be built: "
                    f"its class {type(part).__name__} needs a method `build(self, shape)` "
                    "that returns a torch module (docs/adding-a-part.md)"
                )
            part.check(self)

    @model_validator(mode="before")
    @classmethod
    def _expand_preset(cls, value: Any) -> Any:
        """Replace a preset's name by its parts; a mapping without another kind refines a part."""
        choices = {"preset": value} if isinstance(value, str) else value
        if not isinstance(choices, dict | AttentionSpec):
            raise ValueError(f"needs a preset's name or a mapping, not {value}")
        if isinstance(choices, AttentionSpec):
            return choices
        for key in choices:
            if key != "preset" and key not in cls.model_fields:
                nearest = suggest(str(key), ["preset", *cls.model_fields])
                raise key_error(key, f"unknown key '{key}'{nearest}")
        if "preset" not in choices:
            return choices
        name = str(choices["preset"])
        if name not in PRESETS:
            raise ValueError(f"'{name}' is not a preset{suggest(name, PRESETS)}")
        parts: dict[str, Any] = dict(PRESETS[name])
        for key, change in choices.items():
            if key != "preset":
                parts[key] = _change_part(parts[key], change)
        return parts

    @field_validator("zz", mode="before")
    @classmethod
    def _with_or_without(cls, value: Any) -> Any:
        """Return the truth value of the words that an axis `zz` of a study may use."""
        if value == "with":
            return True
        if value == "without":
            return False
        return value


def _change_part(part: Any, change: Any) -> Any:
    """Return a preset's part with `change`: a mapping of the same kind refines it."""
    if not isinstance(part, Kind) or not isinstance(change, dict):
        return change
    if change.get("kind", part.kind) != part.kind:
        return change
    return part.model_dump() | change


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
