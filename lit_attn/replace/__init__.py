"""Replacement of the attention layers of other people's models: timm, transformers, torch, mmseg.

`replace_attention` is the door. An adapter of your own derives from `Adapter`, and stands in
ADAPTERS under the class of attention module that it replaces (docs/own-models.md). `*_layers.py`
have the adapters of one library each; `adapter.py` and `projections.py` are what they share, and
`search.py` finds layers.
"""

from lit_attn.replace.adapter import Adapter, build_layer
from lit_attn.replace.layer_choice import choose
from lit_attn.replace.projections import Projections, by_head, join, linear
from lit_attn.replace.replacement import replace_attention, replace_layers
from lit_attn.replace.search import (
    ADAPTERS,
    UNFIT,
    AdapterChoice,
    LayerCount,
    check_adapted_classes,
    count_layers,
    find_layers,
)

__all__ = [
    "ADAPTERS",
    "UNFIT",
    "Adapter",
    "AdapterChoice",
    "LayerCount",
    "Projections",
    "build_layer",
    "by_head",
    "check_adapted_classes",
    "choose",
    "count_layers",
    "find_layers",
    "join",
    "linear",
    "replace_attention",
    "replace_layers",
]
