"""Variants of a study: expanded from `axes` and `cells`, then validated."""

import functools
import hashlib
import itertools
import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from lit_attn.cells.records import Metric
from lit_attn.config.cell import Cell
from lit_attn.config.experiment import Experiment
from lit_attn.config.models.base import Model
from lit_attn.config.overrides import Change, merge, normalize, spell_out
from lit_attn.config.source import Mapping, Sequence, Where, format_value, locate
from lit_attn.config.study import StudySource
from lit_attn.report.formats import read_asset
from lit_attn.schema.errors import ConfigError, find_problem, suggest
from lit_attn.schema.plugins import load_parts

# A variant's name is also that of a folder: no separators, no leading dot, at most 120 letters.
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._=,+-]{0,119}")
NAME_RULE = "use up to 120 letters, digits and . _ = , + -, and begin with a letter or digit"
MAX_VARIANTS = 100_000  # Largest number of combinations of a study's axes.


def make_label(text: str, limit: int) -> str:
    """Return `text` if it can name a folder and has at most `limit` characters, or its hash."""
    is_name = len(text) <= limit and NAME.fullmatch(text)
    return text if is_name else hashlib.sha256(text.encode()).hexdigest()[:10]


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


def expand_axes(source: StudySource) -> list[VariantSource]:
    """Return the variants of the product, then of `cells`.

    Raises ConfigError for a mistake in `axes` or `exclude`, and for a name that occurs twice or
    cannot name a folder.
    """
    variants = list(_product(source))
    for name, mapping in source.study.cells.items():
        override = Override(mapping, f"{source.name}.cells.{name}")
        variants.append(VariantSource(name, (override,), source.study.cells.where[name]))
    if not variants:
        raise source.error((), "needs variants: `cells:` or `axes:`")
    lines: dict[str, Where] = {}
    for variant in variants:
        context = f"{variant.where}: {source.name}"
        if not NAME.fullmatch(variant.name):
            raise ConfigError(f"{context}: '{variant.name}' cannot name a folder: {NAME_RULE}")
        if variant.name in lines:
            text = f"two variants have the name '{variant.name}', the other one on line"
            raise ConfigError(f"{context}: {text} {lines[variant.name].line}")
        lines[variant.name] = variant.where
    return variants


def require_names(source: StudySource, variants: list[VariantSource]) -> None:
    """Raise ConfigError if a key names a variant or a column that does not exist.

    The keys are `baseline`, `published`, `labels` and `latex`. Raises it also for a label that is
    the label or the name of another variant.
    """
    names = [variant.name for variant in variants]
    named: list[tuple[tuple[str, ...], str]] = [(("baseline",), source.study.baseline)]
    named += [(("published", name), name) for name in source.study.published]
    named += [(("labels", name), name) for name in source.study.labels]
    for path, name in named:
        if name not in names:
            raise source.error(path, f"no variant '{name}'{suggest(name, names[:30])}")
    users: dict[str, str] = {}
    for name in names:
        label = source.study.labels.get(name, name)
        other = users.setdefault(label, name)
        if other != name:
            labelled = name if name in source.study.labels else other
            raise source.error(
                ("labels", labelled), f"'{label}' stands for two variants, {other} and {name}"
            )
    columns = [entry["key"] for entry in read_asset("columns.yaml") if "heading" in entry]
    for place, key in enumerate(source.study.latex.columns or ()):
        if key not in columns:
            hint = suggest(key, columns)
            raise source.error(("latex", "columns", place), f"no column '{key}'{hint}")


def _product(source: StudySource) -> Iterator[VariantSource]:
    axes = {key: _axis_values(source, key) for key in source.study.axes}
    if not axes:
        return
    count = math.prod(map(len, axes.values()))
    if count > MAX_VARIANTS:
        text = f"{count:,} combinations exceed the limit of {MAX_VARIANTS:,} variants"
        raise source.error(("axes",), f"{text}; use fewer values, or split the study")
    rules = _exclusions(source, axes)
    unused_rules = set(range(len(rules)))
    for texts in itertools.product(*axes.values()):
        point = dict(zip(axes, texts, strict=True))
        excluding = [all(point[key] in texts for key, texts in rule.items()) for rule in rules]
        unused_rules.difference_update(itertools.compress(range(len(rules)), excluding))
        if not any(excluding):
            named = [key for key in axes if key not in source.study.compare_within]
            # A named value, and the value of the only axis, stand without the key.
            terms = [
                point[key]
                if isinstance(source.study.axes[key], Mapping) or len(named) == 1
                else f"{key.split('.')[-1]}={point[key]}"
                for key in named
            ]
            overrides = tuple(axes[key][point[key]] for key in axes)
            yield VariantSource(",".join(terms), overrides, source.tree.where["axes"])
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


def _exclusions(
    source: StudySource, axes: dict[str, dict[str, Override]]
) -> list[dict[str, set[str]]]:
    """Return for each rule of `exclude` the texts of the excluded values by axis."""
    rules = []
    for index, rule in enumerate(source.study.exclude):
        excluded = {}
        for key, value in rule.items():
            if key not in axes:
                raise source.error(("exclude", index, key), f"no axis '{key}'{suggest(key, axes)}")
            texts = {format_value(item) for item in (value if isinstance(value, list) else [value])}
            for text in texts - axes[key].keys():
                hint = suggest(text, axes[key])
                raise source.error(("exclude", index, key), f"no value '{text}'{hint}")
            excluded[key] = texts
        rules.append(excluded)
    return rules


@dataclass(frozen=True)
class Variant:
    """A variant with its validated experiment.

    `where` is the line that names the variant, and `tree` is the experiment as written, with the
    line of every key. The FFN width is solved so that the parameter count matches `match_to`, or
    stays as written if that is None. `criterion` is the entry of the study's `match` that holds for
    the variant, and `stretch` the factor on the training steps that follows from it.
    """

    name: str
    where: Where
    tree: Mapping
    experiment: Experiment
    match_to: Model | None
    metric: Metric
    parts: tuple[Path, ...]
    criterion: str = ""
    stretch: float = 1.0
    step_flops: int | None = None

    @property
    def written_name(self) -> str:
        """Name of the variant in the study, without the criterion."""
        return self.name.partition("@")[0]

    @property
    def cell_name(self) -> str:
        """Name of the folder of the cells. Criteria that lead to equal cells share them."""
        return self.written_name if self.stretch == 1 else self.name

    def label(self, labels: dict[str, str]) -> str | None:
        """Return the text of the variant in tables, from the `labels` of variants as written.

        The criterion follows it as it follows the name.
        """
        label = labels.get(self.written_name)
        return None if label is None else label + self.name.removeprefix(self.written_name)

    def error(self, study: str, error: str | ConfigError) -> ConfigError:
        """Return an error in the line of its key.

        It is the line of the variant if the experiment has no such key or the study changes it.
        """
        keys = str(error).replace(": ", ".").split(".")
        where = locate(self.tree, keys, self.where.file) if keys[0] in self.tree else None
        return ConfigError(f"{where or self.where}: {study}: variant '{self.name}': {error}")

    def cell(self, study: str, seed: int) -> Cell:
        """Return the cell of this variant with `seed`, which must be valid."""
        experiment = self.experiment
        if self.stretch != 1:
            changes = {"stretch": experiment.training.stretch * self.stretch}
            training = experiment.training.model_copy(update=changes)
            experiment = experiment.model_copy(update={"training": training})
        # Validating again would take most of the time of expanding 50,000 cells.
        return Cell.model_construct(
            study=study,
            variant=self.cell_name,
            seed=seed,
            experiment=experiment,
            match_to=self.match_to,
            metric=self.metric,
            parts=self.parts,
        )


def resolve(source: StudySource, changes: Mapping | None = None) -> list[Variant]:
    """Return the variants of a study in its order.

    `changes` (from `--set`) take precedence over everything in the study. Raises ConfigError for
    every mistake in a variant's configuration.
    """
    study = source.study
    load_parts(source.parts)
    if not NAME.fullmatch(source.name):
        raise source.error((), f"cannot name a folder: {NAME_RULE}")
    written = expand_axes(source)
    common = spell_out(study.set, f"{source.name}.set")
    last = spell_out(Mapping(Where("")) if changes is None else changes, source.name)
    # Variants share the overrides of an axis: each override is spelled out once.
    spelled: dict[Override, Change] = {}
    base = merge(normalize(source.experiment), common.experiment)
    sections: dict[Any, Any] = {}
    widths = "parameters" if "parameters" in study.match else "none"
    variants: list[Variant] = []
    matched = set()
    for variant in written:
        for override in variant.overrides:
            if override not in spelled:
                spelled[override] = spell_out(override.mapping, override.path)
        applied = [*(spelled[override] for override in variant.overrides), last]
        tree = base
        for change in applied:
            tree = merge(tree, change.experiment)
        experiment = _validate(source, sections, variant, tree)
        stated = [change.match for change in (common, *applied) if change.match is not None]
        if (stated or [widths])[-1] == "parameters":
            matched.add(variant.name)
        try:
            metric = study.metric.resolve(experiment)
        except ValueError as error:
            # Without variants before it, a mistake in the metric concerns all variants.
            context = f"variant '{variant.name}': " if variants else ""
            raise source.error(("metric", "name"), f"{context}{error}") from error
        named = (variant.name, variant.where, tree)
        variants.append(Variant(*named, experiment, None, metric, source.parts))
    require_names(source, written)
    baseline = next(v.experiment.model for v in variants if v.name == study.baseline)
    variants = [_match(source, v, baseline) if v.name in matched else v for v in variants]
    _require_differences(source, variants)
    return variants


def _match(source: StudySource, variant: Variant, baseline: Model) -> Variant:
    """Return `variant` with the baseline's parameter count; ConfigError if no FFN width can."""
    model = variant.experiment.model
    if model == baseline:
        return variant
    problem = ""
    if model.ffn is None:
        problem = "the model has no FFN, so no width can match the baseline's parameters; "
    elif baseline.ffn is not None and model.ffn.width != baseline.ffn.width:
        problem = "`match: parameters` computes ffn.width; remove ffn.width, or "
    if problem:
        raise variant.error(source.name, f"{problem}set `match: none` for this variant")
    return replace(variant, match_to=baseline)


def _require_differences(source: StudySource, variants: list[Variant]) -> None:
    """Raise ConfigError if two variants compute the same."""
    names: dict[str, str] = {}
    for variant in variants:
        identity = variant.cell(source.name, 0).fingerprint
        if names.setdefault(identity, variant.name) != variant.name:
            text = f"variants '{names[identity]}' and '{variant.name}' compute the same"
            raise ConfigError(f"{variant.where}: {source.name}: {text}")


@functools.cache
def _adapter(section: str) -> TypeAdapter[Any]:
    annotation: Any = Experiment.model_fields[section].annotation
    return TypeAdapter(annotation)


def _validate_section(cache: dict[Any, Any], name: str, value: Any) -> Any:
    """Return a validated section; `cache` has those of the other variants.

    A section without overrides is one object in all variants. The cache keeps its id unique.
    """
    if (name, id(value)) not in cache:
        text = f"{name}:{json.dumps(value, sort_keys=True)}"
        if text not in cache:
            cache[text] = _adapter(name).validate_python(value)
        cache[name, id(value)] = (value, cache[text])
    return cache[name, id(value)][1]


def _validate(
    source: StudySource, cache: dict[Any, Any], variant: VariantSource, tree: Mapping
) -> Experiment:
    """Return the experiment that `tree` describes. Raises ConfigError with the key and its line."""
    section = None
    try:
        values = {}
        for section, value in tree.items():
            is_section = section in Experiment.model_fields
            values[section] = _validate_section(cache, section, value) if is_section else value
        section = None
        return Experiment.model_validate(values)
    except ValidationError as error:
        keys, message = find_problem(error)
        keys = keys if section is None else (section, *keys)
        # The message of a whole section begins with the keys that are wrong.
        path = (*keys, *message.replace(": ", ".").split("."))
        place = locate(tree, path) or Where(str(source.experiment_path))
        # A check of the complete experiment names the key in its message.
        key = f"{'.'.join(str(part) for part in keys)}: " if keys else ""
        context = f"{place}: {source.name}: variant '{variant.name}'"
        raise ConfigError(f"{context}: {key}{message}") from error
