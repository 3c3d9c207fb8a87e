"""Adapters of decoders of transformers that are Llama's layer with small differences.

Shapes: B batch, n tokens, H heads, D head width.
"""

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from lit_attn.attention.normaliser import SinkConfig
from lit_attn.attention.spec import AttentionSpec
from lit_attn.private_names.of_transformers import read_implementation
from lit_attn.replace.projections import Projections, by_head
from lit_attn.replace.rotary_layouts import Angles
from lit_attn.replace.transformers_families import Phi
from lit_attn.replace.transformers_layers import Hub


class Starcoder2(Hub):
    """StarCoder2 and Seed-OSS: Llama's layer with a dropout of its output."""

    known = (*Hub.known, "residual_dropout")

    def read(self, original: Any) -> Projections:
        return super().read(original)._replace(proj_drop=original.residual_dropout)


class Nemotron(Hub):
    """Nemotron: Llama's layer with partial rotary embedding."""

    known = (*Hub.known, "partial_rotary_factor")


class Interleaved(Hub):
    """Cohere: rotary embedding of neighbouring coordinates, and optional norms of each head."""

    angles: ClassVar[Angles] = "neighbours"
    pairs_neighbours = True
    known = (*Hub.known, "use_qk_norm")


class Cohere2(Interleaved):
    """Cohere 2: rotary embedding in the layers with a window alone."""

    def __init__(self, original: Any, spec: AttentionSpec) -> None:
        super().__init__(original, spec)
        self.has_rotary = original.sliding_window is not None


class Glm(Interleaved):
    """GLM, Ernie 4.5 and Helium: rotary embedding, partial in GLM, of neighbouring coordinates."""

    angles = "halves"


class GptOss(Hub):
    """GPT-OSS: a learned sink of each head, which is our normaliser `sink`."""

    angles = "once"
    moved = (*Hub.moved, "sinks")

    def __init__(self, original: Any, spec: AttentionSpec) -> None:
        if spec.mixer is not None:
            super().__init__(original, spec)
            return
        if not spec.similarity.has_logits:
            raise ValueError(
                f"'{spec.similarity.kind}' attention has no logits, to which this module adds a "
                "sink"
            )
        if spec.normaliser.kind not in ("softmax", "sink"):
            raise ValueError(f"normaliser: '{spec.normaliser.kind}' has no place for its sinks")
        super().__init__(original, spec.model_copy(update={"normaliser": SinkConfig()}))
        self.layer.normaliser.logit = original.sinks


class Bloom(Hub):
    """BLOOM: ALiBi, which the model passes, and the sum with the skip connection."""

    adds_to_logits = True
    moved = ("query_key_value", "dense", "attention_dropout")
    known = (
        *Hub.known,
        "beta",
        "hidden_dropout",
        "inv_norm_factor",
        "pretraining_tp",
        "split_size",
    )

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
    known = (
        *Hub.known,
        "beta",
        "hidden_dropout",  # The block applies it.
        "inv_norm_factor",
        "max_position_embeddings",
        "multi_query",
        "new_decoder_architecture",
        "num_kv_heads",
        "split_size",
    )

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


class StableLm(Phi):
    """StableLM: Phi's names with `o_proj`, and optional norms of each head."""

    output_name = "o_proj"
    moved = ("q_proj", "k_proj", "v_proj", "o_proj", "q_layernorm", "k_layernorm")

    def read_norm(self, original: Any, name: str, rows: int) -> nn.Module | None:
        norm = getattr(original, name, None)
        return None if norm is None else HeadNorms(norm.norms)


class HeadNorms(nn.Module):
    """A norm of each head, (..., H, D) -> (..., H, D)."""

    def __init__(self, norms: nn.ModuleList) -> None:
        super().__init__()
        self.norms = norms

    def forward(self, x: Tensor) -> Tensor:
        heads = [norm(head) for norm, head in zip(self.norms, x.unbind(-2), strict=True)]
        return torch.stack(heads, -2)
