"""Adapters of the attention modules of PyTorch and transformers for `replace_attention`.

Shapes: B batch, n tokens, m cached tokens, d width, H heads, D head width.
"""

import functools
import inspect
from typing import Any

import torch
from torch import Tensor, nn

from lit_attn.attention.cache import KeyValues
from lit_attn.attention.rotary import Rotary
from lit_attn.attention.spec import AttentionSpec
from lit_attn.models.replace import Adapter, Projections, by_head, join, linear


class Hub(Adapter):
    """Attention with q_proj, k_proj, v_proj and o_proj: ViT, Llama, Mistral, Qwen2, Qwen3.

    Masks, rotary embeddings and key/value caches are those of transformers. In training, and
    where FLOPs are counted, nothing is cached.
    """

    adds_to_logits = False
    moved: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")

    def __init__(self, original: Any, spec: AttentionSpec) -> None:
        if getattr(original, "is_cross_attention", False):
            raise ValueError("cross-attention cannot be replaced")
        super().__init__(original, spec)
        self.names = tuple(inspect.signature(original.forward).parameters)
        inner = getattr(original, "self", original)
        self.is_causal, self.index = inner.is_causal, getattr(inner, "layer_idx", 0)
        if not spec.similarity.has_logits and hasattr(original, "config"):
            original.config.use_cache = False

    def read(self, original: Any) -> Projections:
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
            raise ValueError("replaced attention needs attn_implementation sdpa or eager")
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
        if (positions := arguments.get("position_embeddings")) is not None:
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


class GPT2(Hub):
    """GPT-2, whose matrices are stored as (inputs, outputs)."""

    moved = ("c_attn", "c_proj", "attn_dropout", "resid_dropout")

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

    moved = ()

    def read(self, original: Any) -> Projections:
        inner, output = original.self, original.output
        source = Projections(
            heads=inner.num_attention_heads,
            qkv=join(inner.query, inner.key, inner.value),
            proj=output.dense,
            attn_drop=inner.dropout.p,
            proj_drop=output.dropout.p,
            scale=inner.scaling,
        )
        del inner.query, inner.key, inner.value, output.dense
        return source

    def forward(self, *values: Any, **named: Any) -> tuple[Tensor, None]:
        out, weights = super().forward(*values, **named)
        x = named["hidden_states"] if "hidden_states" in named else values[0]
        return self.output.LayerNorm(out + x), weights


class Torch(Adapter):
    """torch.nn.MultiheadAttention as self-attention, also in nn.TransformerEncoderLayer."""

    adds_to_logits = False
    moved = ("in_proj_weight", "in_proj_bias", "out_proj")

    def __init__(self, original: Any, spec: AttentionSpec) -> None:
        super().__init__(original, spec)
        # nn.TransformerEncoderLayer reads it to find out that its fused kernel does not apply.
        original.in_proj_bias = None

    def read(self, original: nn.MultiheadAttention) -> Projections:
        if original.in_proj_weight is None or original.bias_k is not None or original.add_zero_attn:
            raise ValueError("it has keys or values of another width, or additional ones")
        return Projections(
            heads=original.num_heads,
            qkv=linear(original.in_proj_weight, original.in_proj_bias),
            proj=original.out_proj,
            attn_drop=original.dropout,
        )

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

        Raises ValueError for cross-attention. Boolean masks are True where a query must not attend.
        """
        if query is not key or key is not value:
            raise ValueError("cross-attention cannot be replaced")
        x = query if self.batch_first else query.transpose(0, 1)
        if attn_mask is not None and attn_mask.ndim == 3:
            attn_mask = attn_mask.unflatten(0, (-1, self.num_heads))
        padding = None if key_padding_mask is None else key_padding_mask[:, None, None]
        masks = [mask for mask in (attn_mask, padding) if mask is not None]
        mask = None
        if len(masks) == 1 and masks[0].dtype == torch.bool:
            mask = ~masks[0]
        elif masks:
            zero, hidden = x.new_zeros(()), x.new_tensor(float("-inf"))
            added = [torch.where(m, hidden, zero) if m.dtype == torch.bool else m for m in masks]
            mask = functools.reduce(torch.add, added)
        out = self.layer(x, mask)
        return out if self.batch_first else out.transpose(0, 1), None
