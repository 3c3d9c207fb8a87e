"""Variants of a study: overrides merged into the experiment, validated, and matched."""

import functools
import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from lit_attn.ablate.axes import (
    NAME,
    NAME_RULE,
    Override,
    VariantSource,
    combine_axes,
)
from lit_attn.ablate.job import Job
from lit_attn.cells.records import Metric
from lit_attn.config.cell import Cell
from lit_attn.config.experiment import Experiment
from lit_attn.config.overrides import (
    Change,
    keep_common_keys,
    merge,
    spell_out,
    spell_out_experiment,
)
from lit_attn.config.source import locate
from lit_attn.config.study import StudySource
from lit_attn.models.base import Model
from lit_attn.schema.errors import ConfigError, find_problem, suggest
from lit_attn.schema.plugins import load_parts
from lit_attn.schema.yaml_text import Mapping, Where


def make_label(text: str, limit: int) -> str:
    """Return `text` if it can name a folder and has at most `limit` characters, or its hash."""
    is_name = len(text) <= limit and NAME.fullmatch(text)
    return text if is_name else hashlib.sha256(text.encode()).hexdigest()[:10]


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

    @functools.cached_property
    def _settings(self) -> dict[str, Any]:
        return self.cell("", 0).model_dump(mode="json", exclude={"study", "variant", "seed"})

    def job(self, study_folder: Path, seed: int, name: str | None = None) -> Job:
        """Return the cell with `seed`; a trial of the variant has a `name` of its own."""
        cell = self.cell(study_folder.name, seed)
        if name is not None:
            cell = cell.model_copy(update={"variant": name})
        folder = study_folder / cell.folder
        return Job(folder, cell.study, cell.variant, seed, cell.fingerprint, self._settings)


def resolve(source: StudySource, changes: Mapping | None = None) -> list[Variant]:
    """Return the variants of a study in its order: combined, merged, validated and matched.

    `changes` (from `--set`) take precedence over everything in the study. Raises ConfigError for
    every mistake in a variant's configuration.
    """
    load_parts(source.parts)
    if not NAME.fullmatch(source.name):
        raise source.error((), f"cannot name a folder: {NAME_RULE}")
    variant_sources = combine_axes(source)
    base, merged_variants = _merge(source, variant_sources, changes)
    sections = _Sections(base)
    variants: list[Variant] = []
    for merged in merged_variants:
        experiment = _validate(source, sections, merged)
        try:
            metric = source.study.metric.resolve(experiment)
        except ValueError as error:
            # Without variants before it, a mistake in the metric concerns all variants.
            variant_words = f"variant '{merged.name}': " if variants else ""
            raise source.error(("metric", "name"), f"{variant_words}{error}") from error
        variant = Variant(
            name=merged.name,
            where=merged.where,
            tree=merged.tree,
            experiment=experiment,
            match_to=None,
            metric=metric,
            parts=source.parts,
        )
        variants.append(variant)
    _require_names(source, variants)
    variants = _match_parameters(source, merged_variants, variants)
    _require_differences(source, variants)
    return variants


@dataclass(frozen=True)
class _MergedVariant:
    """A variant whose overrides are merged into the experiment.

    `match` is the study's criterion for its FFN width, unless an override sets another one:
    `parameters` or `none`.
    """

    name: str
    where: Where
    tree: Mapping
    match: str


def _merge(
    source: StudySource, variant_sources: list[VariantSource], changes: Mapping | None
) -> tuple[Mapping, list[_MergedVariant]]:
    """Return the experiment with the overrides of `set`, and the variants, which change it."""
    study = source.study
    common = spell_out(study.set, f"{source.name}.set")
    base = merge(spell_out_experiment(source.experiment), common.experiment)
    base_match = common.match
    if base_match is None:
        base_match = "parameters" if "parameters" in study.match else "none"
    if changes is None:
        changes = Mapping(Where(""))
    last = spell_out(changes, source.name)
    # Variants share the overrides of an axis: each override is spelled out once.
    spelled: dict[Override, Change] = {}
    merged_variants = []
    for variant in variant_sources:
        tree = base
        match = base_match
        for override in variant.overrides:
            if override not in spelled:
                spelled[override] = spell_out(override.mapping, override.path)
        for override in variant.overrides:
            change = spelled[override]
            tree = merge(tree, change.experiment)
            match = change.match or match
        change_of_sections, _ = keep_common_keys(tree, last.experiment)
        tree = merge(tree, change_of_sections)
        match = last.match or match
        merged_variants.append(_MergedVariant(variant.name, variant.where, tree, match))
    return base, merged_variants


def list_dropped_keys(source: StudySource, changes: Mapping) -> list[str]:
    """Return the keys of the study that the kinds which `changes` sets do not have."""
    _, variants = _merge(source, combine_axes(source), None)
    change = spell_out(changes, source.name).experiment
    dropped: dict[str, None] = {}
    for variant in variants:
        _, keys = keep_common_keys(variant.tree, change)
        dropped |= dict.fromkeys(keys)
    return list(dropped)


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


@functools.cache
def _adapter(section: str) -> TypeAdapter[Any]:
    """Return the validator of a section of an experiment."""
    annotation: Any = Experiment.model_fields[section].annotation
    return TypeAdapter(annotation)


def _validate(source: StudySource, sections: _Sections, variant: _MergedVariant) -> Experiment:
    """Return the experiment of a variant. Raises ConfigError with the key and its line."""
    values = {}
    for section, value in variant.tree.items():
        values[section] = value
        if section in Experiment.model_fields:
            try:
                values[section] = sections.validate(section, value)
            except ValidationError as error:
                raise _explain(source, variant, error, (section,)) from error
    try:
        return Experiment.model_validate(values)
    except ValidationError as error:
        raise _explain(source, variant, error, ()) from error


def _explain(
    source: StudySource,
    variant: _MergedVariant,
    error: ValidationError,
    section: tuple[str, ...],
) -> ConfigError:
    """Return the error of a variant's experiment, or of a section of it, in the line of its key."""
    section_keys, message = find_problem(error)
    keys = (*section, *section_keys)
    # The message of a complete section begins with the keys that are wrong.
    message_keys = message.replace(": ", ".").split(".")
    place = locate(variant.tree, (*keys, *message_keys))
    if place is None:
        place = Where(str(source.experiment_path))
    variant_place = f"{place}: {source.name}: variant '{variant.name}'"
    if not keys:
        # A check of the complete experiment names the key in its message.
        return ConfigError(f"{variant_place}: {message}")
    key = ".".join(str(part) for part in keys)
    return ConfigError(f"{variant_place}: {key}: {message}")


def _require_names(source: StudySource, variants: list[Variant]) -> None:
    """Raise ConfigError if a key names a variant or a column that does not exist.

    The keys are `baseline`, `published`, `labels`, `columns` and `latex`; `labels` also names
    values of axes. Raises it also for a label that is the label or the name of another variant.
    """
    names = [variant.name for variant in variants]
    levels = list_levels(source.study.labels, variants)
    # Path of a key in the study, and the variant that it names.
    references: list[tuple[tuple[str, ...], str]] = [(("baseline",), source.study.baseline)]
    references += [(("published", name), name) for name in source.study.published]
    labelled = [name for name in source.study.labels if name not in levels]
    references += [(("labels", name), name) for name in labelled]
    for path, name in references:
        if name not in names:
            raise source.error(path, f"no variant '{name}'{suggest(name, names[:30])}")
    _require_distinct_labels(source, names)
    _require_columns(source, ("columns",), source.study.columns)
    _require_columns(source, ("latex", "columns"), source.study.latex.columns)


def list_levels(names: Iterable[str], variants: Sequence[Variant]) -> list[str]:
    """Return the names of values of axes, which are terms of the names of variants."""
    terms: set[str] = set()
    for variant in variants:
        parts = variant.written_name.split(",")
        if len(parts) > 1:
            terms.update(parts)
    return [name for name in names if name in terms]


def _require_columns(
    source: StudySource, path: tuple[str, ...], keys: Sequence[str] | None
) -> None:
    """Raise ConfigError if the study chooses a column of tables that does not exist."""
    if not keys:
        return
    # The report imports pandas, which a study without such a choice does not need.
    from lit_attn.report.tables.columns import COLUMN_KEYS

    for position, key in enumerate(keys):
        if key not in COLUMN_KEYS:
            raise source.error((*path, position), f"no column '{key}'{suggest(key, COLUMN_KEYS)}")


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


def _match_parameters(
    source: StudySource, merged_variants: list[_MergedVariant], variants: list[Variant]
) -> list[Variant]:
    """Return the variants with the baseline's model as `match_to` where `match` asks for it."""
    models = {variant.name: variant.experiment.model for variant in variants}
    baseline = models[source.study.baseline]
    matched = []
    for merged, variant in zip(merged_variants, variants, strict=True):
        if merged.match == "parameters" and variant.experiment.model != baseline:
            _require_width(source, variant, baseline)
            matched.append(replace(variant, match_to=baseline))
        else:
            matched.append(variant)
    return matched


def _require_width(source: StudySource, variant: Variant, baseline: Model) -> None:
    """Raise ConfigError if no FFN width can match the parameters of the baseline."""
    model = variant.experiment.model
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
