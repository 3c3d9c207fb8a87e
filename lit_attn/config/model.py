"""Where the attention layer stands."""

from typing import Any, ClassVar, Literal

from pydantic import Field, PositiveInt, field_validator, model_validator

from lit_attn.attention.spec import AttentionSpec, Dynamic, Linear
from lit_attn.config.base import Config, Kind
from lit_attn.config.errors import nearest, nearest_divisor


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
            hint = nearest(ffn.activation, cls.activations)
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
            f"{nearest_divisor(number, whole)}"
        )


def require_parts_for(attention: AttentionSpec, heads: int) -> None:
    """ValueError where a layer of so many heads cannot have the parts of `attention`."""
    of = f"{heads} heads"
    if attention.kv_heads is not None:
        require_division("attention.kv_heads", "key heads", attention.kv_heads, heads, of)
    if isinstance(attention.compose, Dynamic):
        require_division("attention.compose.groups", "groups", attention.compose.groups, heads, of)


class ViT(Model):
    """Pre-norm vision transformer with a class token, on images of the data set's size."""

    kind: Literal["vit"] = "vit"
    dim: PositiveInt
    depth: PositiveInt
    heads: PositiveInt
    patch: PositiveInt
    qkv_bias: bool = False
    patchify: Literal["plain", "shifted"] = Field(
        "plain", description="shifted: shifted patch tokenisation (SPT), four one-pixel shifts"
    )
    local_self_attention: bool = Field(
        False, description="LSA: learned temperature per layer, no token attends to itself"
    )
    dropout: float = Field(0.0, ge=0, lt=1, description="after W and inside the FFN")
    embed_dropout: float = Field(0.0, ge=0, lt=1)
    drop_path: float = Field(0.0, ge=0, lt=1)
    drop_path_schedule: Literal["linear", "constant"] = "linear"
    init: Literal["xavier", "torch", "timm"] = "timm"

    @model_validator(mode="after")
    def _heads_fit(self) -> "ViT":
        require_division("heads", "heads", self.heads, self.dim, f"dim {self.dim}")
        require_parts_for(self.attention, self.heads)
        if self.local_self_attention and isinstance(self.attention.similarity, Linear):
            raise ValueError(
                "local_self_attention: linear keys never form the logits that it would mask"
            )
        return self
