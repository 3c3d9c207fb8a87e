"""Configurations of the layers in experiments/token_mixers/fla_layers.py, for their tests."""

from typing import Any

from helpers.paths import EXPERIMENTS
from helpers.recurrences import HEADS
from lit_attn.schema.plugins import load_parts

PLUG_IN = EXPERIMENTS / "token_mixers" / "fla_layers.py"

load_parts([PLUG_IN])

import fla_layers  # noqa: E402

__all__ = ["DIM", "PLUG_IN", "WIDTH", "attention", "fla_layers"]

DIM = 64
WIDTH = DIM // HEADS


def attention(name: str, **arguments: Any) -> dict[str, Any]:
    """Return the configuration of a layer of the class `name`."""
    return {"kind": "module", "import": f"fla_layers:{name}", "arguments": arguments}
