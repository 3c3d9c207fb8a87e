"""Search for the attention layers of a model, and the adapter of each class of layers.

ADAPTERS and UNFIT are filled from attention_classes.yaml. A file outside this package can add to
ADAPTERS.
"""

import re
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import nn

from lit_attn.attention.layer import TokenLayer
from lit_attn.attention.spec import AttentionSpec
from lit_attn.models.base import LayerCount
from lit_attn.replace import (
    mmseg_layers,
    timm_biases,
    timm_layers,
    torch_layers,
    transformers_families,
)
from lit_attn.replace.adapter import Adapter, class_name
from lit_attn.replace.transformers_layers import Hub, has_structure
from lit_attn.schema.base import load
from lit_attn.schema.errors import require
from lit_attn.schema.sources import read_package_file
from lit_attn.schema.yaml_text import parse_plain

_CLASSES_FILE = Path(__file__).with_name("attention_classes.yaml")
CLASSES = parse_plain(read_package_file(_CLASSES_FILE).decode(), _CLASSES_FILE.name)
"""Content of attention_classes.yaml."""


FILES = {
    "mmseg_layers": mmseg_layers,
    "timm_biases": timm_biases,
    "timm_layers": timm_layers,
    "torch_layers": torch_layers,
    "transformers_families": transformers_families,
}
"""Files with adapters by the names that attention_classes.yaml has for them."""

AdapterChoice: TypeAlias = str | Callable[[Any, AttentionSpec], nn.Module | None]
"""An adapter, as its class, as "module:class", or as the name of an adapter of this package."""


def list_adapters(by_file: dict[str, dict[str, str]]) -> dict[str, AdapterChoice]:
    """Return the adapters of the package by class of attention module, as "module:class"."""
    adapters: dict[str, AdapterChoice] = {}
    for file, names in by_file.items():
        for module_class, adapter in names.items():
            adapters[module_class] = getattr(FILES[file], adapter)
    return adapters


def list_names(by_file: dict[str, dict[str, str]]) -> dict[str, AdapterChoice]:
    """Return the adapters of the package by the names that choose them."""
    adapters: dict[str, AdapterChoice] = {}
    for file, names in by_file.items():
        for adapter in names.values():
            adapters[adapter] = getattr(FILES[file], adapter)
    return adapters


def list_reasons(by_reason: dict[str, list[str]]) -> dict[str, str]:
    """Return the reason of each class that is refused."""
    reasons = {}
    for reason, module_classes in by_reason.items():
        for module_class in module_classes:
            reasons[module_class] = reason
    return reasons


ADAPTERS = list_adapters(CLASSES["adapters"])
"""Adapters by class of attention module, which is written as "module:class"."""

NAMES = list_names(CLASSES["adapters"]) | {"Hub": Hub}
"""Adapters of this package by the names that choose them."""

UNFIT = list_reasons(CLASSES["refused"])
"""Reasons why a class of attention modules cannot be replaced."""

POOLING_CLASSES = frozenset(CLASSES["pooling"])
"""Classes that pool tokens by learned queries, which are no self-attention."""

ATTENTION_NAME = re.compile(r"Attention(?!Pool)|Attn|MHSA|MSA|MHA")
"""Names of self-attention; a class that pools tokens by a learned query is none and remains."""

POOLING_NAME = re.compile(r"Pool")
"""Names of classes that pool tokens; their projections are no sign of self-attention."""

PROJECTION_NAMES = (
    {"qkv"},
    {"to_qkv"},
    {"Wqkv"},
    {"qkv_proj"},
    {"c_attn"},
    {"query_key_value"},
    {"in_proj_weight"},
    {"q", "k", "v"},
    {"q", "kv"},
    {"wq", "wk", "wv"},
    {"to_q", "to_k", "to_v"},
    {"to_q", "to_kv"},
    {"q_proj", "k_proj", "v_proj"},
    {"query", "key", "value"},
    {"queries", "keys", "values"},
)
"""Names of the projections by which a module is recognised as attention, whatever its class."""

READ_BY_STRUCTURE = ("transformers.", "transformers_modules.")
"""Packages whose attention is read by its structure; the second one has code of model folders."""

NO_ADAPTER = "its class has no adapter; docs/adapters.md says how to write one"
OURS = "it is a layer of lit_attn already; build the model again to choose other parts for it"


@dataclass
class Layer:
    """An attention layer of a model, its paths, and its adapter or the reason for not having one.

    A module that several modules share has a path in each of them.
    """

    module: nn.Module
    adapter: Callable[[Any, AttentionSpec], nn.Module | None] | None
    reason: str
    paths: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        """Path and class, as errors name the layer."""
        return f"{self.paths[0] or 'the model'} ({type(self.module).__name__})"


class Replacement(NamedTuple):
    """An attention layer and the module that takes its place."""

    layer: Layer
    new: nn.Module


def find_layers(model: nn.Module, adapters: dict[str, AdapterChoice] | None = None) -> list[Layer]:
    """Return the attention layers of `model` in its order, with or without an adapter.

    `adapters` are added to ADAPTERS. Raises ConfigError for an adapter that does not exist.
    """
    adapters = ADAPTERS | (adapters or {})
    layers: dict[nn.Module, Layer] = {}
    inside: set[nn.Module] = set()
    for path, module in model.named_modules(remove_duplicate=False):
        if module in layers:
            layers[module].paths.append(path)
            continue
        if module in inside:
            continue
        if class_name(module) in POOLING_CLASSES:
            inside.update(module.modules())
            continue
        layer = classify(module, adapters)
        if layer is not None:
            layer.paths.append(path)
            layers[module] = layer
            inside.update(module.modules())
    return list(layers.values())


def count_layers(model: nn.Module, adapters: dict[str, AdapterChoice] | None = None) -> LayerCount:
    """Count the attention layers of `model`; `adapters` are those with which it was changed."""
    layers = find_layers(model, adapters)
    replaced = [layer for layer in layers if isinstance(layer.module, Adapter | TokenLayer)]
    return LayerCount(len(replaced), len(layers))


def load_adapter(adapter: AdapterChoice) -> Callable[[Any, AttentionSpec], nn.Module | None]:
    """Return the adapter that a class, "module:class", or a name of this package stands for."""
    if not isinstance(adapter, str):
        return adapter
    if ":" not in adapter:
        require("adapters: there is no adapter", adapter, NAMES)
        return load_adapter(NAMES[adapter])
    loaded: Callable[[Any, AttentionSpec], nn.Module | None] = load(adapter)
    return loaded


def check_adapted_classes(model: nn.Module, names: Iterable[str]) -> None:
    """Raise ConfigError if one of `names` is the class of no module of `model`."""
    classes = sorted({class_name(module) for module in model.modules()})
    for name in names:
        require(f"adapters: {type(model).__name__} has no module of class", name, classes)


def classify(module: nn.Module, adapters: dict[str, AdapterChoice]) -> Layer | None:
    """Return `module` as an attention layer, or None if it is not recognised as one."""
    if isinstance(module, Adapter | TokenLayer):
        return Layer(module, None, OURS)
    name = class_name(module)
    if name in adapters:
        return Layer(module, load_adapter(adapters[name]), "")
    if name in UNFIT:
        return Layer(module, None, UNFIT[name])
    if name.startswith(READ_BY_STRUCTURE) and has_structure(module):
        return Layer(module, Hub, "")
    if contains_attention(module, adapters) or wraps_attention(module):
        # A wrapper around the attention itself.
        return None
    if ATTENTION_NAME.search(type(module).__name__):
        return Layer(module, None, NO_ADAPTER)
    if POOLING_NAME.search(type(module).__name__):
        return None
    for names in PROJECTION_NAMES:
        if has_projections(module, names):
            projections = ", ".join(f"`{name}`" for name in sorted(names))
            return Layer(
                module,
                None,
                f"it has projections as attention has ({projections}), but {NO_ADAPTER}, "
                "or name it in `skip` if it is no attention",
            )
    return None


def contains_attention(module: nn.Module, adapters: Collection[str]) -> bool:
    """Return True if `module` or a module in it is attention of a known class."""
    for part in module.modules():
        name = class_name(part)
        if name in adapters or name in UNFIT or isinstance(part, Adapter | TokenLayer):
            return True
    return False


def wraps_attention(module: nn.Module) -> bool:
    """Return True if a module in `module` has the name and the projections of attention."""
    for part in module.modules():
        is_named = part is not module and ATTENTION_NAME.search(type(part).__name__)
        if is_named and any(has_projections(part, names) for names in PROJECTION_NAMES):
            return True
    return False


def has_projections(module: nn.Module, names: Iterable[str]) -> bool:
    """Return True if `module` has a module or a tensor of each name."""
    values = [getattr(module, name, None) for name in names]
    return all(isinstance(value, nn.Module | torch.Tensor) for value in values)
