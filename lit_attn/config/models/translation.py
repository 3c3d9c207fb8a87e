"""Configuration of the encoder-decoder for translation."""

from typing import Literal, Self

from pydantic import Field, model_validator

from lit_attn.attention.spec import AttentionSpec
from lit_attn.config.models.base import require_heads
from lit_attn.config.models.language import TokenTransformer
from lit_attn.config.signatures import ParallelTokens, TokenSignature


class EncoderDecoderConfig(TokenTransformer):
    """Bidirectional encoder, and causal decoder with cross-attention, of `depth` blocks each."""

    takes = (ParallelTokens,)

    builder = ("translation:EncoderDecoder", "vocabulary", "context")

    kind: Literal["encoder-decoder"] = "encoder-decoder"
    cross_attention: AttentionSpec | None = Field(
        None, description="attention of the decoder to the encoder; null: that of `attention`"
    )
    embeddings: Literal["separate", "decoder", "all"] = Field(
        "decoder",
        description="shared embedding; decoder: of the decoder's input and output; all: also of "
        "the encoder's input; separate: none",
    )
    # Reversed positions change with every new token, and the encoder would count padding.
    positions: Literal["learned", "rotary", "sinusoidal"] = Field(
        "learned", description="positions of both parts"
    )
    weights: Literal["exact"] = Field("exact", description="matrices are not rounded")

    @property
    def cross(self) -> AttentionSpec:
        """Attention of the decoder to the encoder."""
        return self.cross_attention or self.attention

    def check(self, signature: TokenSignature) -> None:
        for spec in (self.attention, self.cross):
            TokenTransformer.check(self.model_copy(update={"attention": spec}), signature)

    @model_validator(mode="after")
    def _cross_attention_has_a_meaning(self) -> Self:
        key = "attention" if self.cross_attention is None else "cross_attention"
        try:
            self.cross.check_cross()
        except ValueError as error:
            raise ValueError(f"{key}.{error}") from error
        require_heads(self.cross, self.heads)
        return self
