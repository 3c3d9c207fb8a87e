"""Adapters of classes of transformers whose projections have other names, or which do more.

Shapes: B batch, n tokens, m tokens of a memory or of a cache, d width, H heads, D head width.
"""

from abc import abstractmethod
from typing import Any, ClassVar

from torch import Tensor, nn

from lit_attn.attention.spec import AttentionSpec
from lit_attn.private_names.of_transformers import read_implementation
from lit_attn.replace.adapter import (
    check_calls,
    check_options,
    describe_cross_problem,
    list_unread,
)
from lit_attn.replace.projections import Projections, by_head, join, linear
from lit_attn.replace.transformers_layers import Hub, join_bias


class GPT2(Hub):
    """GPT-2, whose matrices are stored as (inputs, outputs)."""

    moved = ("c_attn", "c_proj", "attn_dropout", "resid_dropout")
    # The order of operations in half precision, and the parts of a joined projection.
    known = (*Hub.known, "reorder_and_upcast_attn", "split_size")

    def read(self, original: Any) -> Projections:
        qkv = original.c_attn
        proj = original.c_proj
        return Projections(
            heads=original.num_heads,
            qkv=linear(qkv.weight.T, qkv.bias),
            proj=linear(proj.weight.T, proj.bias),
            attn_drop=original.attn_dropout.p,
            proj_drop=original.resid_dropout.p,
            scale=original.scaling,
        )


class GPTNeoX(Hub):
    """GPT-NeoX and Pythia: fused projections, head by head, and partial rotary embedding."""

    moved = ("query_key_value", "dense")
    known = (*Hub.known, "head_size")

    def read(self, original: Any) -> Projections:
        heads = original.config.num_attention_heads
        return Projections(
            heads=heads,
            qkv=by_head(original.query_key_value, heads),
            proj=original.dense,
            attn_drop=original.attention_dropout,
            scale=original.scaling,
        )


class Bert(Hub):
    """BERT: self-attention, output projection, and the norm after the skip connection."""

    moved = ("self.query", "self.key", "self.value", "output.dense")
    known = ("self", "output", "is_cross_attention")

    def check_options(self, original: Any) -> None:
        super().check_options(original)
        adapter = type(self).__name__
        for child, names in (
            (original.self, ("query", "key", "value")),
            (original.output, ("dense", "LayerNorm")),
        ):
            check_options(child, {*names, *Hub.known, *list_unread(child)}, adapter)
            check_calls(child, "it")

    def read(self, original: Any) -> Projections:
        inner = original.self
        output = original.output
        if not isinstance(output.LayerNorm, nn.LayerNorm):
            raise ValueError("its output has no LayerNorm after the skip connection")
        return Projections(
            heads=inner.num_attention_heads,
            qkv=join(inner.query, inner.key, inner.value),
            proj=output.dense,
            attn_drop=inner.dropout.p,
            proj_drop=output.dropout.p,
            scale=inner.scaling,
        )

    def forward(self, *values: Any, **named: Any) -> tuple[Any, ...]:
        out, weights = super().forward(*values, **named)
        x = named["hidden_states"] if "hidden_states" in named else values[0]
        return self.output.LayerNorm(out + x), weights


class Bloom(Hub):
    """BLOOM: ALiBi, which the model passes, and the sum with the skip connection."""

    adds_to_logits = True
    moved = ("query_key_value", "dense", "attention_dropout")
    known = (*Hub.known, "beta", "hidden_dropout", "inv_norm_factor", "pretraining_tp")

    def read_order(self, original: Any) -> bool:
        return True

    def read(self, original: Any) -> Projections:
        return Projections(
            heads=original.num_heads,
            qkv=by_head(original.query_key_value, original.num_heads),
            proj=original.dense,
            attn_drop=original.attention_dropout.p,
            proj_drop=original.hidden_dropout,
        )

    def forward(self, *values: Any, **named: Any) -> tuple[Any, ...]:
        arguments = self.name_arguments(values, named)
        alibi = arguments["alibi"].unflatten(0, (-1, self.num_heads))
        out = self.attend(arguments, arguments.get("attention_mask"), alibi)
        return out + arguments["residual"], None


class Falcon(Hub):
    """Falcon: fused projections by key head, with rotary embedding or ALiBi.

    The mask of the model contains ALiBi. Its eager code adds ALiBi to this mask once more.
    """

    moved = ("query_key_value", "dense", "attention_dropout")
    # The block applies the dropout.
    known = (*Hub.known, "beta", "hidden_dropout", "inv_norm_factor", "num_kv_heads")
    known = (*known, "multi_query", "new_decoder_architecture")
    read_arguments = Hub.read_arguments | {"alibi"}

    def __init__(self, original: Any, spec: AttentionSpec) -> None:
        if original.config.alibi and not spec.similarity.has_logits:
            raise ValueError(
                f"'{spec.similarity.kind}' attention has no logits, to which this module adds ALiBi"
            )
        super().__init__(original, spec)
        self.has_rotary = not original.config.alibi

    def check_options(self, original: Any) -> None:
        super().check_options(original)
        config = original.config
        if config.alibi and read_implementation(config) != "sdpa":
            raise ValueError(
                "transformers adds ALiBi twice with attn_implementation='eager'; load the model "
                "with attn_implementation='sdpa'"
            )

    def read(self, original: Any) -> Projections:
        heads = original.num_heads
        key_heads = heads
        if original.new_decoder_architecture or original.multi_query:
            key_heads = original.num_kv_heads
        # With rotary embedding, the model has no dropout of its weights.
        attn_drop = original.attention_dropout.p if original.config.alibi else 0.0
        return Projections(
            heads=heads,
            key_heads=key_heads,
            qkv=by_head(original.query_key_value, heads, key_heads),
            proj=original.dense,
            attn_drop=attn_drop,
        )


class EncoderDecoder(Hub):
    """Base of classes that are self-attention or, with `key_value_states`, cross-attention."""

    cross_name: ClassVar[str]
    """Name of the cross-attention in a block of the decoder."""

    @classmethod
    def check_place(cls, parent: nn.Module, name: str, spec: AttentionSpec) -> None:
        problem = spec.find_cross_problem()
        if problem and name == cls.cross_name:
            raise ValueError(f"{describe_cross_problem(problem)}; name it in `skip` to keep it")

    def attend_to_memory(self, arguments: dict[str, Any], mask: Tensor | None) -> Tensor:
        """Return the output of cross-attention to `key_value_states`, (B, n, d)."""
        if self.layer.cross_problem:
            raise self.refusal(describe_cross_problem(self.layer.cross_problem))
        x = arguments["hidden_states"]
        memory = arguments["key_value_states"]
        past = arguments.get("past_key_values")
        cross_past = getattr(past, "cross_attention_cache", None)
        if past is None or cross_past is None or self.training or x.is_meta:
            return self.layer(x, mask, memory=memory)
        self.check_cache()
        if past.is_updated.get(self.index):
            # The cache has the keys and values of the memory since the first call.
            memory = memory[:, :0]
        cache = self.open_cache(cross_past, None, memory.shape[1])
        out = self.layer(x, mask, cache=cache, memory=memory)
        past.is_updated[self.index] = True
        return out


class Whisper(EncoderDecoder):
    """Whisper: encoder, decoder and cross-attention; keys have no bias."""

    cross_name = "encoder_attn"

    def forward(self, *values: Any, **named: Any) -> tuple[Any, ...]:
        arguments = self.name_arguments(values, named)
        mask = arguments.get("attention_mask")
        if arguments.get("key_value_states") is None:
            return self.attend(arguments, mask), None
        return self.attend_to_memory(arguments, mask), None


class T5(EncoderDecoder):
    """T5: logits without a scale, plus a position bias that the first layer computes for all."""

    adds_to_logits = True
    cross_name = "EncDecAttention"
    moved = ("q", "k", "v", "o")
    known = (
        *Hub.known,
        "gradient_checkpointing",
        "has_relative_attention_bias",
        "inner_dim",
        "key_value_proj_dim",
        "relative_attention_bias",
        "relative_attention_max_distance",
        "relative_attention_num_buckets",
    )

    def read(self, original: Any) -> Projections:
        return Projections(
            heads=original.n_heads,
            qkv=join(original.q, original.k, original.v),
            proj=original.o,
            attn_drop=original.dropout,
            scale=original.scaling,
        )

    def forward(self, *values: Any, **named: Any) -> tuple[Any, ...]:
        """Return the output, the position bias for the next layers, and None for the weights."""
        arguments = self.name_arguments(values, named)
        bias = arguments.get("position_bias")
        if arguments.get("key_value_states") is not None:
            mask = join_bias(arguments.get("mask"), bias)
            return self.attend_to_memory(arguments, mask), bias, None
        if bias is None and self.has_relative_attention_bias:
            bias = self.find_bias(arguments)
        return self.attend(arguments, arguments.get("mask"), bias), bias, None

    def find_bias(self, arguments: dict[str, Any]) -> Tensor:
        """Return the position bias of the call, (1, H, n, m) with the cached tokens."""
        x = arguments["hidden_states"]
        cache = self.find_cache(arguments, x)
        cached = 0 if cache is None else cache.position
        n = x.shape[1]
        bias: Tensor = self.compute_bias(n, cached + n, device=x.device, past_seen_tokens=cached)
        return bias


class ReducedKeys(Hub):
    """Base of layers of images whose keys belong to a smaller map in some stages."""

    def __init__(self, original: Any, spec: AttentionSpec) -> None:
        problem = spec.find_cross_problem() if self.has_reduction(original) else ""
        if problem:
            raise ValueError(
                f"its keys belong to reduced tokens: {problem.partition(';')[0]}; name it in "
                "`skip` to keep it"
            )
        super().__init__(original, spec)

    def read_order(self, original: Any) -> bool:
        return False

    @abstractmethod
    def has_reduction(self, original: Any) -> bool:
        """Return True if the keys belong to reduced tokens."""

    @abstractmethod
    def reduce(self, x: Tensor, size: tuple[int, int]) -> Tensor:
        """Return the reduced tokens (B, m, d) of the tokens x (B, h w, d) of a map."""

    def attend_to_map(self, arguments: dict[str, Any]) -> Tensor:
        """Return the output (B, h w, d) for a map of `height` and `width`."""
        x = arguments["hidden_states"]
        if not self.has_reduction(self.original):
            return self.attend(arguments, None)
        size = (arguments["height"], arguments["width"])
        return self.layer(x, memory=self.reduce(x, size))


class Segformer(ReducedKeys):
    """SegFormer: keys of a map that a convolution reduces."""

    known = (*Hub.known, "sequence_reduction", "sequence_reduction_ratio")

    def has_reduction(self, original: Any) -> bool:
        is_reduced: bool = original.sequence_reduction_ratio > 1
        return is_reduced

    def reduce(self, x: Tensor, size: tuple[int, int]) -> Tensor:
        reduced: Tensor = self.sequence_reduction(x, *size)
        return reduced

    def forward(self, *values: Any, **named: Any) -> tuple[Any, ...]:
        return self.attend_to_map(self.name_arguments(values, named)), None


class PvtV2(ReducedKeys):
    """PVT v2: keys of a map that is pooled, or reduced by a convolution."""

    moved = ("query", "key", "value", "proj", "attn_drop", "proj_drop")
    known = (
        *Hub.known,
        "act",
        "all_head_size",
        "attention_head_size",
        "layer_norm",
        "linear_attention",
        "pool",
        "spatial_reduction",
        "spatial_reduction_ratio",
    )

    def has_reduction(self, original: Any) -> bool:
        return bool(original.linear_attention or original.spatial_reduction_ratio > 1)

    def read(self, original: Any) -> Projections:
        return Projections(
            heads=original.num_attention_heads,
            qkv=join(original.query, original.key, original.value),
            proj=original.proj,
            attn_drop=original.attn_drop.p,
            proj_drop=original.proj_drop.p,
        )

    def reduce(self, x: Tensor, size: tuple[int, int]) -> Tensor:
        grid = x.transpose(1, 2).unflatten(2, size)
        if self.linear_attention:
            grid = self.pool(grid)
        reduced: Tensor = self.layer_norm(self.spatial_reduction(grid).flatten(2).transpose(1, 2))
        return self.act(reduced) if self.linear_attention else reduced

    def forward(self, *values: Any, **named: Any) -> tuple[Any, ...]:
        return (self.attend_to_map(self.name_arguments(values, named)),)
