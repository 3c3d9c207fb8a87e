"""Comparison of a model's attention layers with their formulas, before the first cell on a GPU.

A GPU has kernels that no CPU has, and a wrong one changes results without an error. Each different
call of a layer is compared once in the precision of the cell, as
`lit-attn doctor` compares presets: values and gradients, small and uncompiled.
"""

from collections.abc import Mapping
from functools import cache
from typing import Any, NamedTuple

import torch

from lit_attn.attention import flex_support
from lit_attn.attention.layer import Attention, attn_layer
from lit_attn.attention.spec import PRESETS, AttentionSpec
from lit_attn.checks.comparison import (
    BF16,
    FLOAT32,
    FP16,
    TF32,
    Case,
    Shape,
    build_noisy_layer,
    check_layer,
)
from lit_attn.data.base import Data
from lit_attn.models import factory
from lit_attn.models.base import Model
from lit_attn.models.recorded_calls import recorded_calls
from lit_attn.schema.errors import ConfigError, program
from lit_attn.schema.sources import PACKAGE

MAX_TOKENS = 33
"""Tokens of a check beyond those of a window. No block of a kernel divides them."""


class AttentionCall(NamedTuple):
    """Call of an attention layer: everything that can decide how the layer is computed.

    `spec` has parts of this package only. `has_mask`: the call has a mask beside causal order.
    `is_cross`: keys and values come from other tokens. `is_local`: no token attends to itself.
    """

    spec: AttentionSpec
    heads: int
    head_dim: int
    tokens: int
    is_causal: bool
    has_mask: bool
    is_cross: bool
    is_local: bool

    @property
    def preset(self) -> str:
        """Name of the preset with this specification, or `own parts`."""
        for name, spec in PRESETS.items():
            if spec == self.spec:
                return name
        return "own parts"


def find_calls(model: Model, data: Data) -> list[AttentionCall]:
    """Return the different calls of attention layers in `model`, from a pass without values.

    Layers of a user (`kind: module`) are not among them.
    """
    network = factory.build(model, data, "meta").eval()
    network.requires_grad_(False)
    recorder = recorded_calls(network, Attention, describe_call)
    with torch.no_grad(), factory.model_errors(), recorder as calls:
        network(*data.signature().sample())
    return list(dict.fromkeys(calls))


def describe_call(layer: Attention, arguments: Mapping[str, Any]) -> AttentionCall:
    """Return the call of `layer` with these arguments."""
    most_tokens = MAX_TOKENS + (layer.spec.window or 0)
    return AttentionCall(
        spec=without_foreign_parts(layer.spec),
        heads=layer.num_heads,
        head_dim=layer.head_dim,
        tokens=min(arguments["x"].shape[1], most_tokens),
        is_causal=bool(arguments.get("is_causal", False)),
        has_mask=arguments.get("attn_mask") is not None,
        is_cross=arguments.get("memory") is not None,
        is_local=layer.local_self_attention,
    )


def without_foreign_parts(spec: AttentionSpec) -> AttentionSpec:
    """Return `spec` with the default in the place of each part from outside of this package.

    The mistake of a user's part is no reason to refuse a path to all layers.
    """
    changes = {}
    for family, part in spec.parts.items():
        if not type(part).__module__.startswith(f"{PACKAGE.name}."):
            changes[family] = AttentionSpec.model_fields[family].default
    return spec.model_copy(update=changes)


BATCH = 2

PRECISIONS = {"fp32": FLOAT32, "tf32": TF32, "bf16": BF16, "fp16": FP16}
"""Arithmetic of each `training.precision`."""


def needs_comparison(device: torch.device) -> bool:
    """Return True for a device whose kernels the tests of this package do not run."""
    return device.type == "cuda"


def require_formulas(model: Model, data: Data, precision: str, device: torch.device) -> None:
    """Raise ConfigError if an attention layer of `model` disagrees with its formula on `device`."""
    for call in find_calls(model, data):
        failure = compare_call(call, precision, device)
        if failure:
            raise ConfigError(
                f"model: attention: on this device the layer disagrees with its formula: {failure}."
                f" `{program('doctor')}` compares every layer; train on another device, or with"
                " another version of torch"
            )


@cache
def compare_call(call: AttentionCall, precision: str, device: torch.device) -> str:
    """Return how a layer disagrees with its formula, or an empty text."""
    layer, case = build_case(call, precision)
    # The kernels of flex_attention are compiled, which takes seconds for each layer.
    with flex_support.left_out():
        return check_layer(call.preset, "", layer.to(device), case, device).failure


def build_case(call: AttentionCall, precision: str) -> tuple[Attention, Case]:
    """Return the layer of a call with nonzero parameters, and the comparison of it."""
    dim = call.heads * call.head_dim
    layer_class = attn_layer(call.spec, local_self_attention=call.is_local)
    layer = build_noisy_layer(layer_class, dim, call.heads, qkv_bias=True)
    shape = Shape(BATCH, call.tokens, dim, call.heads)
    arithmetic = PRECISIONS[precision]
    return layer, Case(arithmetic, call.is_causal, shape, call.has_mask, call.is_cross)
