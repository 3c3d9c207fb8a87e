"""Comparison of a model's attention layers with their formulas, before the first cell on a GPU.

A GPU has kernels that no CPU has, and a wrong one changes results without an error. Each different
call of a layer (lit_attn.models.attention_calls) is compared once in the precision of the cell, as
`lit-attn doctor` compares presets: values and gradients, small and uncompiled.
"""

from functools import cache

import torch

from lit_attn.attention import flex
from lit_attn.attention.layer import Attention, attn_layer
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
from lit_attn.models.attention_calls import AttentionCall, find_calls
from lit_attn.models.base import Model
from lit_attn.schema.errors import ConfigError, program

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
    with flex.left_out():
        return check_layer(call.preset, "", layer.to(device), case, device).failure


def build_case(call: AttentionCall, precision: str) -> tuple[Attention, Case]:
    """Return the layer of a call with nonzero parameters, and the comparison of it."""
    dim = call.heads * call.head_dim
    layer_class = attn_layer(call.spec, local_self_attention=call.is_local)
    layer = build_noisy_layer(layer_class, dim, call.heads, qkv_bias=True)
    shape = Shape(BATCH, call.tokens, dim, call.heads)
    arithmetic = PRECISIONS[precision]
    return layer, Case(arithmetic, call.is_causal, shape, call.has_mask, call.is_cross)
