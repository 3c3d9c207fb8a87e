"""Adapters of the attention modules of PyTorch and transformers for `replace_attention`.

Shapes: B batch, n tokens, m cached tokens, d width, H heads, D head width.
"""

import functools
import inspect
import sys
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from lit_attn.attention.cache import KeyValues
from lit_attn.attention.rotary import Rotary, rotate
from lit_attn.attention.spec import AttentionSpec
from lit_attn.models.adapter import (
    Adapter,
    Projections,
    by_head,
    check_hooks,
    check_options,
    join,
    linear,
)

IMPLEMENTATIONS = (None, "eager", "sdpa")
"""Values of `attn_implementation` whose masks the layer can apply."""

CROSS_ATTENTION = "it is cross-attention of transformers, which no adapter reads"


class Hub(Adapter):
    """Attention with q_proj, k_proj, v_proj and o_proj: ViT, Llama, Mistral, Qwen2, Qwen3.

    Masks, rotary embeddings and key/value caches are those of transformers; a mask contains the
    sliding window. In training, and where FLOPs are counted, nothing is cached.
    """

    adds_to_logits = False
    moved: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")
    known: ClassVar[tuple[str, ...]] = (
        "_attn_implementation",
        "attention_dropout",
        "config",
        "head_dim",
        "hidden_size",
        "is_causal",
        "is_cross_attention",
        "layer_idx",
        "layer_type",
        "num_attention_heads",
        "num_heads",
        "num_key_value_groups",
        "num_key_value_heads",
        "scaling",
        "sliding_window",
        "use_rope",
    )

    def __init__(self, original: Any, spec: AttentionSpec) -> None:
        if getattr(original, "is_cross_attention", False):
            raise ValueError(CROSS_ATTENTION)
        super().__init__(original, spec)
        self.names = tuple(inspect.signature(original.forward).parameters)
        inner = getattr(original, "self", original)
        self.is_causal, self.index = inner.is_causal, getattr(inner, "layer_idx", 0)
        self.has_rotary = bool(getattr(original, "use_rope", True))

    def detach(self) -> None:
        super().detach()
        if not self.layer.spec.similarity.has_logits and hasattr(self.original, "config"):
            self.original.config.use_cache = False

    def check_options(self, original: Any) -> None:
        super().check_options(original)
        config = getattr(getattr(original, "self", original), "config", None)
        implementation = getattr(config, "_attn_implementation", None)
        if implementation not in IMPLEMENTATIONS:
            raise ValueError(
                f"its attn_implementation is {implementation}, whose masks the layer cannot apply; "
                "load the model with attn_implementation='sdpa' or 'eager'"
            )
        check_rotation(original)

    def read(self, original: Any) -> Projections:
        for name in ("q_norm", "k_norm"):
            weight = getattr(getattr(original, name, None), "weight", None)
            if weight is not None and weight.shape != (original.head_dim,):
                raise ValueError(f"its `{name}` normalises all heads at once, not each head")
        return Projections(
            heads=original.q_proj.out_features // original.head_dim,
            key_heads=original.k_proj.out_features // original.head_dim,
            qkv=join(original.q_proj, original.k_proj, original.v_proj),
            proj=original.o_proj,
            q_norm=getattr(original, "q_norm", None),
            k_norm=getattr(original, "k_norm", None),
            attn_drop=original.attention_dropout,
            scale=original.scaling,
        )

    def forward(self, *values: Any, **named: Any) -> tuple[Tensor, None]:
        """Return the output and None, in place of the weights, for the arguments of the module."""
        arguments = dict(zip(self.names, values, strict=False)) | named
        x, mask = arguments["hidden_states"], arguments.get("attention_mask")
        if mask is not None and mask.ndim != 4:
            raise self.refusal(
                f"its mask has {mask.ndim} axes; set attn_implementation to sdpa or eager"
            )
        past = arguments.get("past_key_values", arguments.get("layer_past"))
        cache = None
        if past is not None and not self.training and not x.is_meta:
            spec = self.layer.spec
            if not spec.similarity.has_logits:
                text = "has no keys and values to cache; call the model with use_cache=False"
                raise ValueError(f"'{spec.similarity.kind}' attention {text}")
            past = getattr(past, "self_attention_cache", past)
            cache = HubCache(past, self.index, spec.window)
            mask = None if mask is None else mask[..., -(cache.length + x.shape[1]) :]
        if mask is not None and not self.is_causal and mask.dtype == torch.bool:
            # Padding is the same for all queries.
            mask = mask[..., :1, :]
        rotary = None
        positions = arguments.get("position_embeddings")
        if positions is not None and self.has_rotary:
            cos, sin = (part[..., : part.shape[-1] // 2].unsqueeze(1) for part in positions)
            rotary = Rotary(cos, sin)
        return self.layer(x, mask, self.is_causal and mask is None, rotary, cache), None


class HubCache(KeyValues):
    """Cache of transformers, in which one vector has everything that is kept of a token.

    The vectors (B, 1, m, F) are stored as the keys of the cache, so that selecting and removing
    samples and tokens works as usual. The values of the cache have a width of 0.
    """

    def __init__(self, past: Any, index: int, window: int | None) -> None:
        """Raise ValueError for a cache of fixed size."""
        super().__init__(window)
        self.past, self.index = past, index
        layer = past.layers[index] if index < len(past.layers) else None
        if getattr(layer, "is_compileable", False):
            raise ValueError("replaced attention needs a cache that grows, such as DynamicCache")
        self.vectors: Tensor | None = getattr(layer, "keys", None)
        self.position = past.get_seq_length(index)
        size = 0 if self.vectors is None or self.vectors.ndim < 4 else self.vectors.shape[-2]
        self.length = size if self.limit is None else min(size, self.limit)
        self.parts: list[Tensor] = []

    def extend(self, name: str, new: Tensor, axis: int = -2) -> Tensor:
        """Append `new` to its part of the stored vectors along the token axis and return both.

        The parts of a vector are in the order of the calls, which is the same for all tokens.
        """
        tokens = new.movedim(axis, 1)
        start = sum(part.shape[-1] for part in self.parts)
        self.parts.append(tokens.flatten(2))
        if self.vectors is None or self.length == 0:
            return new
        stop = start + self.parts[-1].shape[-1]
        stored = self.vectors[:, 0, self.vectors.shape[-2] - self.length :, start:stop]
        stored = stored.unflatten(-1, tokens.shape[2:]).to(new.dtype)
        return torch.cat([stored, tokens], 1).movedim(1, axis)

    def advance(self, n: int) -> None:
        vectors = torch.cat(self.parts, -1).unsqueeze(1)
        self.past.update(vectors, vectors[..., :0], self.index)


def check_rotation(original: nn.Module) -> None:
    """Raise ValueError if the code of `original` rotates queries and keys unlike the layer.

    The function of its file is compared with the layer's on a few numbers.
    """
    if "position_embeddings" not in inspect.signature(original.forward).parameters:
        return
    code = sys.modules[type(original).__module__]
    rotate_theirs = getattr(code, "apply_rotary_pos_emb", None)
    if rotate_theirs is None:
        raise ValueError("its rotary embedding is computed by code that the adapter does not know")
    tokens, width = 3, 8
    # The default device may be meta, where numbers cannot be compared.
    q = torch.arange(tokens * width, dtype=torch.float32, device="cpu").sin()
    q = q.view(1, 1, tokens, width)
    angles = torch.arange(tokens * width // 2, dtype=torch.float32, device="cpu")
    angles = angles.view(1, tokens, width // 2)
    both = torch.cat([angles, angles], -1)
    theirs = rotate_theirs(q, q, both.cos(), both.sin())[0]
    ours = rotate(q, Rotary(angles.cos().unsqueeze(1), angles.sin().unsqueeze(1)))
    if theirs.shape != ours.shape or not torch.allclose(theirs, ours, atol=1e-6):
        raise ValueError("its rotary embedding pairs other coordinates than Llama's")


class GPT2(Hub):
    """GPT-2, whose matrices are stored as (inputs, outputs)."""

    moved = ("c_attn", "c_proj", "attn_dropout", "resid_dropout")
    known = (
        *Hub.known,
        "embed_dim",
        "reorder_and_upcast_attn",  # The order of operations in half precision.
        "scale_attn_by_inverse_layer_idx",
        "scale_attn_weights",
        "split_size",
    )

    def read(self, original: Any) -> Projections:
        qkv, proj = original.c_attn, original.c_proj
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
    known = (*Hub.known, "head_size", "rotary_ndims")

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
    inner_known = (*Hub.known, "all_head_size", "attention_head_size", "dropout", "is_decoder")
    output_known = ("LayerNorm", "dropout")

    def check_options(self, original: Any) -> None:
        super().check_options(original)
        adapter = type(self).__name__
        check_options(original.self, {"query", "key", "value", *self.inner_known}, adapter)
        check_options(original.output, {"dense", *self.output_known}, adapter)
        for child in (original.self, original.output):
            check_hooks(child, "it")

    def read(self, original: Any) -> Projections:
        inner, output = original.self, original.output
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

    def forward(self, *values: Any, **named: Any) -> tuple[Tensor, None]:
        out, weights = super().forward(*values, **named)
        x = named["hidden_states"] if "hidden_states" in named else values[0]
        return self.output.LayerNorm(out + x), weights


class Torch(Adapter):
    """torch.nn.MultiheadAttention, as self-attention or as cross-attention.

    The keys and values of cross-attention are those of one tensor, the memory.
    """

    adds_to_logits = False
    moved = ("in_proj_weight", "in_proj_bias", "out_proj")
    known = (
        "add_zero_attn",
        "batch_first",
        "bias_k",
        "bias_v",
        "dropout",
        "embed_dim",
        "head_dim",
        "k_proj_weight",
        "kdim",
        "num_heads",
        "q_proj_weight",
        "v_proj_weight",
        "vdim",
    )

    @classmethod
    def check_place(cls, parent: nn.Module, name: str, spec: AttentionSpec) -> None:
        problem = spec.find_cross_problem()
        if problem and reads_memory(parent, name):
            raise ValueError(f"{describe_cross_problem(problem)}; name it in `skip` to keep it")

    def check_call(self, values: tuple[Any, ...], named: dict[str, Any]) -> None:
        arguments = dict(zip(("query", "key", "value"), values, strict=False)) | named
        problem = self.find_problem(arguments["query"], arguments["key"], arguments["value"])
        if problem:
            raise self.refusal(problem)

    def detach(self) -> None:
        super().detach()
        # nn.TransformerEncoderLayer reads it to find out that its fused kernel does not apply.
        self.original.in_proj_bias = None

    def read(self, original: nn.MultiheadAttention) -> Projections:
        if original.in_proj_weight is None or original.bias_k is not None or original.add_zero_attn:
            raise ValueError("it has keys or values of another width, or additional ones")
        return Projections(
            heads=original.num_heads,
            qkv=linear(original.in_proj_weight, original.in_proj_bias),
            proj=original.out_proj,
            attn_drop=original.dropout,
        )

    def find_problem(self, query: Tensor, key: Tensor, value: Tensor) -> str:
        """Return why the layer cannot compute a call with these tensors, or an empty text."""
        if query.is_nested:
            return "it is called with nested tensors"
        if not is_same(key, value):
            return "it is called with other values than keys, which the layer cannot separate"
        if not is_same(query, key) and self.layer.cross_problem:
            return describe_cross_problem(self.layer.cross_problem)
        return ""

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, None]:
        """Return the output and None in place of the weights.

        Boolean masks are True where a query must not attend. Raises ValueError, which begins with
        the path of the layer, for a call that the layer cannot compute.
        """
        problem = self.find_problem(query, key, value)
        if problem:
            raise self.refusal(problem)
        if is_causal and attn_mask is None:
            raise self.refusal("it is called with `is_causal` and without `attn_mask`")
        x = self._to_batches(query)
        memory = None if is_same(query, key) else self._to_batches(key)
        if attn_mask is not None and attn_mask.ndim == 3:
            attn_mask = attn_mask.unflatten(0, (-1, self.num_heads))
        padding = None
        if key_padding_mask is not None:
            padding = key_padding_mask.view(-1, 1, 1, key_padding_mask.shape[-1])
        masks = [mask for mask in (attn_mask, padding) if mask is not None]
        mask = None
        if len(masks) == 1 and masks[0].dtype == torch.bool:
            mask = ~masks[0]
        elif masks:
            zero, hidden = x.new_zeros(()), x.new_tensor(float("-inf"))
            added = [torch.where(m, hidden, zero) if m.dtype == torch.bool else m for m in masks]
            mask = functools.reduce(torch.add, added)
        out = self.layer(x, mask, memory=memory)
        if query.ndim == 2:
            return out.squeeze(0), None
        return out if self.batch_first else out.transpose(0, 1), None

    def _to_batches(self, tokens: Tensor) -> Tensor:
        """Return tokens (B, n, d) of a batch in the module's order, or of one sequence (n, d)."""
        if tokens.ndim == 2:
            return tokens.unsqueeze(0)
        return tokens if self.batch_first else tokens.transpose(0, 1)


def reads_memory(parent: nn.Module, name: str) -> bool:
    """Return True if the class of `parent` calls its child `name` as cross-attention.

    False also stands for a class whose calls are not known; the call itself is then checked.
    """
    if isinstance(parent, nn.TransformerDecoderLayer):
        return name == "multihead_attn"
    # mmsegmentation's MixVisionTransformer and Twins: keys are those of a smaller map.
    bases = {base.__name__ for base in type(parent).__mro__}
    return "EfficientMultiheadAttention" in bases and getattr(parent, "sr_ratio", 1) > 1


def describe_cross_problem(problem: str) -> str:
    """Return the reason of `AttentionSpec.find_cross_problem` without its remedy for YAML."""
    return f"its keys belong to another sequence: {problem.partition(';')[0]}"


def is_same(a: Tensor, b: Tensor) -> bool:
    """Return True if both are one tensor, or equal views of one tensor (mmcv transposes twice)."""
    if a is b:
        return True
    if a.shape != b.shape or a.stride() != b.stride() or a.dtype != b.dtype:
        return False
    is_one_storage = a.untyped_storage()._cdata == b.untyped_storage()._cdata
    return bool(is_one_storage and a.storage_offset() == b.storage_offset())
