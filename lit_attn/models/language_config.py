"""Configurations of language models, sequence classifiers and encoder-decoders."""

from typing import Any, ClassVar, Literal

from pydantic import Field, PositiveFloat, PositiveInt

from lit_attn import signatures
from lit_attn.attention.spec import AttentionSpec
from lit_attn.models.base import PackageModel, require_division, require_heads
from lit_attn.schema.base import Config, Share, consistency_check


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


class ValueEmbeddings(Config):
    """Embeddings of the tokens that some layers add to their values.

    v_h becomes v_h + f sigmoid(w_h . x') e_h, where e_h are the components of the token's embedding
    for key head h, x' the first `channels` components of the layer's input, and w_h is learned.
    Each of these layers has its own embeddings. Source: nanochat/gpt.py of
    github.com/karpathy/nanochat at 92d63d4, which follows the value residual of Zhou et al. 2024
    (https://arxiv.org/abs/2410.17897) and modded-nanogpt.
    """

    every: PositiveInt = Field(
        2, description="n: every n-th layer, counted back from the last one, which is the first"
    )
    channels: PositiveInt = Field(
        12, description="components of the layer's input that the gate of a key head reads"
    )
    factor: PositiveFloat = Field(3.0, description="f: largest factor of an embedding")

    def has_layer(self, layer: int, depth: int) -> bool:
        """Return True if layer `layer` of `depth` layers, from 0, has embeddings."""
        return (depth - 1 - layer) % self.every == 0


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
    positions: Literal["learned", "rotary", "sinusoidal", "fairseq"] = Field(
        "learned", description="fairseq: sinusoidal, from position 2 on"
    )
    rotary_share: float = Field(
        1.0, gt=0, le=1, description="share of a head's components that rotary positions rotate"
    )
    rotary_base: PositiveFloat = Field(10_000.0, description="base of the rotary frequencies")
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

    def attention_of(self, layer: int) -> AttentionSpec:
        """Return the attention of layer `layer`, with the window of that layer."""
        spec = self.attention.by_layer(self.depth)[layer]
        window = self.windows[layer % len(self.windows)]
        return spec if window is None else spec.model_copy(update={"window": window})

    def value_embeddings_of(self, layer: int) -> ValueEmbeddings | None:
        """Return the embeddings that layer `layer` adds to its values, or None."""
        return None

    def check(self, signature: signatures.TokenSignature) -> None:
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


class GPTConfig(TokenTransformer, kind="gpt"):
    """Causal language model.

    `head: tied` and `adaptive` use the weights of the embedding. `adaptive` is the softmax by
    frequency classes of Grave et al. 2017 with divisor 1.
    """

    takes = (signatures.CausalTokens,)
    builder: ClassVar[tuple[Any, ...]] = ("lit_attn.models.language:GPT", "vocabulary", "context")
    head: Literal["tied", "untied", "adaptive"] = Field(
        "tied",
        description="output layer: the embedding's weights (tied), its own weights "
        "(untied), or an adaptive softmax with tied weights",
    )
    cutoffs: tuple[PositiveInt, ...] = Field(
        (), description="first ids of the rarer classes (adaptive)"
    )
    head_dropout: Share = Field(0.0, description="dropout rate of hidden vectors before the head")
    vocabulary_multiple: PositiveInt = Field(1, description="round the vocabulary up to a multiple")
    value_embeddings: ValueEmbeddings | None = Field(
        None, description="embeddings of the tokens that layers add to their values; null: none"
    )
    logit_cap: PositiveFloat | None = Field(
        None,
        description="c: the head's logits l become c tanh(l / c), as in Gemma 2; null: unchanged",
    )
    z_loss: float = Field(
        0.0,
        ge=0,
        description="z: in training, z times the squared log-sum-exp of its logits is added to the "
        "loss of each token, as in PaLM (z = 1e-4)",
    )
    documents: Literal["joined", "separate"] = Field(
        "joined",
        description="separate: in packed text, no token attends to another document, and positions "
        "start again with each; a document starts with the token that separates it from the last",
    )

    def build(self, signature: Any, device: Any = None) -> Any:
        network = super().build(signature, device)
        if self.documents == "separate":
            network.trunk.document_end = signature.document_end
        return network

    @consistency_check
    def _documents_can_be_separate(self) -> None:
        """Refuse separate documents in layers that a mask of pairs of tokens cannot separate."""
        if self.documents == "joined":
            return
        for spec in self.attention.mechanisms:
            problem = spec.find_document_problem()
            if problem:
                raise ValueError(
                    f"attention.{problem}, which `documents: separate` cannot separate; "
                    "choose another part, or write `documents: joined`"
                )

    def value_embeddings_of(self, layer: int) -> ValueEmbeddings | None:
        chosen = self.value_embeddings
        return chosen if chosen is not None and chosen.has_layer(layer, self.depth) else None

    @consistency_check
    def _layers_take_value_embeddings(self) -> None:
        """Refuse value embeddings of layers without values, and gates wider than their input."""
        if self.value_embeddings is None:
            return
        channels = self.value_embeddings.channels
        if channels > self.dim:
            raise ValueError(
                f"value_embeddings.channels: {channels} exceeds dim {self.dim};"
                f" choose at most {self.dim}"
            )
        for layer in range(self.depth):
            is_own = self.attention_of(layer).mixer is not None
            if is_own and self.value_embeddings_of(layer) is not None:
                raise ValueError(
                    f"value_embeddings: layer {layer + 1} is of `kind: module` and has no values;"
                    " remove value_embeddings, or choose another `every`"
                )

    @consistency_check
    def _cutoffs_are_for_adaptive(self) -> None:
        """Refuse cutoffs without an adaptive head, and cutoffs in another order."""
        is_adaptive = self.head == "adaptive"
        if is_adaptive != bool(self.cutoffs):
            raise ValueError("cutoffs: `head: adaptive` needs cutoffs, and no other head has them")
        if list(self.cutoffs) != sorted(set(self.cutoffs)):
            raise ValueError("cutoffs: must increase")
        if is_adaptive and self.vocabulary_multiple > 1:
            raise ValueError("vocabulary_multiple: has no effect with `head: adaptive`")
        if is_adaptive and self.logit_cap is not None:
            raise ValueError("logit_cap: `head: adaptive` has no logits of all ids; remove one")
        if is_adaptive and self.z_loss:
            raise ValueError("z_loss: `head: adaptive` has no logits of all ids; remove one")

    def check(self, signature: Any) -> None:
        super().check(signature)
        if self.documents == "separate" and signature.document_end is None:
            raise ValueError(
                "documents: separate needs a token that separates documents, and the data has "
                "none; choose the tokenizer bytes, gpt2 or gpt-neox, or write joined"
            )
        size = signature.vocabulary
        if self.cutoffs and self.cutoffs[-1] >= size:
            raise ValueError(
                f"cutoffs: {self.cutoffs[-1]} is beyond the vocabulary of {size};"
                f" {size - 1} at most"
            )


class SequenceClassifierConfig(TokenTransformer, kind="sequence-classifier"):
    """Bidirectional encoder, mean pooling, and a classifier of Linear, ReLU and Linear.

    If the words of a sequence have classes, the classifier is applied to every token.
    The model of MGK's experiments on the Long Range Arena, whose code has `pool: zero-padded`.
    """

    takes = (signatures.LabelledTokens, signatures.TaggedTokens)
    builder = (
        "lit_attn.models.language:SequenceClassifier",
        "vocabulary",
        "context",
        "classes",
        "pairs",
        "are_tagged",
    )

    pool: Literal["tokens", "zero-padded"] = Field(
        "tokens",
        description="tokens: the mean over the tokens; zero-padded: their sum divided by the "
        "context, so that padding counts as zero vectors",
    )
    classifier_width: PositiveInt = Field(128, description="hidden units of the classifier")

    def check(self, signature: Any) -> None:
        super().check(signature)
        if signature.are_tagged and self.pool != "tokens":
            raise ValueError("pool: nothing is pooled if every token is classified; remove it")


class EncoderDecoderConfig(TokenTransformer, kind="encoder-decoder"):
    """Bidirectional encoder, and causal decoder with cross-attention, of `depth` blocks each."""

    takes = (signatures.ParallelTokens,)
    builder = ("lit_attn.models.translation:EncoderDecoder", "vocabulary", "context")
    cross_attention: AttentionSpec | None = Field(
        None, description="attention of the decoder to the encoder; null: that of `attention`"
    )
    embeddings: Literal["separate", "decoder", "all"] = Field(
        "decoder",
        description="shared embedding; decoder: of the decoder's input and output; all: also of "
        "the encoder's input; separate: none",
    )
    branches: Literal["sequential"] = Field("sequential", description="order of the branches")

    @property
    def cross(self) -> AttentionSpec:
        """Attention of the decoder to the encoder."""
        return self.cross_attention or self.attention

    def check(self, signature: signatures.TokenSignature) -> None:
        for spec in (self.attention, self.cross):
            model = self.model_copy(update={"attention": spec})
            TokenTransformer.check(model, signature)

    @consistency_check
    def _cross_attention_has_a_meaning(self) -> None:
        """Refuse parts of the attention that cross-attention cannot have."""
        key = "attention" if self.cross_attention is None else "cross_attention"
        for spec in self.cross.mechanisms:
            cross_problem = spec.find_cross_problem()
            if cross_problem:
                raise ValueError(f"{key}.{cross_problem}")
        require_heads(self.cross, self.heads, self.depth)
