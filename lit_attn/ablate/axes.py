"""Combination of the axes of a study: the name and the overrides of each variant, as written.

A variant has one override for each axis, or is one of the study's `cells`.
"""

import itertools
import math
import re
from dataclasses import dataclass

from lit_attn.config.source import format_value
from lit_attn.config.study import StudySource
from lit_attn.schema.errors import ConfigError, suggest
from lit_attn.schema.yaml_text import Mapping, Sequence, Where

# A variant's name is also that of a folder: no separators, no leading dot, at most 120 letters.
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._=,+-]{0,119}")
NAME_RULE = "use up to 120 letters, digits and . _ = , + -, and begin with a letter or digit"
MAX_VARIANTS = 100_000  # Largest number of combinations of a study's axes.


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


Rule = dict[str, set[str]]
"""Rule of `exclude`: the texts of the excluded values by axis."""


def combine_axes(source: StudySource) -> list[VariantSource]:
    """Return the variants of the product of all axes, then those of `cells`.

    Raises ConfigError for a mistake in `axes` or `exclude`, and for a name that occurs twice or
    cannot name a folder.
    """
    variants = _combine(source)
    for name, mapping in source.study.cells.items():
        override = Override(mapping, f"{source.name}.cells.{name}")
        variants.append(VariantSource(name, (override,), source.study.cells.where[name]))
    if not variants:
        raise source.error((), "needs variants: `cells:` or `axes:`")
    _require_folder_names(source, variants)
    return variants


def _combine(source: StudySource) -> list[VariantSource]:
    """Return the variants of the product of all axes that no rule of `exclude` leaves out."""
    if not source.study.axes:
        return []
    axes = {key: _list_values(source, key) for key in source.study.axes}
    count = math.prod(len(values) for values in axes.values())
    if count > MAX_VARIANTS:
        raise source.error(
            ("axes",),
            f"{count:,} combinations exceed the limit of {MAX_VARIANTS:,} variants;"
            " use fewer values, or split the study",
        )
    rules = _list_rules(source, axes)
    used_rules: set[int] = set()
    variants = []
    for texts in itertools.product(*axes.values()):
        point = dict(zip(axes, texts, strict=True))
        matching_rules = [index for index, rule in enumerate(rules) if _is_excluded(point, rule)]
        used_rules.update(matching_rules)
        if not matching_rules:
            overrides = tuple(axes[key][text] for key, text in point.items())
            name = _name_point(source, point)
            variants.append(VariantSource(name, overrides, source.tree.where["axes"]))
    for index in range(len(rules)):
        if index not in used_rules:
            raise source.error(("exclude", index), "excludes no combination of the axes")
    return variants


def _list_values(source: StudySource, key: str) -> dict[str, Override]:
    """Return the values of an axis: the override of each by its text in names of variants.

    The axis is a list of values for one key, or a mapping of named overrides.
    """
    axis = source.study.axes[key]
    if isinstance(axis, Mapping):
        values = _list_named_values(source, key, axis)
    elif isinstance(axis, Sequence):
        values = _list_plain_values(source, key, axis)
    else:
        raise source.error(("axes", key), "needs a list of values, or a mapping of named overrides")
    if not values:
        raise source.error(("axes", key), "has no values")
    return values


def _list_named_values(source: StudySource, key: str, axis: Mapping) -> dict[str, Override]:
    """Return the override of each name of an axis of named overrides."""
    values = {}
    for name, mapping in axis.items():
        if not isinstance(mapping, Mapping):
            raise source.error(("axes", key, name), "needs a mapping of overrides")
        values[name] = Override(mapping, f"{source.name}.axes.{key}.{name}")
    return values


def _list_plain_values(source: StudySource, key: str, axis: Sequence) -> dict[str, Override]:
    """Return the override for each value of an axis that lists values of one key."""
    values = {}
    for value, where in zip(axis, axis.where, strict=True):
        mapping = Mapping(where)
        mapping.put(key, value, where)
        values[format_value(value)] = Override(mapping, f"{source.name}.axes.{key}")
    if len(values) < len(axis):
        raise source.error(("axes", key), "has a value twice")
    return values


def _list_rules(source: StudySource, axes: dict[str, dict[str, Override]]) -> list[Rule]:
    """Return the rules of `exclude`; ConfigError for an axis or a value that does not exist."""
    rules = []
    for index, written in enumerate(source.study.exclude):
        rule: Rule = {}
        for key, value in written.items():
            if key not in axes:
                raise source.error(("exclude", index, key), f"no axis '{key}'{suggest(key, axes)}")
            excluded_values = value if isinstance(value, list) else [value]
            texts = [format_value(excluded) for excluded in excluded_values]
            for text in texts:
                if text not in axes[key]:
                    raise source.error(
                        ("exclude", index, key), f"no value '{text}'{suggest(text, axes[key])}"
                    )
            rule[key] = set(texts)
        rules.append(rule)
    return rules


def _is_excluded(point: dict[str, str], rule: Rule) -> bool:
    """Return True if the rule has the point's value of every axis that the rule names."""
    return all(point[key] in texts for key, texts in rule.items())


def _name_point(source: StudySource, point: dict[str, str]) -> str:
    """Return the name of the variant with the text of a value for each axis."""
    # The axes of `compare_within` have one value in a study, which is in the study's name.
    axes = [key for key in point if key not in source.study.compare_within]
    terms = []
    for key in axes:
        # A named value, and the value of the only axis, stand without the key.
        if isinstance(source.study.axes[key], Mapping) or len(axes) == 1:
            terms.append(point[key])
        else:
            short_key = key.split(".")[-1]
            terms.append(f"{short_key}={point[key]}")
    return ",".join(terms)


def _require_folder_names(source: StudySource, variants: list[VariantSource]) -> None:
    """Raise ConfigError for a name that occurs twice or cannot name a folder."""
    lines: dict[str, Where] = {}
    for variant in variants:
        if not NAME.fullmatch(variant.name):
            raise ConfigError(
                f"{variant.where}: {source.name}: '{variant.name}' cannot name a folder:"
                f" {NAME_RULE}"
            )
        if variant.name in lines:
            raise ConfigError(
                f"{variant.where}: {source.name}: two variants have the name '{variant.name}',"
                f" the other one on line {lines[variant.name].line}"
            )
        lines[variant.name] = variant.where
