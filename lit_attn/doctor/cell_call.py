"""Check of one call of an attention layer of a cell: `python -m lit_attn.doctor.cell_call`.

lit_attn.training.path_check starts this process, which may hang or crash. Standard input has the
call, the precision, the refused paths and the device as JSON. The first line of the output is the
name of the path, and the second one is why it fails, or empty. A positive exit code says that
nothing is known.
"""

import json
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from lit_attn.attention import path_record
from lit_attn.attention.agreement import build_noisy_layer
from lit_attn.attention.layer import Attention, attn_layer
from lit_attn.doctor.apart import Unavailable
from lit_attn.doctor.layers import (
    BF16,
    FLOAT32,
    FP16,
    TF32,
    Case,
    Shape,
    check_layer,
    read_case_path,
    require_device,
)
from lit_attn.models.attention_calls import AttentionCall

BATCH = 2

PRECISIONS = {"fp32": FLOAT32, "tf32": TF32, "bf16": BF16, "fp16": FP16}
"""Arithmetic of each `training.precision`."""


def build_case(call: AttentionCall, precision: str) -> tuple[Attention, Case]:
    """Return the layer of a call with nonzero parameters, and the comparison of it."""
    dim = call.heads * call.head_dim
    layer_class = attn_layer(call.spec, local_self_attention=call.is_local)
    layer = build_noisy_layer(layer_class, dim, call.heads, qkv_bias=True)
    shape = Shape(BATCH, call.tokens, dim, call.heads)
    arithmetic = PRECISIONS[precision]
    return layer, Case(arithmetic, call.is_causal, shape, call.has_mask, call.is_cross)


def check_call(
    call: AttentionCall, precision: str, refused: Sequence[str], device: torch.device
) -> Iterator[str]:
    """Yield the path of a call without `refused` paths, and then why it fails, or an empty text.

    Raises Unavailable if nothing can be known.
    """
    path_record.set_refused(device.type, dict.fromkeys(refused, "failed"))
    require_device(device)
    layer, case = build_case(call, precision)
    path = read_case_path(layer.to(device), device, case)
    yield path
    yield check_layer(call.preset, path, layer, case, device).failure


def main() -> int:
    """Print the two lines. Return 1 if another program has the device or its memory."""
    request: dict[str, Any] = json.load(sys.stdin)
    call = AttentionCall.from_json(request["call"])
    device = torch.device(request["device"])
    try:
        for line in check_call(call, request["precision"], request["refused"], device):
            print(line, flush=True)
    except Unavailable as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
