"""Adapter of the attention modules of transformers for `replace_attention`, and its cache.

`Hub` fits most classes of decoders and vision transformers; transformers_families.py has the
classes with other names or further steps.

Shapes: B batch, n tokens, m tokens of a memory or of a cache, d width, H heads, D head width.
"""

import inspect
import sys
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from lit_attn.attention.cache import KeyValues
from lit_attn.attention.rotary import Rotary
from lit_attn.attention.spec import AttentionSpec
from lit_attn.private_names.of_transformers import read_implementation
from lit_attn.replace.adapter import Adapter
from lit_attn.replace.projections import JointNorm, Projections, join
from lit_attn.replace.rotary_layouts import Angles, check_rotation, pair_halves, pick_angles

IMPLEMENTATIONS = (None, "eager", "sdpa")
"""Values of `attn_implementation` whose masks the layer can apply."""

CROSS_ATTENTION = "it is cross-attention of transformers, which no adapter of its class reads"


class Hub(Adapter):
    """Attention with separate q_proj, k_proj, v_proj and o_proj: Llama, Mistral, Qwen, ViT, DINOv2.

    Masks, rotary embeddings and key/value caches are those of transformers; a mask contains the
    sliding window. In training, and where FLOPs are counted, nothing is cached. The layer forms no
    weights, so a call with `output_attentions` is refused.

    A subclass for other names of the projections sets `input_names`, `output_name` and `moved`.
    """

    keeps_tokens = True
    adds_to_logits = False
    moved: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")

    input_names: ClassVar[tuple[str, ...]] = ("q_proj", "k_proj", "v_proj")
    """Projections to q, k and v, or one projection with the rows of all three."""

    output_name: ClassVar[str] = "o_proj"
    """Projection of the heads to the output."""

    norm_names: ClassVar[tuple[str, str]] = ("q_norm", "k_norm")
    """Norms of queries and keys, which a class may lack."""

    angles: ClassVar[Angles] = "halves"
    """Layout of the cosines and sines that the model passes."""

    pairs_neighbours: ClassVar[bool] = False
    """True if the model rotates coordinates 2j and 2j + 1 of a head together, not its halves."""

    known: ClassVar[tuple[str, ...]] = (
        "_attn_implementation",
        "attention_dropout",
        "attention_type",  # The mask of a layer contains its window.
        "config",
        "head_dim",
        "hidden_size",
        "is_causal",
        "is_cross_attention",
        "layer_idx",
        "layer_type",
        "layer_types",
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
        if getattr(spec.similarity, "prior_scope", "") == "position":
            raise ValueError(
                "similarity: `prior_scope: position` has parameters for places of a text, which "
                "padding on the left moves; write `prior_scope: head`"
            )
        inner = getattr(original, "self", original)
        # A mask of transformers contains the order, which a layer cannot read from it.
        is_causal = self.read_order(inner)
        super().__init__(original, spec.with_order(is_causal))
        self.names = tuple(inspect.signature(original.forward).parameters)
        self.is_causal = is_causal
        self.index = getattr(inner, "layer_idx", 0)
        self.has_rotary = bool(getattr(original, "use_rope", True))

    def detach(self) -> None:
        super().detach()
        if not self.layer.spec.similarity.has_logits and hasattr(self.original, "config"):
            self.original.config.use_cache = False

    def check_options(self, original: Any) -> None:
        super().check_options(original)
        implementation = read_implementation(read_config(original))
        if implementation not in IMPLEMENTATIONS:
            raise ValueError(
                f"its attn_implementation is {implementation}, whose masks the layer cannot apply; "
                "load the model with attn_implementation='sdpa' or 'eager'"
            )
        check_rotation(original, self.angles, self.pairs_neighbours)

    def read(self, original: Any) -> Projections:
        parts = [getattr(original, name) for name in self.input_names]
        proj = getattr(original, self.output_name)
        qkv = join(*parts)
        query_rows = proj.in_features
        key_rows = (qkv.out_features - query_rows) // 2
        if len(parts) == 3:
            rows = [part.out_features for part in parts]
            if rows != [query_rows, key_rows, key_rows]:
                raise ValueError(
                    f"its projections to q, k and v have {rows[0]}, {rows[1]} and {rows[2]} "
                    f"outputs, and its output projection has {query_rows} inputs, which do not "
                    "form heads of one width"
                )
        q_norm, k_norm = self.norm_names
        source = Projections(
            heads=query_rows // original.head_dim,
            key_heads=key_rows // original.head_dim,
            qkv=qkv,
            proj=proj,
            q_norm=self.read_norm(original, q_norm, query_rows),
            k_norm=self.read_norm(original, k_norm, key_rows),
            attn_drop=self.read_dropout(original),
            scale=self.read_scale(original),
        )
        if self.pairs_neighbours:
            return pair_halves(source, self.read_rotated_width(original))
        return source

    def read_rotated_width(self, original: Any) -> int:
        """Return the number of coordinates of a head that are rotated."""
        rotary = getattr(read_config(original), "rope_parameters", None) or {}
        return int(original.head_dim * rotary.get("partial_rotary_factor", 1.0))

    def read_norm(self, original: Any, name: str, rows: int) -> nn.Module | None:
        """Return the norm `name` for vectors of one head, or None if the module has none.

        `rows` is the width of all heads. Raises ValueError for a norm whose width is not known.
        """
        norm: nn.Module | None = getattr(original, name, None)
        if norm is None or isinstance(norm, nn.Identity):
            return None
        shape = tuple(getattr(norm, "weight", torch.empty(0)).shape)
        if shape == (original.head_dim,) or shape == (rows // original.head_dim, original.head_dim):
            # One norm for every head, or one of each head.
            return norm
        if shape == (rows,):
            # OLMo 2: the norm of all heads at once.
            return JointNorm(norm)
        raise ValueError(
            f"its `{name}` has weights of shape {shape}, neither of one head nor of all heads"
        )

    def read_order(self, original: Any) -> bool:
        """Return True if no token attends to a later one."""
        is_causal: bool = original.is_causal
        return is_causal

    def read_dropout(self, original: Any) -> float:
        """Return the rate of the weights' dropout."""
        rate: float = original.attention_dropout
        return rate

    def read_scale(self, original: Any) -> float:
        """Return the factor of the logits."""
        scale: float = original.scaling
        return scale

    def forward(self, *values: Any, **named: Any) -> tuple[Any, ...]:
        """Return the output and None, in place of the weights, for the arguments of the module.

        Raises ValueError, which begins with the path of the layer, for a call that the layer cannot
        compute.
        """
        arguments = self.name_arguments(values, named)
        mask = arguments.get("attention_mask")
        return self.attend(arguments, mask), None

    def name_arguments(self, values: tuple[Any, ...], named: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments of a call by name; raise ValueError if it asks for weights."""
        arguments = dict(zip(self.names, values, strict=False)) | named
        if arguments.get("output_attentions") or is_collecting_weights():
            raise self.refusal("`output_attentions`: a replaced layer returns no weights")
        return arguments

    def attend(
        self, arguments: dict[str, Any], mask: Tensor | None, bias: Tensor | None = None
    ) -> Tensor:
        """Return the output of self-attention, (B, n, d); `bias` is added to the logits."""
        x = arguments["hidden_states"]
        if mask is not None and mask.ndim != 4:
            raise self.refusal(
                f"its mask has {mask.ndim} axes; set attn_implementation to sdpa or eager"
            )
        is_causal = arguments.get("is_causal")
        if is_causal is None:
            is_causal = self.is_causal
        # A mask of transformers contains the order.
        is_ordered = is_causal and mask is None
        mask = join_bias(mask, bias)
        cache = self.find_cache(arguments, x)
        if mask is not None and cache is not None:
            visible = cache.length + x.shape[1]
            mask = mask[..., -visible:]
        return self.layer(x, mask, is_ordered, self.find_rotary(arguments), cache)

    def find_cache(self, arguments: dict[str, Any], x: Tensor) -> "HubCache | None":
        """Return the cache of self-attention of a call, or None if nothing is cached."""
        past = arguments.get("past_key_values", arguments.get("layer_past"))
        if past is None or self.training or x.is_meta:
            return None
        self.check_cache()
        self_past = getattr(past, "self_attention_cache", past)
        return self.open_cache(self_past, self.layer.spec.window, x.shape[1])

    def open_cache(self, past: Any, window: int | None, new_tokens: int) -> "HubCache":
        """Return what `past` holds of this layer; raise ValueError if it cannot serve the layer."""
        try:
            return HubCache(past, self.index, window, new_tokens)
        except ValueError as error:
            raise self.refusal(str(error)) from error

    def check_cache(self) -> None:
        """Raise ValueError for a layer without keys and values."""
        if self.layer.spec.mixer is not None:
            raise ValueError(
                f"{self.layer.target} has no keys and values to cache; "
                "call the model with use_cache=False"
            )
        similarity = self.layer.spec.similarity
        if not similarity.has_logits:
            raise ValueError(
                f"'{similarity.kind}' attention has no keys and values to cache; "
                "call the model with use_cache=False"
            )

    def find_rotary(self, arguments: dict[str, Any]) -> Rotary | None:
        """Return the rotation of a call, or None without one.

        transformers passes cosines and sines (B, n, D), with each angle twice, or as in `angles`.
        """
        positions = arguments.get("position_embeddings")
        if positions is None or not self.has_rotary:
            return None
        cos, sin = positions
        cos = pick_angles(cos, self.angles)
        sin = pick_angles(sin, self.angles)
        return Rotary(cos.unsqueeze(1), sin.unsqueeze(1))


def is_collecting_weights() -> bool:
    """Return True if the running model of transformers collects weights from its layers.

    Some classes (GPT-2) collect them without an argument of the call of their layers.
    """
    if torch.compiler.is_compiling():
        return False
    capturing = sys.modules.get("transformers.utils.output_capturing")
    collector = getattr(capturing, "_active_collector", None)
    if collector is None:
        return False
    outputs = collector.get() or {}
    return any(name.endswith("attentions") for name in outputs)


def join_bias(mask: Tensor | None, bias: Tensor | None) -> Tensor | None:
    """Return a mask of transformers and a position bias as one additive mask, or None."""
    if mask is None:
        return bias
    if bias is None:
        return mask
    if mask.dtype == torch.bool:
        return bias.masked_fill(~mask, float("-inf"))
    return bias + mask


def read_config(original: Any) -> Any:
    """Return the configuration of a module of transformers, or of BERT's inner one, or None."""
    return getattr(getattr(original, "self", original), "config", None)


GROWING = (
    "DynamicLayer",
    "DynamicSlidingWindowLayer",
    "LinearAttentionAndFullAttentionLayer",
    "LinearAttentionAndSlidingWindowAttentionLayer",
)
"""Classes of the layers of a cache that keep every stored vector as it is."""


class HubCache(KeyValues):
    """Cache of transformers, in which one vector has everything that is kept of a token.

    The vectors (B, 1, m, F) are stored as the keys of the cache, so that selecting and removing
    samples and tokens works as usual. The values of the cache have a width of 0.

    A layer that also keeps sums over tokens stores them as `lit_attn_totals` of the cache's layer.
    The values of the cache are then (B, 1, 1, 1): the row of the sums that belongs to each sample.
    Selecting samples selects these numbers, and removing tokens removes them.
    """

    def __init__(self, past: Any, index: int, window: int | None, new_tokens: int) -> None:
        """Raise ValueError for a cache that does not keep vectors as they are, or lost the sums."""
        super().__init__(window)
        self.past = past
        self.index = index
        self.vectors: Tensor | None = None
        self.parts: list[Tensor] = []
        if index >= len(past.layers):
            return
        layer = past.layers[index]
        name = type(layer).__name__
        if name not in GROWING:
            raise ValueError(
                f"replaced attention needs a cache that grows, such as DynamicCache, not {name}"
            )
        self.position = past.get_seq_length(index)
        if self.position == 0:
            return
        if past.offloading:
            # The cache moves a layer to its device for `update`, and the layer reads it before.
            past.prefetch_stream.synchronize()
            layer.prefetch()
        self.vectors = layer.keys
        self.length = layer.get_mask_sizes(new_tokens)[0] - new_tokens
        if self.limit is not None:
            self.length = min(self.length, self.limit)
        if layer.values.shape[-1] > 0:
            self.totals = read_totals(layer)

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
        first_token = self.vectors.shape[-2] - self.length
        stored = self.vectors[:, 0, first_token:, start:stop]
        stored = stored.unflatten(-1, tokens.shape[2:]).to(new.dtype)
        return torch.cat([stored, tokens], 1).movedim(1, axis)

    def advance(self, n: int) -> None:
        if n == 0:
            # Cross-attention, whose memory is in the cache since the first call.
            return
        vectors = torch.cat(self.parts, -1).unsqueeze(1)
        if self.totals and self.vectors is not None:
            self.past.layers[self.index].values = self.vectors[..., :0]
        self.past.update(vectors, vectors[..., :0], self.index)
        if self.totals:
            layer = self.past.layers[self.index]
            layer.lit_attn_totals = self.totals
            layer.values = torch.arange(len(vectors), device=vectors.device).view(-1, 1, 1, 1)


def read_totals(layer: Any) -> dict[str, Tensor]:
    """Return the sums of a layer of a cache, with the samples that the cache has now.

    Raises ValueError if tokens were removed from the cache, or if another cache was made from it.
    """
    totals = getattr(layer, "lit_attn_totals", None)
    if totals is None or layer.values.numel() == 0:
        raise ValueError(
            "a replaced layer keeps sums over all tokens in this cache, and tokens were removed "
            "from it or it was made anew; call the model with use_cache=False, or compute the "
            "remaining tokens again"
        )
    rows = layer.values.flatten()
    return {name: total[rows.to(total.device)] for name, total in totals.items()}
