"""Stacks of blocks in a model: replaced layers that follow each other on the same tokens.

A stack is a ModuleList or a Sequential with replaced layers in several of its items, such as the
blocks of a decoder, of an encoder or of one tower of CLIP. The first layer of a stack is the first
layer of the network for those that mix its values with their own (value residual).
"""

from collections.abc import Sequence

from torch import nn

from lit_attn.attention.layer import Attention, TokenLayer
from lit_attn.attention.network import connect_first_values
from lit_attn.replace.adapter import Adapter
from lit_attn.replace.search import Replacement, find_layers


def connect_stacks(model: nn.Module, replacements: Sequence[Replacement]) -> None:
    """Connect the new layers that read values of a first layer to the first layer of their stack.

    `model` still has its own layers. Raises ValueError, which begins with the path of a layer, if
    its first layer is unknown or has no values.
    """
    stacks: dict[str, list[Replacement]] = {}
    is_read: set[str] = set()
    paths = [replacement.layer.paths[0] for replacement in replacements]
    for replacement in replacements:
        stack = find_stack(model, replacement.layer.paths[0], paths)
        reads_first = needs_first(replacement.new)
        if reads_first:
            check_reader(replacement, stack)
            is_read.add(str(stack))
        if stack is not None:
            stacks.setdefault(stack, []).append(replacement)
    for stack in sorted(is_read):
        connect_stack(model, stack, stacks[stack])


def find_stack(model: nn.Module, path: str, paths: Sequence[str]) -> str | None:
    """Return the path of the innermost list of blocks with several items that contain `paths`."""
    names = path.split(".")
    for length in range(len(names) - 1, -1, -1):
        container = ".".join(names[:length])
        if not isinstance(model.get_submodule(container), nn.ModuleList | nn.Sequential):
            continue
        items = {find_item(container, other) for other in paths}
        if len(items - {None}) > 1:
            return container
    return None


def find_item(container: str, path: str) -> str | None:
    """Return the name of the item of `container` that `path` leads through, or None."""
    prefix = f"{container}." if container else ""
    if not path.startswith(prefix):
        return None
    return path.removeprefix(prefix).partition(".")[0]


def needs_first(new: nn.Module) -> bool:
    """Return True if a layer in `new` mixes its values with those of the first layer."""
    return any(layer.spec.values.reads_first for layer in list_token_layers(new))


def list_token_layers(new: nn.Module) -> list[TokenLayer]:
    """Return the layers of this package in a module that replaces a layer."""
    return [module for module in new.modules() if isinstance(module, TokenLayer)]


def check_reader(replacement: Replacement, stack: str | None) -> None:
    """Raise ValueError if the first layer of a layer's stack may see other tokens."""
    layer, new = replacement.layer, replacement.new
    reason = ""
    if isinstance(new, Adapter) and not new.keeps_tokens:
        reason = (
            f"its adapter {type(new).__name__} does not say that all layers see the same tokens in "
            "the same order"
        )
    elif len(layer.paths) > 1:
        reason = f"it is also at {layer.paths[1]}, so it has no place after a first layer"
    elif stack is None:
        reason = "it is in no ModuleList or Sequential of several replaced layers"
    if reason:
        raise ValueError(f"{layer.name}: values: mixes the values of a first layer, but {reason}")


def connect_stack(model: nn.Module, stack: str, replacements: Sequence[Replacement]) -> None:
    """Connect the new layers of one stack; raise ValueError if its first layer is not replaced."""
    first = replacements[0].layer
    item = find_item(stack, first.paths[0])
    for name, block in model.get_submodule(stack).named_children():
        if name == item:
            break
        if find_layers(block):
            raise ValueError(
                f"{first.name}: values: mixes the values of the first layer of "
                f"{stack or 'the model'}, which is in its item {name} and remains as it is; "
                "replace it too"
            )
    layers: list[TokenLayer] = []
    for replacement in replacements:
        layers.extend(list_token_layers(replacement.new))
    for number, layer in enumerate(layers):
        if isinstance(layer, Attention):
            layer.is_first = number == 0
            layer.values.set_depth(number)
    try:
        connect_first_values(layers)
    except ValueError as error:
        raise ValueError(f"{first.name}: {error}") from error
