"""Variants resolved: the whole experiment of each, validated, with nothing said twice."""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from lit_attn.ablate.axes import NAME, Point, points
from lit_attn.config import metrics
from lit_attn.config.cell import Cell
from lit_attn.config.experiment import Experiment
from lit_attn.config.models.base import Model
from lit_attn.config.overrides import Change, merge, normalize, spell_out
from lit_attn.config.source import Mapping, Where, locate
from lit_attn.config.study import Study, StudySource
from lit_attn.schema.errors import ConfigError, find_problem, suggest
from lit_attn.schema.plugins import load_parts


@dataclass(frozen=True)
class Variant:
    """`match_to` is the model whose parameter count the FFN width is solved for, or None.

    `where` is the line that names it; `tree` is the experiment as written, whose keys know theirs.
    """

    name: str
    where: Where
    tree: Mapping
    experiment: Experiment
    match_to: Model | None
    parts: tuple[Path, ...]

    def cell(self, study: str, seed: int, definition: Study) -> Cell:
        return Cell(
            study=study,
            variant=self.name,
            seed=seed,
            experiment=self.experiment,
            match_to=self.match_to,
            metric=definition.metric,
            parts=self.parts,
        )


def resolve(source: StudySource, changes: Mapping | None = None) -> list[Variant]:
    """The variants of a study, in its order, under `changes` (from `--set`), which win over all.

    Raises ConfigError for anything that could go wrong with a variant's configuration.
    """
    study = source.study
    load_parts(source.parts)
    if not NAME.fullmatch(source.name):
        raise source.error((), "cannot name a folder: use letters, digits and . _ = , + -")
    found = points(source)
    _names_exist(source, [point.name for point in found])

    base = normalize(source.experiment, str(source.experiment_path))
    common = spell_out(study.set, f"{source.name}.set")
    last = spell_out(Mapping(Where("")) if changes is None else changes, source.name)
    base = merge(base, common.experiment)
    sections = _Sections()
    trees = {point.name: _tree(base, [*point.changes, last]) for point in found}
    experiments = {p.name: _experiment(source, sections, p, trees[p.name]) for p in found}
    model = experiments[study.baseline].model
    variants = [
        Variant(
            point.name,
            point.where,
            trees[point.name],
            experiments[point.name],
            _match_to(
                source,
                point,
                [common, *point.changes, last],
                experiments[point.name].model,
                model,
            ),
            source.parts,
        )
        for point in found
    ]
    _all_different(source, found, variants)
    _measured(source, variants)
    return variants


class _Sections:
    """Validated sections of experiments: each is validated once, however many variants share it."""

    def __init__(self) -> None:
        self.by_text: dict[str, Any] = {}
        # A section that no override touches is the same object in every variant. The object is
        # kept, so that its id stays its own.
        self.by_id: dict[tuple[str, int], tuple[Any, Any]] = {}

    def validate(self, name: str, value: Any) -> Any:
        if (known := self.by_id.get((name, id(value)))) is None:
            text = f"{name}:{json.dumps(value, sort_keys=True)}"
            if text not in self.by_text:
                self.by_text[text] = _adapter(name).validate_python(value)
            known = self.by_id[name, id(value)] = (value, self.by_text[text])
        return known[1]


@cache
def _adapter(section: str) -> TypeAdapter[Any]:
    annotation: Any = Experiment.model_fields[section].annotation
    return TypeAdapter(annotation)


def _tree(base: Mapping, changes: Iterable[Change]) -> Mapping:
    """`base` under all changes."""
    for change in changes:
        base = merge(base, change.experiment)
    return base


def _experiment(
    source: StudySource, sections: _Sections, point: Point, tree: Mapping
) -> Experiment:
    section = None
    try:
        parts = {}
        for section, value in tree.items():
            known = section in Experiment.model_fields
            parts[section] = sections.validate(section, value) if known else value
        section = None
        return Experiment.model_validate(parts)
    except ValidationError as error:
        keys, message = find_problem(error)
        keys = keys if section is None else (section, *keys)
        # What a whole section does not accept begins with the key that is to blame.
        deeper = (*keys, *message.partition(": ")[0].split("."))
        place = locate(tree, deeper) or Where(str(source.experiment_path))
        key = ".".join(str(part) for part in keys)
        raise ConfigError(
            f"{place}: {source.name}: variant '{point.name}': {key}: {message}"
        ) from error


def _match_to(
    source: StudySource, point: Point, changes: Iterable[Change], model: Model, baseline: Model
) -> Model | None:
    said = [change.match for change in changes if change.match is not None]
    match = said[-1] if said else source.study.match
    if match == "none" or model == baseline:
        return None
    context = f"{point.where}: {source.name}: variant '{point.name}'"
    if model.ffn is None:
        raise ConfigError(
            f"{context}: there is no FFN whose width could match the baseline's parameters;"
            " give it `match: none`"
        )
    if baseline.ffn is not None and model.ffn.width != baseline.ffn.width:
        raise ConfigError(
            f"{context}: ffn.width is what `match: parameters` solves for;"
            " leave it out, or give the variant `match: none`"
        )
    return baseline


def _names_exist(source: StudySource, names: list[str]) -> None:
    study = source.study
    if study.baseline not in names:
        raise source.error(
            ("baseline",), f"no variant '{study.baseline}'{suggest(study.baseline, names[:30])}"
        )
    for name in study.published:
        if name not in names:
            raise source.error(
                ("published", name), f"no variant '{name}'{suggest(name, names[:30])}"
            )


def _measured(source: StudySource, variants: list[Variant]) -> None:
    """The metric is one that every variant's cells measure."""
    for variant in variants:
        try:
            metrics.check(source.study.metric, variant.experiment)
        except ValueError as error:
            which = "" if variant is variants[0] else f"variant '{variant.name}': "
            raise source.error(("metric", "name"), f"{which}{error}") from error


def _all_different(source: StudySource, found: list[Point], variants: list[Variant]) -> None:
    seen: dict[str, str] = {}
    for point, variant in zip(found, variants, strict=True):
        computed = variant.cell(source.name, 0, source.study).fingerprint
        if computed in seen:
            raise ConfigError(
                f"{point.where}: {source.name}: variants '{seen[computed]}' and '{point.name}'"
                " compute the same"
            )
        seen[computed] = point.name
