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

from lit_attn.cells.columns import COLUMN_KEYS
from lit_attn.cells.records import Metric
from lit_attn.config.cell import Cell
from lit_attn.config.experiment import Experiment
from lit_attn.config.models.base import Model
from lit_attn.config.overrides import Change, merge, normalize, spell_out
from lit_attn.config.source import Mapping, Sequence, Where, format_value, locate
from lit_attn.config.study import StudySource
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
    return variants


def require_names(source: StudySource, variants: list[VariantSource]) -> None:
    """Raise ConfigError if a key names a variant or a column that does not exist.

    The keys are `baseline`, `published`, `labels`, `columns` and `latex`. Raises it also for a
    label that is the label or the name of another variant.
    """
    names = [variant.name for variant in variants]
    # Path of a key in the study, and the variant that it names.
    references: list[tuple[tuple[str, ...], str]] = [(("baseline",), source.study.baseline)]
    references += [(("published", name), name) for name in source.study.published]
    references += [(("labels", name), name) for name in source.study.labels]
    for path, name in references:
        if name not in names:
            raise source.error(path, f"no variant '{name}'{suggest(name, names[:30])}")
    _require_distinct_labels(source, names)
    chosen = {("columns",): source.study.columns, ("latex", "columns"): source.study.latex.columns}
    for place, keys in chosen.items():
        for position, key in enumerate(keys or ()):
            if key not in COLUMN_KEYS:
                message = f"no column '{key}'{suggest(key, COLUMN_KEYS)}"
                raise source.error((*place, position), message)


def _require_distinct_labels(source: StudySource, names: list[str]) -> None:
    """Raise ConfigError if a label is the label or the name of another variant."""
    users: dict[str, str] = {}
    for name in names:
        label = source.study.labels.get(name, name)
        other = users.setdefault(label, name)
        if other != name:
            labelled = name if name in source.study.labels else other
            raise source.error(
                ("labels", labelled), f"'{label}' stands for two variants, {other} and {name}"
            )


def _product(source: StudySource) -> Iterator[VariantSource]:
    """Yield the variants of the combinations of all axes that no rule of `exclude` leaves out."""
    axes = {key: _axis_values(source, key) for key in source.study.axes}
    if not axes:
        return
    count = math.prod(len(values) for values in axes.values())
    if count > MAX_VARIANTS:
        raise source.error(
            ("axes",),
            f"{count:,} combinations exceed the limit of {MAX_VARIANTS:,} variants;"
            " use fewer values, or split the study",
        )
    rules = _exclusions(source, axes)
    unused_rules = set(range(len(rules)))
    for texts in itertools.product(*axes.values()):
        point = dict(zip(axes, texts, strict=True))
        is_excluded = False
        for index, rule in enumerate(rules):
            if all(point[key] in excluded for key, excluded in rule.items()):
                is_excluded = True
                unused_rules.discard(index)
        if not is_excluded:
            overrides = tuple(axes[key][text] for key, text in point.items())
            yield VariantSource(_name_point(source, point), overrides, source.tree.where["axes"])
    for index in sorted(unused_rules):
        raise source.error(("exclude", index), "excludes no combination of the axes")


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


def _axis_values(source: StudySource, key: str) -> dict[str, Override]:
    """Return the override of each value of an axis: a list for one key, or named overrides."""
    written = source.study.axes[key]
    path = f"{source.name}.axes.{key}"
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
            items = value if isinstance(value, list) else [value]
            texts = {format_value(item) for item in items}
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
        if label is None:
            return None
        criterion = self.name.removeprefix(self.written_name)
        return label + criterion

    def error(self, study: str, error: str | ConfigError) -> ConfigError:
        """Return an error in the line of its key.

        It is the line of the variant if the experiment has no such key or the study changes it.
        """
        keys = str(error).replace(": ", ".").split(".")
        where = None
        if keys[0] in self.tree:
            where = locate(self.tree, keys, self.where.file)
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
    sections = _Sections(base)
    default_match = "parameters" if "parameters" in study.match else "none"
    variants: list[Variant] = []
    matched_names = set()
    for variant in written:
        for override in variant.overrides:
            if override not in spelled:
                spelled[override] = spell_out(override.mapping, override.path)
        applied = [spelled[override] for override in variant.overrides]
        applied.append(last)
        tree = base
        match = default_match if common.match is None else common.match
        for change in applied:
            tree = merge(tree, change.experiment)
            if change.match is not None:
                match = change.match
        experiment = _validate(source, sections, variant, tree)
        if match == "parameters":
            matched_names.add(variant.name)
        try:
            metric = study.metric.resolve(experiment)
        except ValueError as error:
            # Without variants before it, a mistake in the metric concerns all variants.
            context = f"variant '{variant.name}': " if variants else ""
            raise source.error(("metric", "name"), f"{context}{error}") from error
        variants.append(
            Variant(
                name=variant.name,
                where=variant.where,
                tree=tree,
                experiment=experiment,
                match_to=None,
                metric=metric,
                parts=source.parts,
            )
        )
    require_names(source, written)
    baseline = next(v.experiment.model for v in variants if v.name == study.baseline)
    for index, resolved in enumerate(variants):
        if resolved.name in matched_names:
            variants[index] = _match(source, resolved, baseline)
    _require_differences(source, variants)
    return variants


def _match(source: StudySource, variant: Variant, baseline: Model) -> Variant:
    """Return `variant` with the baseline's parameter count; ConfigError if no FFN width can."""
    model = variant.experiment.model
    if model == baseline:
        return variant
    if model.ffn is None:
        raise variant.error(
            source.name,
            "the model has no FFN, so no width can match the baseline's parameters;"
            " set `match: none` for this variant",
        )
    if baseline.ffn is not None and model.ffn.width != baseline.ffn.width:
        raise variant.error(
            source.name,
            "`match: parameters` computes ffn.width; remove ffn.width, or"
            " set `match: none` for this variant",
        )
    return replace(variant, match_to=baseline)


def _require_differences(source: StudySource, variants: list[Variant]) -> None:
    """Raise ConfigError if two variants compute the same."""
    names: dict[str, str] = {}
    for variant in variants:
        identity = variant.cell(source.name, 0).fingerprint
        other = names.setdefault(identity, variant.name)
        if other != variant.name:
            raise ConfigError(
                f"{variant.where}: {source.name}:"
                f" variants '{other}' and '{variant.name}' compute the same"
            )


@functools.cache
def _adapter(section: str) -> TypeAdapter[Any]:
    annotation: Any = Experiment.model_fields[section].annotation
    return TypeAdapter(annotation)


class _Sections:
    """Validated sections of experiments, which equal sections of several variants share.

    `base` is the experiment that the overrides of the variants change.
    """

    def __init__(self, base: Mapping) -> None:
        self.base = base
        self.validated_base: dict[str, Any] = {}
        """Validated sections of `base` by name."""
        self.validated: dict[str, Any] = {}
        """All validated sections by their name and JSON text."""

    def validate(self, name: str, value: Any) -> Any:
        """Return the validated section `name` with this value."""
        # A section without overrides is the object of `base`. Its text is written only once,
        # because writing takes long with many variants.
        is_unchanged = name in self.base and value is self.base[name]
        if is_unchanged and name in self.validated_base:
            return self.validated_base[name]
        text = f"{name}:{json.dumps(value, sort_keys=True)}"
        if text not in self.validated:
            self.validated[text] = _adapter(name).validate_python(value)
        if is_unchanged:
            self.validated_base[name] = self.validated[text]
        return self.validated[text]


def _validate(
    source: StudySource, sections: _Sections, variant: VariantSource, tree: Mapping
) -> Experiment:
    """Return the experiment that `tree` describes. Raises ConfigError with the key and its line."""
    section = None
    try:
        values = {}
        for section, value in tree.items():
            if section in Experiment.model_fields:
                values[section] = sections.validate(section, value)
            else:
                values[section] = value
        section = None
        return Experiment.model_validate(values)
    except ValidationError as error:
        keys, message = find_problem(error)
        if section is not None:
            keys = (section, *keys)
        # The message of a whole section begins with the keys that are wrong.
        path = (*keys, *message.replace(": ", ".").split("."))
        place = locate(tree, path) or Where(str(source.experiment_path))
        # A check of the complete experiment names the key in its message.
        key = f"{'.'.join(str(part) for part in keys)}: " if keys else ""
        raise ConfigError(
            f"{place}: {source.name}: variant '{variant.name}': {key}{message}"
        ) from error
