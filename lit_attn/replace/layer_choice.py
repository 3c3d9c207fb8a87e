"""Choice of layers by path, pattern or index: the arguments `only` and `skip`."""

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any, Protocol, TypeAlias, TypeVar

from lit_attn.schema.errors import ConfigError, plural, suggest

Choice: TypeAlias = str | int | Sequence[str | int] | None
"""A path, a pattern or an index of layers, a list of these, or None for no choice."""


class Named(Protocol):
    """Layer with its paths in a model."""

    paths: list[str]


L = TypeVar("L", bound=Named)


def choose(layers: list[L], only: Choice, skip: Choice) -> list[L]:
    """Return the layers that `only` names (all for None), without those that `skip` names.

    Raises ConfigError, which begins with the name of the choice, if an entry names no layer, or if
    no layer remains.
    """
    chosen = set(range(len(layers)))
    if only is not None:
        chosen = find_indices(layers, only, "only")
    if skip is not None:
        chosen -= find_indices(layers, skip, "skip")
    if layers and not chosen:
        raise ConfigError("`only` and `skip` leave no layer to replace")
    return [layer for index, layer in enumerate(layers) if index in chosen]


def find_indices(layers: Sequence[Named], choice: Any, context: str) -> set[int]:
    """Return the indices of the layers that `choice` names; raise ConfigError for other entries."""
    is_list = isinstance(choice, Sequence) and not isinstance(choice, str)
    entries = list(choice) if is_list else [choice]
    indices: set[int] = set()
    for entry in entries:
        if isinstance(entry, str):
            indices |= find_by_path(layers, entry, context)
        elif isinstance(entry, int) and not isinstance(entry, bool):
            indices.add(find_by_index(layers, entry, context))
        else:
            raise ConfigError(
                f"{context}: {entry!r} is no path, pattern or index of a layer; "
                "write for example 'blocks.*.attn' or -1"
            )
    return indices


def find_by_index(layers: Sequence[Named], index: int, context: str) -> int:
    """Return the index from the start of a layer whose `index` may be from the end."""
    if not -len(layers) <= index < len(layers):
        raise ConfigError(
            f"{context}: the model has {plural(len(layers), 'layer')}, "
            f"so there is no layer {index}; indices start from 0, and -1 is the last layer"
        )
    return index % len(layers)


def find_by_path(layers: Sequence[Named], pattern: str, context: str) -> set[int]:
    """Return the indices of the layers with a path that `pattern` matches."""
    matching = set()
    for index, layer in enumerate(layers):
        if any(matches(path, pattern) for path in layer.paths):
            matching.add(index)
    if not matching:
        all_paths: list[str] = []
        for layer in layers:
            all_paths.extend(layer.paths)
        raise ConfigError(
            f"{context}: '{pattern}' names no attention layer{suggest(pattern, all_paths)}"
        )
    return matching


def matches(path: str, pattern: str) -> bool:
    """Return True if `pattern` matches `path`, or the path of a module that contains it."""
    names = path.split(".")
    containers = [".".join(names[: length + 1]) for length in range(len(names))]
    return any(fnmatchcase(container, pattern) for container in containers)
