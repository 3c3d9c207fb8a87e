"""Replacement of the attention layers of other people's models: timm, transformers, torch, mmseg.

`replace_attention` is the door in Python, and the models `timm`, `transformers` and `module` are
the door in YAML; the core knows these kinds by name alone. An adapter of your own derives from
`Adapter`, and stands in ADAPTERS under the class of attention module that it replaces
(docs/adapters.md). `*_layers.py` have the adapters of one library each; `adapter.py` and
`projections.py` are what they share, and `search.py` finds layers.
"""

from lit_attn.replace.adapter import Adapter, build_layer
from lit_attn.replace.projections import Projections, by_head, join, linear
from lit_attn.replace.replacement import replace_attention
from lit_attn.replace.search import ADAPTERS, UNFIT, AdapterChoice

__all__ = [
    "ADAPTERS",
    "UNFIT",
    "Adapter",
    "AdapterChoice",
    "Projections",
    "build_layer",
    "by_head",
    "join",
    "linear",
    "replace_attention",
]

MEMBERS = ("timm_models", "transformers_models", "external")
"""Modules that register members of the families when they are imported."""
