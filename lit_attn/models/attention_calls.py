"""Calls of the attention layers of a network: which layers it has, and how it calls them.

The check before the first cell on a GPU compares these calls (lit_attn.checks.layers).
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from lit_attn.attention.layer import Attention
from lit_attn.attention.spec import PRESETS, AttentionSpec
from lit_attn.data.base import Data
from lit_attn.models import factory
from lit_attn.models.base import Model
from lit_attn.models.recorded_calls import recorded_calls
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
