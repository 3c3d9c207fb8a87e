"""Overrides: the changes that a variant makes to an experiment (docs/studies.md has all forms).

`spell_out` returns an override as a change in the experiment's own keys, and `merge` applies a
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

from pydantic.fields import FieldInfo

from lit_attn.attention.spec import AttentionSpec
from lit_attn.config.experiment import Experiment
from lit_attn.schema.base import WORDS, Config
from lit_attn.schema.errors import ConfigError, require, suggest
from lit_attn.schema.yaml_text import Mapping, Where

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
    written_keys: dict[tuple[str, ...], list[str]] = {}
    for key, value in override.items():
        place = f"{override.where[key]}: {context}"
        if key == "match":
            match = str(value)
            require(f"{place}: match: unknown", match, MATCHES)
        else:
            path = _find_path(key, place)
            written_keys.setdefault(path, []).append(key)
    experiment = Mapping(override.at)
    for path in sorted(written_keys, key=len):
        first, *others = written_keys[path]
        if others:
            raise ConfigError(
                f"{override.where[others[0]]}: {context}:"
                f" '{others[0]}' and '{first}' are the same key"
            )
        nested = _spell_out_words(_nest(path, override[first], override.where[first]))
        if any(first.startswith(f"{section}.") for section in override):
            _require_new_values(experiment, nested, first, context)
        experiment = merge(experiment, nested)
    return Change(_make_paths_absolute(experiment), match)


def _require_new_values(written: Any, added: Mapping, key: str, context: str) -> None:
    """Raise ConfigError if `optimizer.lr`, as `key`, adds what `optimizer: {lr: 1}` has written.

    `residual` beside `attention` is no such case: a part refines the mechanism.
    """
    for name, value in added.items():
        if not isinstance(written, Mapping) or name not in written:
            continue
        if isinstance(value, Mapping):
            _require_new_values(written[name], value, key, context)
        elif not isinstance(written[name], Mapping):
            raise ConfigError(
                f"{added.where[name]}: {context}: '{key}' writes '{name}' again,"
                f" which '{key.partition('.')[0]}' has written; delete one of the two"
            )


def spell_out_experiment(experiment: Mapping) -> Mapping:
    """Return an experiment with absolute paths, and with the name of a preset as a mapping."""
    return _make_paths_absolute(_spell_out_words(experiment))


def _find_path(key: str, place: str) -> tuple[str, ...]:
    """Return the keys in an experiment for the key of an override: `ffn` is model, ffn.

    Raises ConfigError, which begins with `place`, for an unknown key.
    """
    first, *subkeys = key.split(".")
    if first in SHORTHANDS:
        return (*SHORTHANDS[first], *subkeys)
    if first in Experiment.model_fields:
        return (first, *subkeys)
    raise ConfigError(f"{place}: unknown key '{key}'{_suggest_key(key)}")


def _nest(path: tuple[str, ...], value: Any, where: Where) -> Mapping:
    """Return the mapping that has `value` at the keys `path`, all of them in the line `where`."""
    nested = value
    for key in reversed(path):
        nested = Mapping(where, {key: nested})
    return nested


def merge(base: Any, change: Any) -> Any:
    """Return `base` with `change` applied: mappings key by key, and any other value replaced.

    A mapping with another `kind`, with a `preset`, or with `use` (a rule of `attention.layers`)
    replaces the mapping in `base`. A mapping
    without a kind changes the part in `base`, even if that is given by its name alone, and the
    part keeps its line. The arguments stay as they are.
    """
    if not isinstance(change, Mapping) or "preset" in change or "use" in change:
        return change
    if isinstance(base, str) and "kind" not in change:
        base = Mapping(change.at, {"kind": base})
    if not isinstance(base, Mapping):
        return change
    has_another_kind = "kind" in change and change["kind"] != base.get("kind")
    if has_another_kind:
        return change
    merged = base.copy()
    for key, value in change.items():
        is_part_of_base = isinstance(value, Mapping) and isinstance(base.get(key), Mapping)
        where = base.where[key] if is_part_of_base else change.where[key]
        merged_value = merge(base[key], value) if key in base else value
        merged.put(key, merged_value, where)
    return merged


def keep_common_keys(base: Mapping, change: Mapping) -> tuple[Mapping, list[str]]:
    """Return a change of `--set` that keeps the keys which the old and the new kind both have.

    Whoever sets the kind of the data, the model, the optimizer, the schedule or the task wants the
    rest of the study. The list has the keys of `base` that are not kept: those that the new kind
    does not have, and its `own_keys`.
    """
    kept = change.copy()
    dropped = []
    for section, value in change.items():
        family = getattr(Experiment.model_fields[section].annotation, "family", {})
        if isinstance(value, str):
            value = Mapping(change.where[section], {"kind": value})
        old = base.get(section)
        if not isinstance(value, Mapping) or not isinstance(old, Mapping):
            continue
        kind = value.get("kind")
        if kind not in family:
            continue
        section_value = value.copy()
        for key, old_value in old.items():
            member = family[kind]
            has_own_value = key in member.own_keys and kind != old.get("kind")
            if key not in member.model_fields or has_own_value:
                if key != "kind" and key not in value:
                    dropped.append(f"{section}.{key}")
            elif key in value:
                section_value.put(key, merge(old_value, value[key]), value.where[key])
            else:
                section_value.put(key, old_value, old.where[key])
        kept.put(section, section_value, change.where[section])
    return kept, dropped


def _spell_out_words(experiment: Mapping) -> Mapping:
    """Return an experiment with mappings for the name of a preset and the words for the FFN.

    An empty mapping keeps an FFN as it is, and is an error without one: it has no width.
    """
    model = experiment.get("model")
    if not isinstance(model, Mapping):
        return experiment
    model = model.copy()
    attention = model.get("attention")
    if isinstance(attention, str):
        model["attention"] = Mapping(model.where["attention"], {"preset": attention})
    ffn = model.get("ffn")
    if ffn == "with":
        model["ffn"] = Mapping(model.where["ffn"])
    elif ffn in ("without", "none"):
        model["ffn"] = None
    spelled = experiment.copy()
    spelled["model"] = model
    return spelled


def _make_paths_absolute(tree: Mapping, prefix: tuple[str, ...] = ()) -> Mapping:
    """Return the experiment, or its part at the keys `prefix`, with absolute paths."""
    absolute = tree.copy()
    for key, value in tree.items():
        keys = (*prefix, key)
        if isinstance(value, Mapping):
            absolute[key] = _make_paths_absolute(value, keys)
        elif isinstance(value, str) and keys in _path_keys():
            path = tree.where[key].folder / value
            absolute[key] = str(path.resolve())
    return absolute


@cache
def _path_keys() -> set[tuple[str, ...]]:
    """Return the keys of all paths in an experiment of any kind."""
    return {keys for keys, annotation in _walk(Experiment) if annotation is Path}


def _walk(config: type[Config]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield the keys and the types of all fields below `config`, for every member of a family."""
    for keys, field in list_fields(config):
        for annotation in get_args(field.annotation) or (field.annotation,):
            yield keys, annotation


def list_fields(config: type[Config]) -> Iterator[tuple[tuple[str, ...], FieldInfo]]:
    """Yield the keys of all fields below `config`, for every member of a family, and the fields."""
    for name, field in config.model_fields.items():
        yield (name,), field
        for annotation in get_args(field.annotation) or (field.annotation,):
            is_config = isinstance(annotation, type) and issubclass(annotation, Config)
            if not is_config:
                continue
            # A class without a family, or without members, has its own fields only.
            members = getattr(annotation, "family", {}).values() or [annotation]
            for member in members:
                for keys, child in list_fields(member):
                    yield (name, *keys), child


def _suggest_key(key: str) -> str:
    """Return the end of the message about an unknown key of an override."""
    if key in ("set", "overrides"):
        return "; write the key itself, as `optimizer.lr: 1e-4`, beside `attention`"
    last_word = key.split(".")[-1]
    if last_word in WORDS:
        return f"; write '{WORDS[last_word]}'"
    top_keys = (*SHORTHANDS, "match", *Experiment.model_fields)
    # The key for each word that a user may have written: `lr` for optimizer.lr. If two sections
    # have the word, the first section counts, and a top key counts before both.
    keys_by_word: dict[str, str] = {}
    for path in _list_second_keys():
        keys_by_word[path[1]] = ".".join(path)
    keys_by_word |= {top_key: top_key for top_key in top_keys}
    for word in (last_word, key):
        nearest = difflib.get_close_matches(word, keys_by_word, n=1, cutoff=0.5)
        if nearest:
            return f"; did you mean '{keys_by_word[nearest[0]]}'?"
    return suggest("", top_keys)


def _list_second_keys() -> list[tuple[str, ...]]:
    """Return all paths SECTION.KEY in an experiment, the last section first, each once."""
    paths: dict[tuple[str, ...], None] = {}
    for path, _ in _walk(Experiment):
        # The items of `metrics` have no dotted keys, and `kind` is no key to be guessed.
        has_dotted_keys = path[0] != "metrics"
        if len(path) == 2 and has_dotted_keys and path[1] != "kind":
            paths[path] = None
    return list(reversed(paths))
