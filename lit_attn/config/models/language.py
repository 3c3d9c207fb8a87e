"""Language models and sequence classifiers: the few choices in which the published ones differ."""

from typing import ClassVar, Literal, Self

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from lit_attn.attention.spec import AttentionSpec
from lit_attn.config.models.base import Model, require_division, require_parts_for
from lit_attn.schema.base import Config


class Init(Config):
    """How parameters start: standard deviations of normal distributions around zero.

    Biases start at zero and norm weights at one. `torch` is PyTorch's own default for the kind of
    layer: uniform within 1 / sqrt(fan in), biases too; a tied embedding counts as a Linear.
    Compositions across heads keep the initialisation of their own paper.
    """

    matrices: PositiveFloat | Literal["torch"] = 0.02
    embedding: PositiveFloat | Literal["torch"] = 0.02
    norms: float = Field(0.0, ge=0, description="deviation of the norm weights around one")
    depth_scaled: bool = Field(
        True, description="projections onto the residual stream / sqrt(2 depth), as GPT-2's"
    )


class TokenTransformer(Model):
    """Transformer over tokens; the defaults are those of GPT-2 as nanoGPT trains it.

    The vocabulary and the sequence length are the data's.
    """

    activations: ClassVar[tuple[str, ...]] = ("gelu", "gelu-tanh", "relu", "swiglu")

    dim: PositiveInt
    depth: PositiveInt
    heads: PositiveInt
    head_dim: PositiveInt | None = Field(None, description="dim / heads where null")
    positions: Literal["learned", "rotary", "sinusoidal", "sinusoidal-reversed"] = Field(
        "learned",
        description="sinusoidal-reversed: the sinusoidal position of a token is its distance to "
        "the last token, as in Transformer-XL's code",
    )
    rotary_base: PositiveFloat = 10_000.0
    norm: Literal["layernorm", "layernorm-unbiased", "rmsnorm", "rmsnorm-unweighted"] = (
        "layernorm-unbiased"
    )
    norm_eps: PositiveFloat = 1e-5
    norm_order: Literal["pre", "post"] = "pre"
    qk_norm: bool = Field(False, description="RMSNorm with weight on each head's q and k")
    bias: Literal["none", "ffn", "all"] = Field("none", description="the blocks' Linears with one")
    attention_branch: Literal["as-is", "depth-scaled"] = Field(
        "as-is", description="depth-scaled: what attention adds is divided by sqrt(2 depth)"
    )
    embedding_scale: Literal["one", "sqrt-dim"] = "one"
    windows: tuple[PositiveInt | None, ...] = Field(
        (None,),
        min_length=1,
        description="of the layers in turn, over and over; null leaves `attention` as it is",
    )
    weights: Literal["exact", "e5m2"] = Field(
        "exact", description="e5m2: the blocks' matrices are rounded to 8 bits in the forward pass"
    )
    dropout: float = Field(0.0, ge=0, lt=1, description="embedding, after W, and in the FFN")
    attention_dropout: float = Field(0.0, ge=0, lt=1)
    init: Init = Init()

    @property
    def width_of_heads(self) -> int:
        """D."""
        return self.head_dim or self.dim // self.heads

    def attention_of(self, layer: int) -> AttentionSpec:
        """What layer `layer` computes: `attention`, through the window that is its turn."""
        window = self.windows[layer % len(self.windows)]
        return self.attention.model_copy(update={"window": window}) if window else self.attention

    @model_validator(mode="after")
    def _heads_fit(self) -> Self:
        if self.head_dim is None:
            of = f"dim {self.dim}, and there is no head_dim"
            require_division("heads", "heads", self.heads, self.dim, of)
        require_parts_for(self.attention, self.heads)
        if any(self.windows) and self.attention.similarity.kind == "linear":
            raise ValueError("windows: linear attention has none")
        if self.positions == "rotary" and self.width_of_heads % 2:
            raise ValueError(
                f"positions: rotary needs heads of an even width, not {self.width_of_heads}"
            )
        return self


class GPTConfig(TokenTransformer):
    """Causal language model.

    `head: tied` and `adaptive` use the embedding's weights; `adaptive` is the softmax by frequency
    classes of Grave et al. 2017 with divisor 1: `cutoffs` are the first ids of the rarer classes.
    """

    kind: Literal["gpt"] = "gpt"
    head: Literal["tied", "untied", "adaptive"] = "tied"
    cutoffs: tuple[PositiveInt, ...] = ()
    vocabulary_multiple: PositiveInt = Field(
        1, description="round the vocabulary up, as nanoGPT does to 50,304"
    )

    @model_validator(mode="after")
    def _cutoffs_where_adaptive(self) -> Self:
        if (self.head == "adaptive") != bool(self.cutoffs):
            raise ValueError("cutoffs: go with `head: adaptive`, and it with them")
        if list(self.cutoffs) != sorted(set(self.cutoffs)):
            raise ValueError("cutoffs: have to increase")
        if self.head == "adaptive" and self.vocabulary_multiple > 1:
            raise ValueError("vocabulary_multiple: has no meaning for `head: adaptive`")
        return self


class SequenceClassifierConfig(TokenTransformer):
    """Bidirectional encoder, mean pooling, and a classifier Linear, ReLU, Linear.

    The model of the Long Range Arena as MGK trains it, whose code has `pool: zero-padded`.
    """

    kind: Literal["sequence-classifier"] = "sequence-classifier"
    pool: Literal["tokens", "zero-padded"] = Field(
        "tokens",
        description="tokens: the mean over the tokens; zero-padded: their sum divided by the "
        "context, so that padding counts as zero vectors",
    )
    classifier_width: PositiveInt = 128
