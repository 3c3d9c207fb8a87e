"""What a researcher says about a variant, spelled out as changes to an experiment.

    attention: belief2                   model.attention as that preset
    attention: {preset: belief2, zz: without}     the preset with a part of it changed
    residual: perpendicular              model.attention.residual, and so for every family of parts
    zz: with | without
    ffn: with | without | none | {width: 384}
    optimizer.lr: 3e-4                   any other key of the experiment, dotted or nested
    match: parameters | none             what the study matches for this variant

A path is relative to the file that it stands in, or to the working directory on a command line; it
is made absolute here, where that is still known.

Order does not matter: the wider key goes first, so `residual` refines `attention` wherever it
stands. A mapping changes the keys it names; a part given by its name, or with another `kind`,
replaces the whole part.
"""

import difflib
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, get_args

from lit_attn.attention.choose import CHOICES
from lit_attn.attention.spec import AttentionSpec, preset
from lit_attn.config.experiment import Experiment
from lit_attn.config.source import Mapping, Where
from lit_attn.schema.base import Config, Kind
from lit_attn.schema.errors import ConfigError, suggest

MATCHES = ("parameters", "none")

ATTENTION = ("model", "attention")
SHORTHANDS = {
    "attention": ATTENTION,
    "ffn": ("model", "ffn"),
    **{part: (*ATTENTION, part) for part in AttentionSpec.model_fields},
}


class Change(NamedTuple):
    """A spelled-out override: keys of the experiment, and what to match where that was said."""

    experiment: Mapping
    match: str | None


def spell_out(override: Mapping, context: str) -> Change:
    """`override` in the experiment's own keys; ConfigError for a key that is none."""
    match = None
    entries = []
    for key, value in override.items():
        where = override.where[key]
        if key == "match":
            match = _match(value, where, context)
            continue
        first, *rest = key.split(".")
        if first not in SHORTHANDS and first not in Experiment.model_fields:
            raise ConfigError(f"{where}: {context}: unknown key '{key}'{_suggestion(key)}")
        path = (*SHORTHANDS.get(first, (first,)), *rest)
        entries.append((path, _nested(path, value, where), key))

    changes = Mapping(override.at)
    said: dict[tuple[str, ...], str] = {}
    for path, nested, key in sorted(entries, key=lambda entry: len(entry[0])):
        if path in said:
            where = override.where[key]
            raise ConfigError(f"{where}: {context}: '{key}' says again what '{said[path]}' says")
        said[path] = key
        changes = merge(changes, _parts(nested, context))
    return Change(_anchored(changes), match)


def merge(base: Any, change: Any) -> Any:
    """`change` over `base`, neither of them altered: mappings key by key, all else replaced.

    A mapping with another `kind` replaces; one without a kind changes the part that stands there,
    also where that was given by its name alone.
    """
    if not isinstance(change, Mapping):
        return change
    if isinstance(base, str) and "kind" not in change:
        named = Mapping(change.at)
        named.put("kind", base, change.at)
        base = named
    if not isinstance(base, Mapping) or ("kind" in change and change["kind"] != base.get("kind")):
        return change
    merged = base.copy()
    for key, value in change.items():
        merged.put(key, merge(base[key], value) if key in base else value, change.where[key])
    return merged


def normalize(experiment: Mapping, context: str) -> Mapping:
    """An experiment's own mapping with its preset, its `ffn: none` and its paths spelled out."""
    return _anchored(_parts(experiment, context))


def _nested(path: tuple[str, ...], value: Any, where: Where) -> Mapping:
    for key in reversed(path):
        holder = Mapping(where)
        holder.put(key, value, where)
        value = holder
    return value


def _parts(changes: Mapping, context: str) -> Mapping:
    """`changes` with a preset replaced by its parts, and what is said of the FFN by its value."""
    model = changes.get("model")
    if not isinstance(model, Mapping) or not {"attention", "ffn"} & model.keys():
        return changes
    changes, model = changes.copy(), model.copy()
    changes["model"] = model
    if "attention" in model:
        where = model.where["attention"]
        model["attention"] = _attention(model["attention"], where, f"{context}: attention")
    match model.get("ffn", {}):
        case "with":
            # Changes nothing where there is an FFN, and lacks a width where there is none.
            model["ffn"] = Mapping(model.where["ffn"])
        case "without" | "none":
            model["ffn"] = None
        case str(word):
            hint = suggest(word, ["with", "without", "none"])
            raise ConfigError(f"{model.where['ffn']}: {context}: ffn: unknown '{word}'{hint}")
    return changes


def _anchored(tree: Mapping) -> Mapping:
    """`tree`, in the experiment's own keys, with absolute paths."""
    for keys in _path_keys():
        tree = _absolute(tree, keys)
    return tree


def _absolute(tree: Mapping, keys: tuple[str, ...]) -> Mapping:
    """`tree` with the path at `keys`, where it has one, made absolute."""
    first, *rest = keys
    value = tree.get(first)
    changed: Mapping | str | None = None
    if rest and isinstance(value, Mapping):
        changed = _absolute(value, tuple(rest))
    elif not rest and isinstance(value, str):
        where = tree.where[first]
        folder = Path(where.file).parent if where.line else Path()
        changed = str((folder / value).resolve())
    if changed is None:
        return tree
    copied = tree.copy()
    copied.put(first, changed, tree.where[first])
    return copied


@cache
def _path_keys() -> list[tuple[str, ...]]:
    """Every key of an experiment, of whatever kind, that holds a path."""
    return sorted(set(_paths(Experiment)))


def _paths(kind: type[Config]) -> Iterator[tuple[str, ...]]:
    for name, field in kind.model_fields.items():
        for held in get_args(field.annotation) or (field.annotation,):
            if held is Path:
                yield (name,)
            elif isinstance(held, type) and issubclass(held, Config):
                members: Iterable[type[Config]] = [held]
                if issubclass(held, Kind) and Kind in held.__bases__:
                    members = held.family.values()
                for member in members:
                    yield from ((name, *rest) for rest in _paths(member))


def _attention(value: Any, where: Where, context: str) -> Any:
    if isinstance(value, str):
        return _preset(value, where, context)
    if not isinstance(value, Mapping):
        return value
    for key in value:
        if key not in CHOICES:
            raise ConfigError(
                f"{value.where[key]}: {context}: unknown key '{key}'{suggest(key, CHOICES)}"
            )
    if "preset" not in value:
        return value
    parts = value.copy()
    name = parts.pop("preset")
    return merge(_preset(name, value.where["preset"], context), parts)


def _preset(name: Any, where: Where, context: str) -> Mapping:
    try:
        parts = preset(str(name)).model_dump()
    except ValueError as error:
        raise ConfigError(f"{where}: {context}: {error}") from error
    return _located(parts, where)


def _located(value: Any, where: Where) -> Any:
    if not isinstance(value, dict):
        return value
    found = Mapping(where)
    for key, item in value.items():
        found.put(str(key), _located(item, where), where)
    return found


def _match(value: Any, where: Where, context: str) -> str:
    if value not in MATCHES:
        hint = suggest(str(value), MATCHES)
        raise ConfigError(f"{where}: {context}: match: unknown '{value}'{hint}")
    return str(value)


@cache
def _keys() -> dict[str, str]:
    """Every key a variant may name, by what a researcher may have typed for it."""
    found: dict[str, str] = {}
    for section, field in Experiment.model_fields.items():
        kind = field.annotation
        if not isinstance(kind, type) or not issubclass(kind, Config):
            continue
        members = kind.family.values() if issubclass(kind, Kind) else [kind]
        for member in members:
            for key in member.model_fields:
                if key != "kind":
                    found.setdefault(key, f"{section}.{key}")
    return found | {key: key for key in (*SHORTHANDS, "match", *Experiment.model_fields)}


def _suggestion(key: str) -> str:
    close = difflib.get_close_matches(key.split(".")[-1], _keys(), n=1, cutoff=0.5)
    close = close or difflib.get_close_matches(key, _keys(), n=1, cutoff=0.5)
    if close:
        return f"; did you mean '{_keys()[close[0]]}'?"
    return suggest("", [*SHORTHANDS, "match", *Experiment.model_fields])
