"""Keys that all transformers over tokens share, and how their parameters start."""

from typing import ClassVar, Literal, NamedTuple

from pydantic import Field, PositiveFloat, PositiveInt

from lit_attn.attention.spec import AttentionSpec, check_shared_keys
from lit_attn.models.base import PackageModel, require_division, require_heads
from lit_attn.models.value_embedding import ValueEmbeddings
from lit_attn.schema.base import Config, Share, consistency_check
from lit_attn.signatures import TokenSignature


class Init(Config):
    """Initialisation: standard deviations of normal distributions around zero.

    Biases start at zero and norm weights at one. `torch` is PyTorch's default for each kind of
    layer: uniform within 1 / sqrt(fan in), biases included; a tied embedding counts as a Linear.
    `fairseq` is the same with Xavier's rule in attention layers, and an encoder-decoder's embedding
    of padding is zero. Compositions across heads keep the initialisation of their paper.
    """

    matrices: PositiveFloat | Literal["torch", "fairseq"] = Field(
        0.02, description="standard deviation of the matrices, torch or fairseq"
    )
    embedding: PositiveFloat | Literal["torch"] = Field(
        0.02, description="standard deviation of the embeddings, or torch"
    )
    norms: float = Field(0.0, ge=0, description="standard deviation of the norm weights around 1")
    depth_scaled: bool = Field(True, description="divide output projections by sqrt(2 depth)")


class LayerRotation(Config):
    """Rotary positions of a layer that differ from those of the model."""

    share: float | None = Field(
        None, gt=0, le=1, description="share of a head's components; null: `rotary_share`"
    )
    base: PositiveFloat | None = Field(
        None, description="base of the frequencies; null: `rotary_base`"
    )


class Rotation(NamedTuple):
    """Number of components of a head that a layer rotates, and the base of its frequencies."""

    width: int
    base: float


class TokenTransformer(PackageModel):
    """Transformer over the tokens of the data; the defaults are those of GPT-2 in nanoGPT."""

    activations: ClassVar[tuple[str, ...]] = (
        "gelu",
        "gelu-tanh",
        "relu",
        "relu2",
        "silu",
        "swiglu",
        "geglu",
        "reglu",
    )

    dim: PositiveInt = Field(description="width of the residual stream")
    depth: PositiveInt = Field(description="number of blocks")
    heads: PositiveInt = Field(description="attention heads of a block")
    head_dim: PositiveInt | None = Field(None, description="width of a head; null: dim / heads")
    positions: Literal["learned", "rotary", "sinusoidal", "fairseq", "none"] = Field(
        "learned",
        description="fairseq: sinusoidal, from position 2 on; none: a causal model knows the order "
        "by its masks alone (NoPE)",
    )
    rotary_share: float = Field(
        1.0, gt=0, le=1, description="share of a head's components that rotary positions rotate"
    )
    rotary_base: PositiveFloat = Field(10_000.0, description="base of the rotary frequencies")
    rotations: tuple[Literal["model", "none"] | LayerRotation, ...] = Field(
        ("model",),
        min_length=1,
        description="rotary positions of the layers in turn, repeated: model (`rotary_share` and "
        "`rotary_base`), none (NoPE), or {share: 0.5, base: 1e6}",
    )
    norm: Literal["layernorm", "layernorm-unbiased", "rmsnorm", "rmsnorm-unweighted"] = Field(
        "layernorm-unbiased", description="kind of normalisation layer"
    )
    norm_eps: PositiveFloat = Field(1e-5, description="epsilon of the norms")
    norm_order: Literal["pre", "post"] = Field(
        "pre", description="norm before (pre) or after (post) attention and FFN"
    )
    branches: Literal["sequential", "parallel"] = Field(
        "sequential",
        description="parallel: attention and FFN read the block's input, each through its own "
        "norm, as in GPT-NeoX",
    )
    qk_norm: bool | Literal["unweighted"] = Field(
        False, description="RMSNorm of each head's q and k, with weight (true) or without"
    )
    qk_norm_eps: PositiveFloat = Field(1e-6, description="epsilon of the norms of `qk_norm`")
    qk_gain: PositiveFloat = Field(
        1.0, description="factor of q and of k after `qk_norm`: logits are multiplied by its square"
    )
    bias: Literal["none", "ffn", "all"] = Field("none", description="Linears with a bias in blocks")
    attention_branch: Literal["as-is", "depth-scaled"] = Field(
        "as-is", description="depth-scaled: the attention branch is divided by sqrt(2 depth)"
    )
    embedding_scale: Literal["one", "sqrt-dim"] = Field(
        "one", description="factor of the token embeddings: 1 or sqrt(dim)"
    )
    windows: tuple[PositiveInt | None, ...] = Field(
        (None,),
        min_length=1,
        description="windows of the layers in turn, repeated; null keeps that of `attention`",
    )
    dropout: Share = Field(0.0, description="dropout rate of embedding, after W, and in the FFN")
    activation_dropout: Share | None = Field(
        None, description="dropout rate after the FFN's activation; null: that of `dropout`"
    )
    attention_dropout: Share = Field(0.0, description="dropout rate of the attention weights")
    attention_precision: Literal["autocast", "float32"] = Field(
        "autocast",
        description="float32: between its projections, attention is computed in float32 under "
        "autocast too",
    )
    init: Init = Field(Init(), description="initial values of the parameters")

    def exempt_parameters(self) -> tuple[str, ...]:
        return ("positions",) if self.positions == "learned" else ()

    @property
    def width_of_heads(self) -> int:
        """Width D of a head."""
        return self.head_dim or self.dim // self.heads

    @property
    def rotated_width(self) -> int:
        """Number of components of a head that rotary positions rotate."""
        return int(self.width_of_heads * self.rotary_share)

    def rotation_of(self, layer: int) -> Rotation | None:
        """Return the rotary positions of layer `layer`, or None if it has none."""
        chosen = self.rotations[layer % len(self.rotations)]
        if self.positions != "rotary" or chosen == "none":
            return None
        share = self.rotary_share
        base = self.rotary_base
        if isinstance(chosen, LayerRotation):
            share = share if chosen.share is None else chosen.share
            base = base if chosen.base is None else chosen.base
        return Rotation(int(self.width_of_heads * share), base)

    def attention_of(self, layer: int) -> AttentionSpec:
        """Return the attention of layer `layer`, with the window of that layer."""
        spec = self.attention.by_layer(self.depth)[layer]
        window = self.windows[layer % len(self.windows)]
        return spec if window is None else spec.model_copy(update={"window": window})

    def value_embeddings_of(self, layer: int) -> ValueEmbeddings | None:
        """Return the embeddings that layer `layer` adds to its values, or None."""
        return None

    def check(self, signature: TokenSignature) -> None:
        for spec in self.attention.mechanisms:
            limit = spec.similarity.max_tokens
            if limit is not None and limit < signature.context:
                raise ValueError(
                    f"attention.similarity.positions: {limit} are fewer than the"
                    f" {signature.context} tokens of data.context"
                )

    @consistency_check
    def _heads_divide(self) -> None:
        """Refuse a number of heads that the width or the attention cannot have."""
        if self.head_dim is None:
            total_name = f"dim {self.dim}, and there is no head_dim"
            require_division("heads", "heads", self.heads, self.dim, total_name)
        require_heads(self.attention, self.heads, self.depth)

    @consistency_check
    def _positions_suit_the_heads(self) -> None:
        """Refuse rotary positions of heads of odd width, and their options without them."""
        if self.positions == "rotary":
            is_odd = self.rotated_width % 2 == 1
            if is_odd or self.rotated_width == 0:
                share = "" if self.rotary_share == 1 else f" times rotary_share {self.rotary_share}"
                raise ValueError(
                    "positions: rotary needs heads of an even width,"
                    f" not {self.width_of_heads}{share}"
                )
        elif self.rotary_share != 1 or self.rotary_base != 10_000:
            raise ValueError("rotary_share, rotary_base: need `positions: rotary`")

    @consistency_check
    def _rotations_suit_the_layers(self) -> None:
        """Refuse rotations of layers that the model cannot have, and those without an effect."""
        if self.rotations == ("model",):
            return
        if self.positions != "rotary":
            raise ValueError("rotations: need `positions: rotary`")
        if len(self.rotations) > self.depth:
            raise ValueError(
                f"rotations: {len(self.rotations)} are more than the {self.depth} layers"
            )
        if set(self.rotations) == {"none"}:
            raise ValueError("rotations: no layer has positions; write `positions: none`")
        for number in range(len(self.rotations)):
            rotation = self.rotation_of(number)
            if rotation is not None and (rotation.width % 2 or not rotation.width):
                raise ValueError(
                    f"rotations.{number}: rotates {rotation.width} of {self.width_of_heads} "
                    "components of a head; choose a share with an even number"
                )

    @consistency_check
    def _layers_can_share_keys(self) -> None:
        """Refuse shared keys of layers with other windows or positions."""
        specs = [self.attention_of(number) for number in range(self.depth)]
        check_shared_keys(specs)
        source = 0
        for number, spec in enumerate(specs):
            if not spec.shares_keys:
                source = number
            elif self.rotation_of(number) != self.rotation_of(source):
                raise ValueError(
                    f"rotations: layer {number + 1} has the keys of layer {source + 1} "
                    "(`kv_from: previous`), whose rotation differs; set the same for both"
                )

    @consistency_check
    def _latents_suit_the_positions(self) -> None:
        """Refuse latents that have no norms of queries, or fewer components than are rotated."""
        for number in range(self.depth):
            latent = self.attention_of(number).latent
            if latent is None:
                continue
            if self.qk_norm:
                raise ValueError(
                    f"qk_norm: the latents of layer {number + 1} have norms already; "
                    "write `qk_norm: false`"
                )
            rotation = self.rotation_of(number)
            width = latent.rotary_width(self.width_of_heads)
            if rotation is not None and rotation.width > width:
                raise ValueError(
                    f"attention.latent.rotary: {width} components of the keys are rotated, and the "
                    f"positions of layer {number + 1} rotate {rotation.width}; write "
                    f"`rotary: {rotation.width}`, or a `rotary_share` of "
                    f"{width / self.width_of_heads:g}"
                )

    @consistency_check
    def _options_have_an_effect(self) -> None:
        """Refuse options that the other options exclude."""
        for layer in range(self.depth):
            spec = self.attention_of(layer)
            if any(self.windows) and spec.window and spec.similarity.kind == "linear":
                raise ValueError("windows: not supported by linear keys")
        if not self.qk_norm and self.qk_norm_eps != 1e-6:
            raise ValueError("qk_norm_eps: needs `qk_norm: true` or `unweighted`")
        if not self.qk_norm and self.qk_gain != 1:
            raise ValueError("qk_gain: needs `qk_norm: true` or `unweighted`")
        if self.branches == "parallel" and (self.norm_order == "post" or self.ffn is None):
            raise ValueError("branches: parallel needs `norm_order: pre` and an ffn")
