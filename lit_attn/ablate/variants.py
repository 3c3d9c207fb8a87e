"""Variants of a study with their complete, validated experiments."""

import functools
import json
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from lit_attn.ablate.axes import NAME, Override, VariantSource, expand_axes, require_names
from lit_attn.cells.records import Metric
from lit_attn.config.cell import Cell
from lit_attn.config.experiment import Experiment
from lit_attn.config.models.base import Model
from lit_attn.config.overrides import Change, merge, normalize, spell_out
from lit_attn.config.source import Mapping, Where, locate
from lit_attn.config.study import StudySource
from lit_attn.schema.errors import ConfigError, find_problem
from lit_attn.schema.plugins import load_parts


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

    def cell(self, study: str, seed: int) -> Cell:
        """Return the cell of this variant with `seed`."""
        experiment = self.experiment
        if self.stretch != 1:
            changes = {"stretch": experiment.training.stretch * self.stretch}
            training = experiment.training.model_copy(update=changes)
            experiment = experiment.model_copy(update={"training": training})
        return Cell(
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
        raise source.error((), "cannot name a folder: use letters, digits and . _ = , + -")
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
        # Without variants before it, a mistake in the metric concerns all variants.
        metric = _resolve_metric(source, experiment, variant.name if variants else "")
        named = (variant.name, variant.where, tree)
        variants.append(Variant(*named, experiment, None, metric, source.parts))
    require_names(source, written)

    baseline = next(v.experiment.model for v in variants if v.name == study.baseline)
    for number, resolved in enumerate(variants):
        model = resolved.experiment.model
        if resolved.name in matched and model != baseline:
            context = f"{resolved.where}: {source.name}: variant '{resolved.name}'"
            _require_width(context, model, baseline)
            variants[number] = replace(resolved, match_to=baseline)
    _require_differences(source, variants)
    return variants


@functools.cache
def _adapter(section: str) -> TypeAdapter[Any]:
    annotation: Any = Experiment.model_fields[section].annotation
    return TypeAdapter(annotation)


def _validate_section(cache: dict[Any, Any], name: str, value: Any) -> Any:
    """Return a validated section; `cache` has those of the other variants.

    A section without overrides is the same object in every variant. The cache refers to the object,
    so its id stays unique.
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
        # The message of a whole section begins with the key that is wrong.
        path = (*keys, *message.partition(": ")[0].split("."))
        place = locate(tree, path) or Where(str(source.experiment_path))
        # A check of the complete experiment names the key in its message.
        key = f"{'.'.join(str(part) for part in keys)}: " if keys else ""
        context = f"{place}: {source.name}: variant '{variant.name}'"
        raise ConfigError(f"{context}: {key}{message}") from error


def _require_width(context: str, model: Model, baseline: Model) -> None:
    """Raise ConfigError if `match: parameters` cannot solve for the FFN width of `model`."""
    if model.ffn is None:
        raise ConfigError(
            f"{context}: the model has no FFN, so no width can match the baseline's parameters;"
            " set `match: none` for this variant"
        )
    if baseline.ffn is not None and model.ffn.width != baseline.ffn.width:
        raise ConfigError(
            f"{context}: `match: parameters` computes ffn.width;"
            " remove ffn.width, or set `match: none` for this variant"
        )


def _resolve_metric(source: StudySource, experiment: Experiment, variant: str) -> Metric:
    """Return the study's metric; raise ConfigError if cells of `experiment` do not measure it."""
    try:
        return source.study.metric.resolve(experiment)
    except ValueError as error:
        context = f"variant '{variant}': " if variant else ""
        raise source.error(("metric", "name"), f"{context}{error}") from error


def _require_differences(source: StudySource, variants: Iterable[Variant]) -> None:
    """Raise ConfigError if two variants compute the same."""
    names: dict[str, str] = {}
    for variant in variants:
        identity = variant.cell(source.name, 0).fingerprint
        if identity in names:
            text = f"variants '{names[identity]}' and '{variant.name}' compute the same"
            raise ConfigError(f"{variant.where}: {source.name}: {text}")
        names[identity] = variant.name
