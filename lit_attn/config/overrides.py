"""Overrides: the changes that a variant makes to an experiment (docs/studies.md has all forms).

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

from lit_attn.attention.spec import AttentionSpec
from lit_attn.config.experiment import Experiment
from lit_attn.config.source import Mapping
from lit_attn.schema.base import Config
from lit_attn.schema.errors import ConfigError, require, suggest

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

    Raises ConfigError, which contains `context`, for a key that is unknown or written twice.
    """
    match = None
    entries = []
    for key, value in override.items():
        where = override.where[key]
        if key == "match":
            require(f"{where}: {context}: match: unknown", match := str(value), MATCHES)
            continue
        first, *subkeys = key.split(".")
        if first not in SHORTHANDS and first not in Experiment.model_fields:
            raise ConfigError(f"{where}: {context}: unknown key '{key}'{_suggest_key(key)}")
        entries.append(((*SHORTHANDS.get(first, (first,)), *subkeys), value, key))

    changes = Mapping(override.at)
    written: dict[tuple[str, ...], str] = {}
    for path, value, key in sorted(entries, key=lambda entry: len(entry[0])):
        where = override.where[key]
        if path in written:
            raise ConfigError(f"{where}: {context}: '{key}' and '{written[path]}' are the same key")
        written[path] = key
        nested = value
        for name in reversed(path):
            nested = Mapping(where, {name: nested})
        changes = merge(changes, _expand_model(nested))
    return Change(_make_paths_absolute(changes), match)


def normalize(experiment: Mapping) -> Mapping:
    """Return an experiment with absolute paths, and with the name of a preset as a mapping."""
    return _make_paths_absolute(_expand_model(experiment))


def merge(base: Any, change: Any) -> Any:
    """Return `base` with `change` applied: mappings key by key, and any other value replaced.

    A mapping with another `kind` or with a `preset` replaces the mapping in `base`. A mapping
    without a kind changes the part in `base`, even if that is given by its name alone, and the
    part keeps its line. The arguments stay as they are.
    """
    if not isinstance(change, Mapping) or "preset" in change:
        return change
    if isinstance(base, str) and "kind" not in change:
        base = Mapping(change.at, {"kind": base})
    if not isinstance(base, Mapping) or change.get("kind", base.get("kind")) != base.get("kind"):
        return change
    merged = base.copy()
    for key, value in change.items():
        tree = base if isinstance(value, Mapping) and isinstance(base.get(key), Mapping) else change
        merged.put(key, merge(base[key], value) if key in base else value, tree.where[key])
    return merged


def _expand_model(changes: Mapping) -> Mapping:
    """Return `changes` with the name of a preset and the words for the FFN as values.

    An empty mapping keeps an FFN as it is, and is an error without one: it has no width.
    """
    model = changes.get("model")
    if not isinstance(model, Mapping):
        return changes
    changes, model = changes.copy(), model.copy()
    changes["model"] = model
    if isinstance(name := model.get("attention"), str):
        model["attention"] = Mapping(model.where["attention"], {"preset": name})
    if (word := model.get("ffn")) in ("with", "without", "none"):
        model["ffn"] = Mapping(model.where["ffn"]) if word == "with" else None
    return changes


def _make_paths_absolute(tree: Mapping, prefix: tuple[str, ...] = ()) -> Mapping:
    resolved = tree.copy()
    for key, value in tree.items():
        keys = (*prefix, key)
        if isinstance(value, Mapping):
            resolved[key] = _make_paths_absolute(value, keys)
        elif isinstance(value, str) and keys in _path_keys():
            resolved[key] = str((tree.where[key].folder / value).resolve())
    return resolved


@cache
def _path_keys() -> set[tuple[str, ...]]:
    """Return the keys of all paths in an experiment of any kind."""
    return {keys for keys, annotation in _walk(Experiment) if annotation is Path}


def _walk(config: type[Config]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield the keys and the types of all fields below `config`, for every member of a family."""
    for name, field in config.model_fields.items():
        for annotation in get_args(field.annotation) or (field.annotation,):
            yield (name,), annotation
            if isinstance(annotation, type) and issubclass(annotation, Config):
                for member in getattr(annotation, "family", {}).values() or [annotation]:
                    yield from (((name, *keys), child) for keys, child in _walk(member))


def _suggest_key(key: str) -> str:
    """Return the end of the message about an unknown key of an override."""
    if key in ("set", "overrides"):
        return "; write the key itself, as `optimizer.lr: 1e-4`, beside `attention`"
    top_keys = (*SHORTHANDS, "match", *Experiment.model_fields)
    # Keys by the word that a user may have written. The items of `metrics` have no dotted keys.
    dotted = {keys: ".".join(keys) for keys, _ in _walk(Experiment) if keys[0] != "metrics"}
    words = {keys[1]: text for keys, text in reversed(dotted.items()) if len(keys) == 2}
    words.pop("kind")
    words |= {word: word for word in top_keys}
    for word in (key.split(".")[-1], key):
        if close := difflib.get_close_matches(word, words, n=1, cutoff=0.5):
            return f"; did you mean '{words[close[0]]}'?"
    return suggest("", top_keys)
