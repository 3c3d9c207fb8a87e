"""Names and overrides of a study's variants, expanded from `axes`, `include` and `cells`."""

import itertools
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from lit_attn.config.source import Mapping, Sequence, Where, format_value
from lit_attn.config.study import StudySource
from lit_attn.report.formats import read_asset
from lit_attn.schema.errors import ConfigError, suggest

# A variant's name is also the name of a folder: no separators, no leading dot, and short enough
# for every file system.
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._=,+-]{0,119}")
MAX_VARIANTS = 100_000
"""Largest number of combinations of a study's axes."""


@dataclass(frozen=True, eq=False)
class Override:
    """An override as written, and the key path that error messages name."""

    mapping: Mapping
    path: str


@dataclass(frozen=True)
class VariantSource:
    """A variant as written: its name, its overrides in order of application, and its line."""

    name: str
    overrides: tuple[Override, ...]
    where: Where

    @property
    def terms(self) -> set[str]:
        """Terms of the name: `residual=full,zz=with` has two."""
        return set(self.name.split(","))


def expand_axes(source: StudySource) -> list[VariantSource]:
    """Return the variants of the product, then of `include`, then of `cells`.

    Raises ConfigError for a mistake in `axes`, `zip`, `exclude` or `include`, and for a name that
    is used twice or cannot name a folder.
    """
    variants = [*_product(source), *_included(source)]
    for name, mapping in source.study.cells.items():
        override = Override(mapping, f"{source.name}.cells.{name}")
        variants.append(VariantSource(name, (override,), source.study.cells.where[name]))
    if not variants:
        raise source.error((), "needs variants: `cells:` or `axes:`")
    lines: dict[str, Where] = {}
    for variant in variants:
        context = f"{variant.where}: {source.name}"
        if not NAME.fullmatch(variant.name):
            raise ConfigError(
                f"{context}: '{variant.name}' cannot name a folder: use up to 120 letters, digits"
                " and . _ = , + -, and begin with a letter or digit"
            )
        if variant.name in lines:
            text = f"two variants have the name '{variant.name}', the other one on line"
            raise ConfigError(f"{context}: {text} {lines[variant.name].line}")
        lines[variant.name] = variant.where
    for name, mapping in source.study.overrides.items():
        override = Override(mapping, f"{source.name}.overrides.{name}")
        terms = set(name.split(","))
        for number, variant in enumerate(variants):
            if terms <= variant.terms:
                variants[number] = replace(variant, overrides=(*variant.overrides, override))
    return variants


def require_names(source: StudySource, variants: list[VariantSource]) -> None:
    """Raise ConfigError if `baseline`, `published` or `overrides` names no variant."""
    names = [variant.name for variant in variants]
    published = [(("published", name), name) for name in source.study.published]
    for path, name in [(("baseline",), source.study.baseline), *published]:
        if name not in names:
            raise source.error(path, f"no variant '{name}'{suggest(name, names[:30])}")
    columns = [entry["key"] for entry in read_asset("columns.yaml")]
    for place, key in enumerate(source.study.latex.columns or ()):
        if key not in columns:
            hint = suggest(key, columns)
            raise source.error(("latex", "columns", place), f"no column '{key}'{hint}")
    for name in source.study.overrides:
        terms = set(name.split(","))
        if not any(terms <= variant.terms for variant in variants):
            choices = dict.fromkeys(term for v in variants for term in (v.name, *v.terms))
            hint = suggest(name, list(choices)[:30])
            raise source.error(("overrides", name), f"no variant has '{name}' in its name{hint}")


def _product(source: StudySource) -> Iterator[VariantSource]:
    axes = {key: _axis_values(source, key) for key in source.study.axes}
    if not axes:
        return
    groups = _zip_groups(source, axes)
    count = math.prod(len(axes[group[0]]) for group in groups)
    if count > MAX_VARIANTS:
        text = f"{count:,} combinations exceed the limit of {MAX_VARIANTS:,} variants"
        raise source.error(("axes",), f"{text}; use fewer values, or split the study")
    rules = _exclusions(source, axes)
    unused_rules = set(range(len(rules)))
    steps = (zip(*(axes[key] for key in group), strict=True) for group in groups)
    for combination in itertools.product(*steps):
        texts = itertools.chain(*combination)
        point = dict(zip(itertools.chain(*groups), texts, strict=True))
        excluding = [all(point[key] in texts for key, texts in rule.items()) for rule in rules]
        unused_rules.difference_update(itertools.compress(range(len(rules)), excluding))
        if not any(excluding):
            name = ",".join(_term(source, key, point[key]) for key in axes)
            overrides = tuple(axes[key][point[key]] for key in axes)
            yield VariantSource(name, overrides, source.tree.where["axes"])
    for index in sorted(unused_rules):
        raise source.error(("exclude", index), "excludes no combination of the axes")


def _axis_values(source: StudySource, key: str) -> dict[str, Override]:
    """Return the override of each value of an axis: a list for one key, or named overrides."""
    written, path = source.study.axes[key], f"{source.name}.axes.{key}"
    values = {}
    if isinstance(written, Mapping):
        for name, mapping in written.items():
            if not isinstance(mapping, Mapping):
                raise source.error(("axes", key, name), "needs a mapping of overrides")
            values[name] = Override(mapping, f"{path}.{name}")
    elif isinstance(written, Sequence):
        for value, where in zip(written, written.where, strict=True):
            mapping = Mapping(where)
            mapping.put(key, value, where)
            values[format_value(value)] = Override(mapping, path)
        if len(values) < len(written):
            raise source.error(("axes", key), "has a value twice")
    else:
        raise source.error(("axes", key), "needs a list of values, or a mapping of named overrides")
    if not values:
        raise source.error(("axes", key), "has no values")
    return values


def _term(source: StudySource, key: str, text: str, is_only_key: bool = True) -> str:
    """Return a value's part of a variant's name: `lr=0.001`, or `0.001` for the only axis."""
    axes = source.study.axes
    if isinstance(axes.get(key), Mapping) or (is_only_key and list(axes) == [key]):
        return text
    return f"{key.split('.')[-1]}={text}"


def _zip_groups(source: StudySource, axes: dict[str, dict[str, Override]]) -> list[tuple[str, ...]]:
    """Return the axes in groups that advance together, ordered by the first axis of each group."""
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
            raise source.error(("zip", index), f"zipped axes need equally many values: {counts}")
    return list(dict.fromkeys(group_of.get(key, (key,)) for key in axes))


def _exclusions(
    source: StudySource, axes: dict[str, dict[str, Override]]
) -> list[dict[str, set[str]]]:
    """Return for each rule of `exclude` the texts of the excluded values by axis."""
    rules = []
    for index, rule in enumerate(source.study.exclude):
        texts_of = {}
        for key, value in rule.items():
            if key not in axes:
                raise source.error(("exclude", index, key), f"no axis '{key}'{suggest(key, axes)}")
            texts = {format_value(item) for item in (value if isinstance(value, list) else [value])}
            for text in texts - axes[key].keys():
                hint = suggest(text, axes[key])
                raise source.error(("exclude", index, key), f"no value '{text}'{hint}")
            texts_of[key] = texts
        rules.append(texts_of)
    return rules


def _included(source: StudySource) -> Iterator[VariantSource]:
    """Yield the variants of `include`, named as those of the product are.

    A key may be any key of a variant. A value of an axis of named overrides is one of its names.
    """
    for index, mapping in enumerate(source.study.include):
        path = f"{source.name}.include.{index}"
        names, overrides = [], []
        plain = Mapping(mapping.at)
        for key, value in mapping.items():
            names.append(_term(source, key, format_value(value), len(mapping) == 1))
            if isinstance(named := source.study.axes.get(key), Mapping):
                if value not in named:
                    hint = suggest(str(value), named)
                    raise source.error(("include", index, key), f"no value '{value}'{hint}")
                overrides.append(Override(named[value], path))
            else:
                plain.put(key, value, mapping.where[key])
        yield VariantSource(",".join(names), (*overrides, Override(plain, path)), mapping.at)
