"""Replacement of the softmax self-attention layers of any model, with their weights.

An adapter reads the projections of one class of attention modules, and calls the new layer with the
masks, position biases and rotations of that class. ADAPTERS maps classes to adapters; a file
outside this package can add to it.

A replacement has two steps. The first one finds the layers and builds what replaces them, and does
not change the model. The second one puts the new layers into the model, all of them or none.
"""

import contextlib
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import nn

from lit_attn.attention.layer import Attention
from lit_attn.attention.spec import AttentionSpec, attention_spec
from lit_attn.models.adapter import (
    Adapter,
    Projections,
    build_layer,
    by_head,
    class_name,
    join,
    linear,
)
from lit_attn.models.layer_choice import Choice, choose
from lit_attn.schema.base import load
from lit_attn.schema.errors import ConfigError
from lit_attn.schema.sources import read_package_file

__all__ = [
    "ADAPTERS",
    "UNFIT",
    "Adapter",
    "Projections",
    "build_layer",
    "by_head",
    "join",
    "linear",
    "replace_attention",
]

CLASSES = yaml.safe_load(read_package_file(Path(__file__).with_name("attention_classes.yaml")))

ADAPTERS: dict[str, str | type["Adapter"]] = {
    name: f"lit_attn.models.{file}:{adapter}"
    for file, adapters in CLASSES["adapters"].items()
    for name, adapter in adapters.items()
}
"""Adapters by class of attention module, both as "module:class"; an adapter can be the class."""

UNFIT = {name: reason for reason, names in CLASSES["refused"].items() for name in names}
"""Reasons why a class of attention modules cannot be replaced."""

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

NO_ADAPTER = "its class has no adapter; docs/own-models.md says how to write one"
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


def replace_attention(
    model: nn.Module,
    spec: AttentionSpec | str | dict[str, Any],
    source: str = "replace_attention",
    *,
    only: Choice = None,
    skip: Choice = None,
    example: Any = None,
) -> nn.Module:
    """Replace the softmax self-attention layers of `model`, in place, and return the model.

    A model that is such a layer itself is not changed, and the new layer is returned.

    `spec` is a preset's name, a mapping as in YAML, or a specification. The new layers have the
    weights of the old ones; what the old ones lack has its initial values. So a mechanism that
    contains the standard layer leaves the model's outputs unchanged. Its `layers` (mechanisms of
    layers that differ) are those that are replaced, in the order of the model.

    `only` chooses the layers to replace, and `skip` those that remain as they are: the path of a
    layer or of a module with layers in it, a pattern such as `blocks.*.attn`, the layer's index in
    the order of the model (-1 is the last one), or a list of these.

    `example` is an input of the model: a tensor, a tuple of arguments, or a dictionary of named
    ones. The model is then called with it once, in evaluation mode and without gradients, before
    anything is replaced. Layers that are called in a way that `spec` cannot compute, such as
    cross-attention in a module of unknown class, are refused at once instead of at their first
    call.

    Raises ConfigError, which begins with `source` and the path of the module, if a layer cannot be
    replaced. The model is then unchanged.
    """
    chosen = attention_spec(spec, source)
    layers = find_layers(model)
    if not layers:
        raise ConfigError(f"{source}: {type(model).__name__} has no self-attention layers")
    layers = choose(layers, only, skip, source)
    with unchanged_after_an_error(model):
        replacements = build_replacements(model, layers, chosen, source)
        number_replacements(replacements)
        if not replacements:
            raise ConfigError(f"{source}: {type(model).__name__} has no self-attention layers")
        if example is not None:
            check_calls(model, replacements, example, source)
        return insert(model, replacements)


def find_layers(model: nn.Module) -> list[Layer]:
    """Return the attention layers of `model` in its order, with or without an adapter."""
    layers: dict[nn.Module, Layer] = {}
    inside: set[nn.Module] = set()
    for path, module in model.named_modules(remove_duplicate=False):
        if module in layers:
            layers[module].paths.append(path)
            continue
        if module in inside:
            continue
        layer = _classify(module)
        if layer is not None:
            layer.paths.append(path)
            layers[module] = layer
            inside.update(module.modules())
    return list(layers.values())


def build_replacements(
    model: nn.Module, layers: Sequence[Layer], spec: AttentionSpec, source: str
) -> list[tuple[Layer, nn.Module]]:
    """Return each layer with the module that replaces it; the model is not changed.

    A layer that its adapter leaves as it is, such as pooling of queries, is left out. Raises
    ConfigError if a layer cannot be replaced.
    """
    try:
        specs = spec.by_layer(len(layers))
    except ValueError as error:
        raise ConfigError(f"{source}: {error}") from error
    replacements = []
    for layer, spec_of_layer in zip(layers, specs, strict=True):
        context = f"{source}: {layer.name}"
        if layer.adapter is None:
            raise ConfigError(f"{context}: {layer.reason}")
        try:
            for path in layer.paths:
                _check_place(model, path, layer, spec_of_layer)
            new = layer.adapter(layer.module, spec_of_layer)
        except ValueError as error:
            raise ConfigError(f"{context}: {error}") from error
        except Exception as error:
            # The adapter may be a user's, or read attributes that a module of this class lacks.
            reason = f"its adapter fails with {type(error).__name__}: {error}"
            raise ConfigError(f"{context}: {reason}") from error
        if new is None:
            continue
        _copy_training_mode(new, layer.module)
        if isinstance(new, Adapter):
            new.path = layer.paths[0]
        replacements.append((layer, new))
    return replacements


def number_replacements(replacements: list[tuple[Layer, nn.Module]]) -> None:
    """Give every new layer its number among those that replace layers of the model."""
    for number, (_, new) in enumerate(replacements):
        for module in new.modules():
            if isinstance(module, Attention):
                module.set_depth(number)


@torch.no_grad()
def check_calls(
    model: nn.Module, replacements: list[tuple[Layer, nn.Module]], example: Any, source: str
) -> None:
    """Call `model` with `example`; raise ConfigError for a call that a new layer cannot compute.

    The model's training mode and the state of the random generators stay.
    """
    problems: list[str] = []
    handles = []
    for layer, new in replacements:
        if isinstance(new, Adapter):

            def check(
                module: nn.Module,
                values: tuple[Any, ...],
                named: dict[str, Any],
                new: Adapter = new,
            ) -> None:
                try:
                    new.check_call(values, named)
                except ValueError as error:
                    problems.append(str(error))

            handles.append(layer.module.register_forward_pre_hook(check, with_kwargs=True))
    modes = [(module, module.training) for module in model.modules()]
    # PyTorch's fused encoder layer does not call its attention module.
    has_fast_path = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        model.eval()
        if isinstance(example, dict):
            model(**example)
        elif isinstance(example, tuple):
            model(*example)
        else:
            model(example)
    finally:
        torch.backends.mha.set_fastpath_enabled(has_fast_path)
        for module, is_training in modes:
            module.training = is_training
        for handle in handles:
            handle.remove()
    if problems:
        raise ConfigError(f"{source}: {problems[0]}")


def insert(model: nn.Module, replacements: list[tuple[Layer, nn.Module]]) -> nn.Module:
    """Put the new layers into `model`, and return it, or the new layer if it is the model."""
    replaced = {layer.module: new for layer, new in replacements}
    encoders = [
        module
        for module in model.modules()
        if isinstance(module, nn.TransformerEncoder)
        and not replaced.keys().isdisjoint(module.modules())
    ]
    for layer, new in replacements:
        for path in layer.paths:
            if path:
                parent, _, child = path.rpartition(".")
                setattr(model.get_submodule(parent), child, new)
    for encoder in encoders:
        # Its fused path reads the projections of the first layer instead of calling it.
        encoder.use_nested_tensor = False
    for _, new in replacements:
        if isinstance(new, Adapter):
            new.detach()
    return replaced.get(model, model)


@contextlib.contextmanager
def unchanged_after_an_error(model: nn.Module) -> Iterator[None]:
    """Undo the changes to the modules of `model`, and to the random generators, after an error.

    The attributes of every module are restored, which includes its parameters, children and hooks;
    the values of tensors are not copied, because no step changes them.
    """
    attributes = [(module, _copy_attributes(module)) for module in model.modules()]
    generators = _generator_states(model)
    try:
        yield
    except BaseException:
        for module, saved in attributes:
            _restore_attributes(module, saved)
        for device, state in generators:
            if device == "cpu":
                torch.set_rng_state(state)
            else:
                torch.get_device_module(device).set_rng_state(state, device)
        raise


def _copy_attributes(module: nn.Module) -> dict[str, tuple[Any, dict[Any, Any] | None]]:
    """Return every attribute, with a copy of its entries if it is a dictionary."""
    return {
        name: (value, dict(value) if isinstance(value, dict) else None)
        for name, value in vars(module).items()
    }


def _restore_attributes(
    module: nn.Module, saved: dict[str, tuple[Any, dict[Any, Any] | None]]
) -> None:
    """Restore the attributes; dictionaries stay the same objects, which hooks' handles refer to."""
    vars(module).clear()
    for name, (value, entries) in saved.items():
        if entries is not None:
            value.clear()
            value.update(entries)
        vars(module)[name] = value


def _generator_states(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Return the devices of the model's parameters with the states of their generators."""
    states = [("cpu", torch.get_rng_state())]
    devices = {parameter.device for parameter in model.parameters()}
    for device in devices:
        if device.type not in ("cpu", "meta"):
            name = str(device)
            states.append((name, torch.get_device_module(device).get_rng_state(name)))
    return states


def _classify(module: nn.Module) -> Layer | None:
    """Return `module` as an attention layer, or None if it is not recognised as one."""
    if isinstance(module, Adapter | Attention):
        return Layer(module, None, OURS)
    name = class_name(module)
    if adapter := ADAPTERS.get(name):
        return Layer(module, load(adapter) if isinstance(adapter, str) else adapter, "")
    if name in UNFIT:
        return Layer(module, None, UNFIT[name])
    parts = {class_name(part) for part in module.modules()}
    has_known_part = not parts.isdisjoint({*ADAPTERS, *UNFIT})
    has_our_part = any(isinstance(part, Adapter | Attention) for part in module.modules())
    if has_known_part or has_our_part:
        # A wrapper around the attention itself.
        return None
    if ATTENTION_NAME.search(type(module).__name__):
        return Layer(module, None, NO_ADAPTER)
    if POOLING_NAME.search(type(module).__name__):
        return None
    for names in PROJECTION_NAMES:
        values = [getattr(module, name, None) for name in names]
        if all(isinstance(value, nn.Module | torch.Tensor) for value in values):
            projections = ", ".join(f"`{name}`" for name in sorted(names))
            reason = f"it has projections as attention has ({projections}), but {NO_ADAPTER}"
            return Layer(module, None, f"{reason}, or name it in `skip` if it is no attention")
    return None


def _check_place(model: nn.Module, path: str, layer: Layer, spec: AttentionSpec) -> None:
    """Raise ValueError if the module at `path` is called in a way that `spec` cannot compute."""
    check_place = getattr(layer.adapter, "check_place", None)
    if path and check_place is not None:
        parent, _, child = path.rpartition(".")
        check_place(model.get_submodule(parent), child, spec)


def _copy_training_mode(new: nn.Module, original: nn.Module) -> None:
    """Set the training mode of the new modules; those of the original keep theirs."""
    kept = set(original.modules())
    for module in new.modules():
        if module not in kept:
            module.training = original.training
