"""Adapter of the attention modules of transformers for `replace_attention`.

`Hub` reads most classes by their structure; transformers_families.py has those that do more.

Shapes: B batch, n tokens, m tokens of a memory or of a cache, d width, H heads, D head width.
"""

import inspect
import itertools
import sys
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from lit_attn.attention.compose import Composer, StaticConfig
from lit_attn.attention.normaliser import SinkConfig
from lit_attn.attention.rotary import Rotary
from lit_attn.attention.spec import AttentionSpec
from lit_attn.private_names.of_transformers import read_implementation
from lit_attn.replace.adapter import Adapter, check_options, check_projections, list_unread
from lit_attn.replace.projections import JointNorm, Projections, join
from lit_attn.replace.rotary_layouts import find_rotation, pair_halves, pick_angles
from lit_attn.replace.transformers_cache import HubCache

IMPLEMENTATIONS = (None, "eager", "sdpa")
"""Values of `attn_implementation` whose masks the layer can apply."""

CROSS_ATTENTION = "it is cross-attention of transformers, which no adapter of its class reads"

INPUT_NAMES = (
    ("q_proj", "k_proj", "v_proj"),
    ("qkv_proj",),
    ("Wqkv",),
    ("q_lin", "k_lin", "v_lin"),
)
"""Names of the projections to q, k and v, or of one projection with the rows of all three."""

OUTPUT_NAMES = (("o_proj",), ("out_proj",), ("dense",), ("Wo",), ("out_lin",))
"""Names of the projection of the heads to the output."""

NORM_NAMES = (("q_norm", "k_norm"), ("q_layernorm", "k_layernorm"))
"""Names of the norms of queries and keys."""

WIDTH_NAMES = ("head_dim", "attention_head_size")
"""Names of the width of a head."""

HEAD_NAMES = ("num_heads", "n_heads", "num_attention_heads")
"""Names of the number of heads."""

CAP_NAMES = ("attn_logit_softcapping",)
"""Names of the soft cap of the logits."""

RATE_NAMES = ("attention_dropout", "dropout")
"""Names of the dropout of the weights."""

OUTPUT_RATE_NAMES = ("residual_dropout", "out_drop")
"""Names of the dropout of the output."""

MOVED_NAMES = (
    *itertools.chain(*INPUT_NAMES, *OUTPUT_NAMES, *NORM_NAMES),
    "sinks",
    "out_drop",
)
"""Names of what the new layer takes over."""

MEMORY_ARGUMENTS = ("key_value_states", "encoder_hidden_states")
"""Arguments with the tokens that cross-attention attends to."""

READ_ARGUMENTS = frozenset(
    (
        "hidden_states",
        "attention_mask",
        "position_embeddings",
        "past_key_values",
        "layer_past",
        "is_causal",
        # Without effect on the output, or contained in the arguments above.
        "position_ids",
        "cache_position",
        "use_cache",
        "output_attentions",
        "kwargs",
    )
)
"""Arguments that `Hub` reads, or that change no output."""


class Hub(Adapter):
    """Attention with projections to q, k and v and to the output: Llama, Mistral, Qwen, ViT, CLIP.

    The layer is read by what it has: separate or joined projections, norms of queries and keys, a
    cap of the logits, sinks, a scale, rates of dropout, and the layout of its rotary embedding.
    `lit_attn.replace.layer_trial` then compares it with the standard layer.

    Masks, rotary embeddings and key/value caches are those of transformers; a mask contains the
    sliding window. In training, and where FLOPs are counted, nothing is cached. The layer forms no
    weights, so a call with `output_attentions` is refused.
    """

    keeps_tokens = True
    adds_to_logits = False
    moved: tuple[str, ...] = MOVED_NAMES

    known: ClassVar[tuple[str, ...]] = (
        *CAP_NAMES,
        *RATE_NAMES,
        *OUTPUT_RATE_NAMES,
        *HEAD_NAMES,
        *WIDTH_NAMES,
        "attention_type",  # The mask of a layer contains its window.
        "config",
        "is_causal",
        "is_cross_attention",
        "is_decoder",
        "is_sliding",
        "layer_idx",
        "layer_type",
        "num_key_value_groups",
        "num_key_value_heads",
        "rotary_emb",
        "rotary_ndims",
        "scale",
        "scaling",
        "sliding_window",
        "use_rope",
        "_attn_implementation",
        "layer_types",
        "hidden_size",
        "qk_layernorm",
        "use_qk_norm",
        "use_bidirectional_attention",
    )
    read_arguments: ClassVar[frozenset[str]] = READ_ARGUMENTS

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
        cap = read_cap(original)
        sinks = getattr(original, "sinks", None)
        super().__init__(original, fit_spec(spec.with_order(is_causal), cap, sinks))
        if spec.mixer is None and cap is not None:
            part = self.layer.spec.compose
            self.layer.composers = nn.ModuleDict({"pre": SoftCap(part, cap)})
        if spec.mixer is None and sinks is not None:
            self.layer.normaliser.logit = sinks
        self.names = tuple(inspect.signature(original.forward).parameters)
        self.is_causal = is_causal
        self.index = getattr(inner, "layer_idx", 0)
        self.rotation = find_rotation(original)
        self.has_rotary = True

    def detach(self) -> None:
        super().detach()
        if not self.layer.spec.similarity.has_logits and hasattr(self.original, "config"):
            self.original.config.use_cache = False

    def check_options(self, original: Any) -> None:
        known = {*self.moved, *self.known, *list_unread(original)}
        check_options(original, known, type(self).__name__)
        check_projections(original, self.moved)
        implementation = read_implementation(read_config(original))
        if implementation not in IMPLEMENTATIONS:
            raise ValueError(
                f"its attn_implementation is {implementation}, whose masks the layer cannot apply; "
                "load the model with attn_implementation='sdpa' or 'eager'"
            )

    def read(self, original: Any) -> Projections:
        parts = [read_projection(original, name) for name in find_names(original, INPUT_NAMES)]
        proj = read_projection(original, find_names(original, OUTPUT_NAMES)[0])
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
        width = read_head_width(original, query_rows)
        q_norm, k_norm = find_names(original, NORM_NAMES) or ("q_norm", "k_norm")
        source = Projections(
            heads=query_rows // width,
            key_heads=key_rows // width,
            qkv=qkv,
            proj=proj,
            q_norm=read_norm(original, q_norm, query_rows, width),
            k_norm=read_norm(original, k_norm, key_rows, width),
            attn_drop=read_rate(original, RATE_NAMES),
            proj_drop=read_rate(original, OUTPUT_RATE_NAMES),
            scale=getattr(original, "scaling", getattr(original, "scale", None)),
        )
        rotation = find_rotation(original)
        if rotation is not None and rotation.pairs_neighbours:
            return pair_halves(source, self.read_rotated_width(original))
        return source

    def read_rotated_width(self, original: Any) -> int:
        """Return the number of coordinates of a head that are rotated."""
        width: int | None = getattr(original, "rotary_ndims", None)
        if width is not None:
            return width
        rotary = getattr(read_config(original), "rope_parameters", None) or {}
        return int(original.head_dim * rotary.get("partial_rotary_factor", 1.0))

    def read_order(self, original: Any) -> bool:
        """Return True if no token attends to a later one."""
        return bool(getattr(original, "is_causal", False))

    def forward(self, *values: Any, **named: Any) -> tuple[Any, ...]:
        """Return the output and None, in place of the weights, for the arguments of the module.

        Raises ValueError, which begins with the path of the layer, for a call that the layer cannot
        compute.
        """
        arguments = self.name_arguments(values, named)
        for name in self.names:
            if name not in self.read_arguments and arguments.get(name) is not None:
                raise self.refusal(f"it is called with `{name}`, which its adapter does not read")
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

        transformers passes cosines and sines (B, n, D), with each angle twice, or as in `rotation`.
        """
        positions = arguments.get("position_embeddings")
        if getattr(self.original, "rotary_emb", None) is not None:
            # The layer computes the angles itself, in the precision of its values.
            positions = self.original.rotary_emb(
                arguments["hidden_states"], arguments["position_ids"]
            )
        if positions is None or self.rotation is None or not self.has_rotary:
            return None
        cos, sin = positions
        cos = pick_angles(cos, self.rotation.angles)
        sin = pick_angles(sin, self.rotation.angles)
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


def find_names(original: Any, choices: Sequence[tuple[str, ...]]) -> tuple[str, ...]:
    """Return the first of `choices` whose names `original` has as modules, or an empty tuple."""
    for names in choices:
        if all(isinstance(getattr(original, name, None), nn.Module) for name in names):
            return names
    return ()


def has_structure(original: nn.Module) -> bool:
    """Return True if a module has projections that Hub reads, and is called with tokens."""
    has_projections = find_names(original, INPUT_NAMES) and find_names(original, OUTPUT_NAMES)
    names = inspect.signature(original.forward).parameters
    reads_memory = any(name in names for name in MEMORY_ARGUMENTS)
    return bool(has_projections) and "hidden_states" in names and not reads_memory


def read_projection(original: Any, name: str) -> Any:
    """Return a projection, which a wrapper may hold as its only child `linear` (Moshi)."""
    projection = getattr(original, name)
    children = dict(projection.named_children())
    return children["linear"] if list(children) == ["linear"] else projection


def read_head_width(original: Any, rows: int) -> int:
    """Return the width of a head; `rows` is that of all heads."""
    for name in WIDTH_NAMES:
        width = getattr(original, name, None)
        if isinstance(width, int):
            return width
    for name in HEAD_NAMES:
        heads = getattr(original, name, None)
        if isinstance(heads, int):
            return rows // heads
    raise ValueError("it has no attribute for the width or the number of its heads")


def read_norm(original: Any, name: str, rows: int, width: int) -> nn.Module | None:
    """Return the norm `name` for vectors of one head, or None if the module has none.

    `rows` is the width of all heads. Raises ValueError for a norm whose width is not known.
    """
    norm: nn.Module | None = getattr(original, name, None)
    if norm is None or isinstance(norm, nn.Identity):
        return None
    norms = getattr(norm, "norms", None)
    if isinstance(norms, nn.ModuleList):
        # StableLM: a module of each head.
        return HeadNorms(norms)
    shape = tuple(getattr(norm, "weight", torch.empty(0)).shape)
    if shape == (width,) or shape == (rows // width, width):
        # One norm for every head, or one of each head.
        return norm
    if shape == (rows,):
        # OLMo 2: the norm of all heads at once.
        return JointNorm(norm)
    raise ValueError(
        f"its `{name}` has weights of shape {shape}, neither of one head nor of all heads"
    )


def read_rate(original: Any, names: Sequence[str]) -> float:
    """Return the rate of the first dropout in `names`, which is a module or a number, or 0."""
    for name in names:
        rate = getattr(original, name, None)
        rate = getattr(rate, "p", rate)
        if isinstance(rate, int | float):
            return float(rate)
    return 0.0


def read_cap(original: nn.Module) -> float | None:
    """Return the cap of the logits, or None if the module has none or its code ignores it."""
    unread = list_unread(original)
    for name in CAP_NAMES:
        cap: float | None = getattr(original, name, None)
        if cap is not None and name not in unread:
            return cap
    return None


def fit_spec(spec: AttentionSpec, cap: float | None, sinks: Tensor | None) -> AttentionSpec:
    """Return `spec` with a place for a cap and for sinks; raise ValueError if it has none."""
    if spec.mixer is not None:
        return spec
    if cap is not None:
        if not spec.similarity.has_logits:
            raise ValueError(
                f"'{spec.similarity.kind}' attention has no logits, which this module caps"
            )
        if spec.compose.places():
            raise ValueError(f"compose: '{spec.compose.kind}' would mix logits that it caps")
        spec = spec.model_copy(update={"compose": StaticConfig(place="pre")})
    if sinks is not None:
        if not spec.similarity.has_logits:
            raise ValueError(
                f"'{spec.similarity.kind}' attention has no logits, to which this module adds a "
                "sink"
            )
        if spec.normaliser.kind not in ("softmax", "sink"):
            raise ValueError(f"normaliser: '{spec.normaliser.kind}' has no place for its sinks")
        spec = spec.model_copy(update={"normaliser": SinkConfig()})
    return spec


class SoftCap(Composer):
    """Soft cap of logits: cap tanh(a / cap) for a (B, H, c, m)."""

    def __init__(self, part: Any, cap: float) -> None:
        nn.Module.__init__(self)
        self.part = part
        self.cap = cap

    def forward(self, a: Tensor, query: None, key: None) -> Tensor:
        return self.cap * torch.tanh(a / self.cap)


class HeadNorms(nn.Module):
    """A norm of each head, (..., H, D) -> (..., H, D)."""

    def __init__(self, norms: nn.ModuleList) -> None:
        super().__init__()
        self.norms = norms

    def forward(self, x: Tensor) -> Tensor:
        heads = [norm(head) for norm, head in zip(self.norms, x.unbind(-2), strict=True)]
        return torch.stack(heads, -2)
