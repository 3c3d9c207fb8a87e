"""The variants of a study as written: a name and what it changes, nothing resolved yet."""

import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from lit_attn.config.overrides import Change, spell_out
from lit_attn.config.source import Mapping, Sequence, Where, format_value
from lit_attn.config.study import StudySource
from lit_attn.schema.errors import ConfigError, suggest

# A variant's name is a folder's: no separators, no leading dot, short enough for any file system.
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._=,+-]{0,119}")


@dataclass(frozen=True)
class Value:
    """One value of an axis: its name, the text that `exclude` calls it, and what it changes."""

    name: str
    text: str
    change: Change


@dataclass(frozen=True)
class Point:
    """A variant: its changes in the order they are applied, and the line that names it."""

    name: str
    changes: tuple[Change, ...]
    where: Where

    @property
    def terms(self) -> set[str]:
        """`residual=full,zz=with` has two."""
        return set(self.name.split(","))


def points(source: StudySource) -> list[Point]:
    """The product, then what is included, then named cells; ConfigError for any mistake."""
    found = [*_product(source), *_included(source), *_cells(source)]
    if not found:
        raise source.error((), "needs variants: `cells:` or `axes:`")
    seen: dict[str, Where] = {}
    for point in found:
        context = f"{point.where}: {source.name}"
        if not NAME.fullmatch(point.name):
            raise ConfigError(
                f"{context}: '{point.name}' cannot name a folder: use up to 120 letters, digits"
                " and . _ = , + -, a letter or digit first"
            )
        if point.name in seen:
            raise ConfigError(
                f"{context}: two variants are called '{point.name}', here and on line"
                f" {seen[point.name].line}"
            )
        seen[point.name] = point.where
    return _overridden(source, found)


def _cells(source: StudySource) -> Iterator[Point]:
    cells = source.study.cells
    for name, override in cells.items():
        change = spell_out(override, f"{source.name}.cells.{name}")
        yield Point(name, (change,), cells.where[name])


def _product(source: StudySource) -> Iterator[Point]:
    axes = {key: _values(source, key) for key in source.study.axes}
    if not axes:
        return
    groups = _zipped(source, axes)
    excluded = _exclusions(source, axes)
    used: set[int] = set()
    for choice in itertools.product(*(zip(*(axes[k] for k in g), strict=True) for g in groups)):
        chosen = dict(
            itertools.chain.from_iterable(
                zip(group, values, strict=True)
                for group, values in zip(groups, choice, strict=True)
            )
        )
        hits = [
            index
            for index, rule in enumerate(excluded)
            if all(chosen[key].text in texts for key, texts in rule.items())
        ]
        used.update(hits)
        if not hits:
            ordered = [chosen[key] for key in axes]
            name = ",".join(value.name for value in ordered)
            where = source.tree.where["axes"]
            yield Point(name, tuple(value.change for value in ordered), where)
    for index in range(len(excluded)):
        if index not in used:
            raise source.error(("exclude", index), "leaves out no point of the product")


def _values(source: StudySource, key: str) -> list[Value]:
    """The values of one axis: a list for the key it names, or a mapping of named overrides."""
    axes = source.study.axes
    written, context = axes[key], f"{source.name}.axes.{key}"
    values = []
    if isinstance(written, Mapping):
        for name, override in written.items():
            if not isinstance(override, Mapping):
                raise source.error(("axes", key, name), "needs a mapping of overrides")
            values.append(Value(name, name, spell_out(override, f"{context}.{name}")))
    elif isinstance(written, Sequence):
        alone = len(axes) == 1
        for value, where in zip(written, written.where, strict=True):
            override = Mapping(where)
            override.put(key, value, where)
            text = format_value(value)
            name = text if alone else f"{key.split('.')[-1]}={text}"
            values.append(Value(name, text, spell_out(override, context)))
    else:
        raise source.error(("axes", key), "needs a list of values, or a mapping of named overrides")
    if not values:
        raise source.error(("axes", key), "has no values")
    return values


def _zipped(source: StudySource, axes: dict[str, list[Value]]) -> list[tuple[str, ...]]:
    """The axes in groups that advance together, each where its first member stands."""
    group_of: dict[str, tuple[str, ...]] = {}
    for index, group in enumerate(source.study.zip):
        for key in group:
            if key not in axes:
                raise source.error(("zip", index), f"no axis '{key}'{suggest(key, axes)}")
            if key in group_of:
                raise source.error(("zip", index), f"axis '{key}' is zipped twice")
            group_of[key] = group
        lengths = {key: len(axes[key]) for key in group}
        if len(set(lengths.values())) > 1:
            counts = ", ".join(f"{key} has {length}" for key, length in lengths.items())
            raise source.error(("zip", index), f"needs as many values of each: {counts}")
    return list(dict.fromkeys(group_of.get(key, (key,)) for key in axes))


def _exclusions(source: StudySource, axes: dict[str, list[Value]]) -> list[dict[str, set[str]]]:
    """For each rule the texts that it leaves out, by axis."""
    rules = []
    for index, rule in enumerate(source.study.exclude):
        found = {}
        for key, value in rule.items():
            if key not in axes:
                raise source.error(("exclude", index, key), f"no axis '{key}'{suggest(key, axes)}")
            texts = {format_value(one) for one in (value if isinstance(value, list) else [value])}
            known = [one.text for one in axes[key]]
            for text in texts - set(known):
                hint = suggest(text, known)
                raise source.error(("exclude", index, key), f"no value '{text}'{hint}")
            found[key] = texts
        rules.append(found)
    return rules


def _included(source: StudySource) -> Iterator[Point]:
    """Points of any keys, named as the product's are; a named override goes by its axis."""
    axes = source.study.axes
    for index, override in enumerate(source.study.include):
        context = f"{source.name}.include.{index}"
        names, changes = [], []
        plain = Mapping(override.at)
        for key, value in override.items():
            if isinstance(named := axes.get(key), Mapping):
                if value not in named:
                    hint = suggest(str(value), named)
                    raise source.error(("include", index, key), f"no value '{value}'{hint}")
                changes.append(spell_out(named[value], context))
                names.append(str(value))
            else:
                plain.put(key, value, override.where[key])
                alone = len(axes) == 1 and key in axes and len(override) == 1
                text = format_value(value)
                names.append(text if alone else f"{key.split('.')[-1]}={text}")
        yield Point(",".join(names), (*changes, spell_out(plain, context)), override.at)


def _overridden(source: StudySource, found: list[Point]) -> list[Point]:
    overrides = source.study.overrides
    for name, override in overrides.items():
        change = spell_out(override, f"{source.name}.overrides.{name}")
        terms = set(name.split(","))
        if not any(terms <= point.terms for point in found):
            known = dict.fromkeys(term for point in found for term in (point.name, *point.terms))
            hint = suggest(name, list(known)[:30])
            raise source.error(("overrides", name), f"no variant has '{name}' in its name{hint}")
        found = [
            replace(point, changes=(*point.changes, change)) if terms <= point.terms else point
            for point in found
        ]
    return found
