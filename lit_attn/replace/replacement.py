"""Replacement of the softmax self-attention layers of any model, with their weights.

An adapter reads the projections of one class of attention modules, and calls the new layer with the
masks, position biases and rotations of that class. ADAPTERS maps classes to adapters; a file
outside this package can add to it.

A replacement has two steps. The first one finds the layers and builds what replaces them, and does
not change the model. The second one puts the new layers into the model, all of them or none.
"""

import contextlib
import warnings
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from lit_attn.attention.layer import TokenLayer
from lit_attn.attention.spec import AttentionSpec, attention_spec
from lit_attn.replace.adapter import Adapter
from lit_attn.replace.layer_choice import Choice, choose
from lit_attn.replace.layer_trial import prove
from lit_attn.replace.restoring import unchanged_after_an_error
from lit_attn.replace.search import (
    NAMES,
    AdapterChoice,
    Layer,
    Replacement,
    check_adapted_classes,
    find_layers,
)
from lit_attn.replace.shared_weights import SharedWeights
from lit_attn.replace.stacks import connect_stacks
from lit_attn.replace.transformers_layers import Hub
from lit_attn.schema.errors import ConfigError, plural
from lit_attn.schema.mistakes import describe_mistake, is_unexpected
from lit_attn.schema.plugins import find_user_line


def replace_attention(
    model: nn.Module,
    spec: AttentionSpec | str | dict[str, Any],
    source: str = "replace_attention",
    *,
    only: Choice = None,
    skip: Choice = None,
    adapters: dict[str, AdapterChoice] | None = None,
    example: Any = None,
) -> nn.Module:
    """Replace the softmax self-attention layers of `model`, in place, and return the model.

    A model that is such a layer itself is not changed, and the new layer is returned.

    `spec` is a preset's name, a mapping as in YAML, or a specification. The new layers have the
    weights of the old ones; what the old ones lack has its initial values. So a mechanism that
    contains the standard layer leaves the model's outputs unchanged. Its `layers` (mechanisms of
    layers that differ) are those that are replaced, in the order of the model.

    A warning names the layers that their adapters leave as they are, such as pooling of queries.

    `only` chooses the layers to replace, and `skip` those that remain as they are: the path of a
    layer or of a module with layers in it, a pattern such as `blocks.*.attn`, the layer's index in
    the order of the model (-1 is the last one), or a list of these.

    `adapters` chooses adapters for further classes of attention modules, such as
    `{"mine:MyAttention": "Hub"}`. A class is written as "module:class"; an adapter is the name of
    one of this package, "module:class", or a subclass of Adapter.

    `example` is an input of the model: a tensor, a tuple of arguments, or a dictionary of named
    ones. The model is then called with it once, in evaluation mode and without gradients, before
    anything is replaced. Layers that are called in a way that `spec` cannot compute, such as
    cross-attention in a module of unknown class, are refused at once instead of at their first
    call.

    Raises ConfigError, which begins with `source` and the path of the module, if a layer cannot be
    replaced. The model is then unchanged.
    """
    chosen = attention_spec(spec, source)
    check_adapted_classes(model, adapters or {})
    try:
        layers = choose(find_layers(model, adapters), only, skip)
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from error
    new_model, kept = replace_layers(model, chosen, source, layers, example)
    if kept:
        names = ", ".join(layer.name for layer in kept)
        warnings.warn(
            f"{source}: {len(layers) - len(kept)} of {plural(len(layers), 'attention layer')} of "
            f"{type(model).__name__} are replaced; these remain as they are: {names}",
            stacklevel=2,
        )
    return new_model


class Replaced(NamedTuple):
    """A model with new layers, and the layers that their adapters have left as they are."""

    model: nn.Module
    kept: list[Layer]


def replace_layers(
    model: nn.Module,
    spec: AttentionSpec,
    source: str,
    layers: Sequence[Layer],
    example: Any = None,
) -> Replaced:
    """Replace `layers` of `model`, as `replace_attention` does, without a warning."""
    if not layers:
        raise ConfigError(f"{source}: {type(model).__name__} has no self-attention layers")
    check_own_keys(spec, source)
    with unchanged_after_an_error(model):
        replacements = build_replacements(model, layers, spec, source)
        number_replacements(replacements)
        try:
            connect_stacks(model, replacements)
        except ValueError as error:
            raise ConfigError(f"{source}: {error}") from error
        if not replacements:
            raise ConfigError(f"{source}: {type(model).__name__} has no self-attention layers")
        if example is not None:
            check_calls(model, replacements, example, source)
        replaced = {id(replacement.layer) for replacement in replacements}
        kept = [layer for layer in layers if id(layer) not in replaced]
        weights = SharedWeights(model, replacements)
        new_model = insert(model, replacements)
        try:
            weights.tie()
        except ValueError as error:
            raise ConfigError(f"{source}: {error}") from error
        return Replaced(new_model, kept)


def build_replacements(
    model: nn.Module, layers: Sequence[Layer], spec: AttentionSpec, source: str
) -> list[Replacement]:
    """Return each layer with the module that replaces it; the model is not changed.

    A layer that its adapter leaves as it is, such as pooling of queries, is left out, and the
    rules of `spec.layers` do not count it. Raises ConfigError if a layer cannot be replaced.
    """
    if spec.layers is None:
        return build_each(model, layers, [spec] * len(layers), source)
    is_for_all = True
    try:
        specs = spec.by_layer(len(layers))
    except ValueError:
        # The list may be for those layers that are replaced, which only their adapters know.
        specs = (AttentionSpec(),) * len(layers)
        is_for_all = False
    replacements = build_each(model, layers, specs, source)
    if is_for_all and len(replacements) == len(layers):
        return replacements
    replaced = [replacement.layer for replacement in replacements]
    try:
        specs = spec.by_layer(len(replaced))
    except ValueError as error:
        raise ConfigError(f"{source}: {error}") from error
    return build_each(model, replaced, specs, source)


def build_each(
    model: nn.Module, layers: Sequence[Layer], specs: Sequence[AttentionSpec], source: str
) -> list[Replacement]:
    """Return the layers that are not left as they are, each with a module of its specification."""
    replacements = []
    for layer, spec_of_layer in zip(layers, specs, strict=True):
        context = f"{source}: {layer.name}"
        if layer.adapter is None:
            raise ConfigError(f"{context}: {layer.reason}")
        try:
            for path in layer.paths:
                _check_place(model, path, layer, spec_of_layer)
            new = layer.adapter(layer.module, spec_of_layer)
            if isinstance(new, Hub):
                prove(new, layer.module)
        except ValueError as error:
            raise ConfigError(f"{context}: {error}") from error
        except Exception as error:
            # The adapter may be a user's, or read attributes that a module of this class lacks.
            line = find_user_line(error)
            if not line and is_unexpected(error):
                raise ConfigError(f"{context}: {describe_mistake(error)}") from error
            if isinstance(error, AttributeError) and layer.adapter in NAMES.values():
                name = getattr(layer.adapter, "__name__", "")
                raise ConfigError(
                    f"{context}: the adapter {name} does not fit this class: {error}"
                ) from error
            place = f" at {line}" if line else ""
            raise ConfigError(
                f"{context}: its adapter fails{place} with {type(error).__name__}: {error}"
            ) from error
        if new is None:
            continue
        _copy_training_mode(new, layer.module)
        if isinstance(new, Adapter):
            new.path = layer.paths[0]
        replacements.append(Replacement(layer, new))
    return replacements


def check_own_keys(spec: AttentionSpec, source: str) -> None:
    """Raise ConfigError if layers of `spec` lack the keys and values that a model projects."""
    for mechanism in spec.mechanisms:
        if mechanism.shares_keys:
            raise ConfigError(
                f"{source}: kv_from: 'previous' needs the layer before in a network of this "
                "package; replace layers of other models without it"
            )
        if mechanism.latent is not None:
            raise ConfigError(
                f"{source}: latent: has projections that no layer of another model has; "
                "replace layers of other models without it"
            )


def number_replacements(replacements: list[Replacement]) -> None:
    """Give every new layer its number among those that replace layers of the model."""
    for number, (_, new) in enumerate(replacements):
        for module in new.modules():
            if isinstance(module, TokenLayer):
                module.set_depth(number)


def check_calls(
    model: nn.Module, replacements: list[Replacement], example: Any, source: str
) -> None:
    """Call `model` with `example`; raise ConfigError for a call that a new layer cannot compute.

    The model's training mode stays.
    """
    problems: list[str] = []
    with torch.no_grad(), evaluation_mode(model), called_modules():
        handles = []
        for layer, new in replacements:
            if isinstance(new, Adapter):
                check = CallCheck(new, problems)
                handles.append(layer.module.register_forward_pre_hook(check, with_kwargs=True))
        try:
            if isinstance(example, dict):
                model(**example)
            elif isinstance(example, tuple):
                model(*example)
            else:
                model(example)
        finally:
            for handle in handles:
                handle.remove()
    if problems:
        raise ConfigError(f"{source}: {problems[0]}")


class CallCheck:
    """Hook of an original layer that collects the calls which the new layer cannot compute."""

    def __init__(self, new: Adapter, problems: list[str]) -> None:
        self.new = new
        self.problems = problems

    def __call__(self, module: nn.Module, values: tuple[Any, ...], named: dict[str, Any]) -> None:
        try:
            self.new.check_call(values, named)
        except ValueError as error:
            self.problems.append(str(error))


@contextlib.contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Set the evaluation mode of `model`, and restore the mode of each module afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, is_training in modes:
            module.training = is_training


@contextlib.contextmanager
def called_modules() -> Iterator[None]:
    """Switch off PyTorch's fused encoder layer, which does not call its attention module."""
    is_enabled = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(is_enabled)


def insert(model: nn.Module, replacements: list[Replacement]) -> nn.Module:
    """Put the new layers into `model`, and return it, or the new layer if it is the model."""
    replaced = {layer.module: new for layer, new in replacements}
    encoders = []
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoder):
            has_new_layer = not replaced.keys().isdisjoint(module.modules())
            if has_new_layer:
                encoders.append(module)
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
