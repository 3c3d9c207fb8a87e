"""Base class of the model configurations, and what they share."""

from typing import Any, ClassVar, Literal

from pydantic import Field, PositiveInt, field_validator

from lit_attn.attention.spec import AttentionSpec
from lit_attn.schema.base import Config, Kind
from lit_attn.schema.errors import find_nearest_divisor, suggest


class FFN(Config):
    """The feed-forward network of a block: Linear, activation, Linear.

    `gelu-tanh` is GELU by its tanh approximation; `swiglu` gates: down(silu(gate(x)) * up(x)).
    """

    width: PositiveInt = Field(description="hidden units; what `match: parameters` solves for")
    activation: Literal["gelu", "gelu-tanh", "relu", "hard-swish", "swiglu"] = "gelu"


class Model(Kind):
    """A network with attention layers. `ffn: none` drops the FFN together with its norm."""

    activations: ClassVar[tuple[str, ...]] = ("gelu",)

    attention: AttentionSpec = AttentionSpec()
    ffn: FFN | None

    @field_validator("ffn")
    @classmethod
    def _activation_it_has(cls, ffn: FFN | None) -> FFN | None:
        if ffn and ffn.activation not in cls.activations:
            hint = suggest(ffn.activation, cls.activations)
            raise ValueError(f"this model has no '{ffn.activation}' activation{hint}")
        return ffn

    @field_validator("ffn", mode="before")
    @classmethod
    def _none(cls, value: Any) -> Any:
        return None if value == "none" else value


def require_division(key: str, what: str, number: int, whole: int, of: str) -> None:
    """ValueError, naming the nearest that does, where `number` does not divide `whole`."""
    if whole % number:
        raise ValueError(
            f"{key}: {number} {what} do not divide {of}; the nearest that do are "
            f"{find_nearest_divisor(number, whole)}"
        )


def require_parts_for(attention: AttentionSpec, heads: int) -> None:
    """Raise ValueError if a layer of `heads` heads cannot have the parts of `attention`."""
    try:
        attention.check_heads(heads)
    except ValueError as error:
        raise ValueError(f"attention.{error}") from error
