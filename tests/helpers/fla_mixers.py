"""Configurations of the layers in experiments/token_mixers/fla_layers.py, for their tests."""

from typing import Any

import torch
from torch import nn

from helpers.paths import EXPERIMENTS
from helpers.recurrences import HEADS
from lit_attn.models.factory import count_flops
from lit_attn.schema.plugins import load_parts

PLUG_IN = EXPERIMENTS / "token_mixers" / "fla_layers.py"

load_parts([PLUG_IN])

import fla_layers  # noqa: E402

__all__ = ["DIM", "PLUG_IN", "WIDTH", "attention", "count_projections", "fla_layers"]

DIM = 64
WIDTH = DIM // HEADS


def attention(name: str, **arguments: Any) -> dict[str, Any]:
    """Return the configuration of a layer of the class `name`."""
    return {"kind": "module", "import": f"fla_layers:{name}", "arguments": arguments}


def count_projections(layer: nn.Module, tokens: int) -> int:
    """Return the FLOPs of the matrix products with weights and of the convolutions of a layer."""
    total = 0
    for module in layer.modules():
        if isinstance(module, nn.Linear):
            x = torch.empty(1, tokens, module.in_features, device="meta")
            total += count_flops(module, (x,))
        elif isinstance(module, nn.Conv1d):
            total += 2 * tokens * module.weight.numel()
    return total
