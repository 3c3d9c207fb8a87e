"""Overrides: the changes that a variant makes to an experiment, in a short notation.

    attention: belief2                            a preset for model.attention
    attention: {preset: belief2, zz: without}     the preset with another choice
    residual: perpendicular                       model.attention.residual; likewise its other keys
    zz: with | without
    ffn: with | without | none | {width: 384}
    optimizer.lr: 3e-4                            any other key of the experiment, dotted or nested
    match: parameters | none                      the study's `match`, for this variant

`spell_out` turns an override into a change of the experiment's own keys, and `merge` applies a
change. The order of the keys does not matter: the shorter path is applied first, so `residual`
refines `attention` wherever it stands. A mapping changes the keys that it names. A part that is
given by its name, or with another `kind`, replaces the complete part.

A path is relative to its file, or to the working directory on a command line. It becomes absolute
here, where the file is still known.
"""

import difflib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, get_args

from lit_attn.attention.spec import CHOICES, AttentionSpec, preset
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
    """Override in the experiment's own keys; `match` is None unless the override sets it."""

    experiment: Mapping
    match: str | None


def spell_out(override: Mapping, context: str) -> Change:
    """Return `override` in the experiment's own keys, with absolute paths.

    Raises ConfigError, which contains `context`, for an unknown key and for a key that is written
    twice.
    """
    match = None
    entries = []
    for key, value in override.items():
        where = override.where[key]
        if key == "match":
            if value not in MATCHES:
                hint = suggest(str(value), MATCHES)
                raise ConfigError(f"{where}: {context}: match: unknown '{value}'{hint}")
            match = value
            continue
        first, *rest = key.split(".")
        if first not in SHORTHANDS and first not in Experiment.model_fields:
            raise ConfigError(f"{where}: {context}: unknown key '{key}'{_suggest_key(key)}")
        entries.append(((*SHORTHANDS.get(first, (first,)), *rest), value, key))

    changes = Mapping(override.at)
    key_of: dict[tuple[str, ...], str] = {}
    for path, value, key in sorted(entries, key=lambda entry: len(entry[0])):
        where = override.where[key]
        if path in key_of:
            raise ConfigError(f"{where}: {context}: '{key}' and '{key_of[path]}' are the same key")
        key_of[path] = key
        nested = value
        for name in reversed(path):
            outer = Mapping(where)
            outer.put(name, nested, where)
            nested = outer
        changes = merge(changes, _expand_model(nested, context))
    return Change(_make_paths_absolute(changes), match)


def normalize(experiment: Mapping, context: str) -> Mapping:
    """Return an experiment with its preset spelled out and with absolute paths."""
    return _make_paths_absolute(_expand_model(experiment, context))


def merge(base: Any, change: Any) -> Any:
    """Return `base` with `change` applied: mappings key by key, and any other value replaced.

    A mapping with another `kind` replaces the mapping in `base`. A mapping without a kind changes
    the part in `base`, even if that is given by its name alone. The arguments stay as they are.
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


def _expand_model(changes: Mapping, context: str) -> Mapping:
    """Return `changes` with the preset and the words for the FFN in `model` replaced by values."""
    model = changes.get("model")
    if not isinstance(model, Mapping) or not {"attention", "ffn"} & model.keys():
        return changes
    changes, model = changes.copy(), model.copy()
    changes["model"] = model
    if "attention" in model:
        where = model.where["attention"]
        model["attention"] = _expand_attention(model["attention"], where, f"{context}: attention")
    match model.get("ffn", {}):
        case "with":
            # An empty mapping keeps an FFN as it is, and is an error without one: it has no width.
            model["ffn"] = Mapping(model.where["ffn"])
        case "without" | "none":
            model["ffn"] = None
        case str(word):
            hint = suggest(word, ["with", "without", "none"])
            raise ConfigError(f"{model.where['ffn']}: {context}: ffn: unknown '{word}'{hint}")
    return changes


def _expand_attention(value: Any, where: Where, context: str) -> Any:
    """Return the choices that a preset's name or a mapping with `preset` stands for."""
    if isinstance(value, str):
        return _expand_preset(value, where, context)
    if not isinstance(value, Mapping):
        return value
    for key in value:
        if key not in CHOICES:
            hint = suggest(key, CHOICES)
            raise ConfigError(f"{value.where[key]}: {context}: unknown key '{key}'{hint}")
    if "preset" not in value:
        return value
    choices = value.copy()
    name = choices.pop("preset")
    return merge(_expand_preset(name, value.where["preset"], context), choices)


def _expand_preset(name: Any, where: Where, context: str) -> Any:
    try:
        choices = preset(str(name)).model_dump()
    except ValueError as error:
        raise ConfigError(f"{where}: {context}: {error}") from error
    return _with_line(choices, where)


def _with_line(value: Any, where: Where) -> Any:
    """Return a copy of `value` in which every key has the line `where`."""
    if not isinstance(value, dict):
        return value
    mapping = Mapping(where)
    for key, item in value.items():
        mapping.put(str(key), _with_line(item, where), where)
    return mapping


def _make_paths_absolute(tree: Mapping) -> Mapping:
    for keys in _path_keys():
        tree = _make_path_absolute(tree, keys)
    return tree


def _make_path_absolute(tree: Mapping, keys: tuple[str, ...]) -> Mapping:
    """Return `tree` with an absolute path at `keys`, if there is a path."""
    first, *rest = keys
    value = tree.get(first)
    if rest and isinstance(value, Mapping):
        value = _make_path_absolute(value, tuple(rest))
    elif not rest and isinstance(value, str):
        where = tree.where[first]
        value = str((where.folder / value).resolve())
    if value is tree.get(first):
        return tree
    copied = tree.copy()
    copied.put(first, value, tree.where[first])
    return copied


@cache
def _path_keys() -> list[tuple[str, ...]]:
    """Return the keys of all paths in an experiment of any kind."""
    return sorted(set(_find_paths(Experiment)))


def _find_paths(config: type[Config]) -> Iterator[tuple[str, ...]]:
    for name, field in config.model_fields.items():
        for annotation in get_args(field.annotation) or (field.annotation,):
            if annotation is Path:
                yield (name,)
            elif isinstance(annotation, type) and issubclass(annotation, Config):
                for member in _members(annotation):
                    yield from ((name, *keys) for keys in _find_paths(member))


def _members(config: type[Config]) -> list[type[Config]]:
    """Return the members of a family, or the configuration itself if it is no family."""
    if issubclass(config, Kind) and Kind in config.__bases__:
        return list(config.family.values())
    return [config]


def _suggest_key(key: str) -> str:
    """Return the end of the message about an unknown key of an override."""
    if key == "set":
        return "; write the key itself, as `optimizer.lr: 1e-4`, beside `attention`"
    keys = _suggestions()
    for word in (key.split(".")[-1], key):
        if close := difflib.get_close_matches(word, keys, n=1, cutoff=0.5):
            return f"; did you mean '{keys[close[0]]}'?"
    return suggest("", [*SHORTHANDS, "match", *Experiment.model_fields])


def _suggestions() -> dict[str, str]:
    """Return every key that an override can contain, by the word that a user may have written."""
    keys: dict[str, str] = {}
    for section, field in Experiment.model_fields.items():
        config = field.annotation
        if isinstance(config, type) and issubclass(config, Config):
            for member in _members(config):
                for key in member.model_fields:
                    if key != "kind":
                        keys.setdefault(key, f"{section}.{key}")
    return keys | {key: key for key in (*SHORTHANDS, "match", *Experiment.model_fields)}
