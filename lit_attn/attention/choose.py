"""Choice of an attention layer in Python: a preset's name, or a mapping as in YAML."""

from typing import Any

from pydantic import ValidationError

from lit_attn.attention.spec import AttentionSpec, preset
from lit_attn.schema.base import Kind
from lit_attn.schema.errors import ConfigError, explain, suggest

# Keys of the mapping that `attention:` can be.
CHOICES = ("preset", *AttentionSpec.model_fields)


def attention_spec(choice: AttentionSpec | str | dict[str, Any], caller: str) -> AttentionSpec:
    """Return the specification that `attention:` with the value `choice` describes in YAML.

    Raises ConfigError, which begins with `caller`, for a value that YAML could not contain either.
    """
    context = f"{caller}: attention"
    match choice:
        case AttentionSpec():
            return choice
        case str():
            choice = {"preset": choice}
        case dict():
            pass
        case _:
            raise ConfigError(f"{context}: needs a preset's name or a mapping, not {choice!r}")
    for key in choice:
        if key not in CHOICES:
            raise ConfigError(f"{context}: unknown key '{key}'{suggest(str(key), CHOICES)}")
    try:
        parts: dict[str, Any] = dict(preset(str(choice.get("preset", "standard"))))
    except ValueError as error:
        raise ConfigError(f"{context}: {error}") from error
    for key, change in choice.items():
        if key != "preset":
            parts[key] = _refine(parts[key], change)
    try:
        return AttentionSpec.model_validate(parts)
    except ValidationError as error:
        raise explain(error, context) from error


def _refine(part: Any, change: Any) -> Any:
    """Return `part` with the values of `change`; a change with another kind replaces the part."""
    is_part = isinstance(part, Kind) and isinstance(change, dict)
    if is_part and change.get("kind", part.kind) == part.kind:
        return part.model_dump() | change
    return change
