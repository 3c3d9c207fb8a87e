"""Cells of a study, and the plan against which the report counts missing cells.

A run that does not compute what the study's file describes is a trial: a run with `--set`, or a
smoke run. Its results and tables have their own folders next to the study's, named after the
changes (`digits@training.max_steps=20`), so the plan and report of the study do not change.
"""

import hashlib
import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from lit_attn.ablate.variants import Variant, resolve
from lit_attn.cells.folder import State, read_state
from lit_attn.cells.records import Plan, PlannedCell, PlannedVariant
from lit_attn.config.cell import LARGEST_SEED, Cell
from lit_attn.config.data.base import Data
from lit_attn.config.models.base import Model
from lit_attn.config.source import Mapping, Where, format_value, locate
from lit_attn.config.study import StudySource
from lit_attn.schema.errors import ConfigError

SMOKE = "smoke"
SMOKE_NOTE = "smoke run: one step per cell, the numbers mean nothing"
# Label of a trial's folder. Study names contain no @, so no study can have the name of a trial.
LABEL = re.compile(r"[A-Za-z0-9._=,+-]{1,80}")
MAX_CELLS = 1_000_000
"""Largest number of cells of a study."""


@dataclass(frozen=True)
class Job:
    """A cell and its folder."""

    cell: Cell
    folder: Path

    @cached_property
    def name(self) -> str:
        return f"{self.cell.study}/{self.cell.variant}/{self.cell.seed}"

    @property
    def identity(self) -> str:
        return self.cell.fingerprint

    def state(self) -> State:
        return read_state(self.folder, self.identity)


@dataclass(frozen=True)
class Matrix:
    """The cells of a study, or of a trial of it, below `folder`.

    `name` is the name of the folder. `jobs` are the cells of `seeds`, which this command runs. All
    variants of a seed come before the next seed, so a run that stops early still compares all
    variants.
    """

    source: StudySource
    name: str
    title: str
    variants: list[Variant]
    seeds: tuple[int, ...]
    folder: Path
    jobs: list[Job]

    @property
    def is_trial(self) -> bool:
        return self.name != self.source.name

    def plan(self) -> Plan:
        """Return the plan of all cells: the study's seeds, this command's, and every seed that has
        a folder already."""
        study = self.source.study
        others = {*self.seeds, *self._started_seeds()} - set(study.seeds)
        seeds = (*study.seeds, *sorted(others))
        # Cells of this command already have their identities.
        cells = {(job.cell.seed, job.cell.variant): job.cell for job in self.jobs}
        planned = []
        for seed in seeds:
            for variant in self.variants:
                cell = cells.get((seed, variant.name)) or variant.cell(self.name, seed)
                planned.append(
                    PlannedCell(
                        variant=variant.name,
                        seed=seed,
                        identity=cell.fingerprint,
                        path=cell.folder,
                    )
                )
        return Plan(
            study=self.name,
            title=self.title,
            source=study.source,
            baseline=study.baseline,
            metric=next(v.metric for v in self.variants if v.name == study.baseline),
            variants=[
                PlannedVariant(name=variant.name, published=study.published.get(variant.name))
                for variant in self.variants
            ],
            seeds=list(seeds),
            cells=planned,
        )

    def write_plan(self) -> None:
        """Write the plan to the study's folder."""
        self.plan().write(self.folder / "plan.json")

    def _started_seeds(self) -> set[int]:
        """Return the seeds for which the folder of a cell with the same identity exists."""
        seeds: set[int] = set()
        for variant in self.variants:
            for path in (self.folder / variant.name).glob("*-*"):
                number = path.name.partition("-")[0]
                seed = int(number) if number.isdecimal() else -1
                if 0 <= seed <= LARGEST_SEED and seed not in seeds:
                    cell = variant.cell(self.name, seed)
                    if self.folder / cell.folder == path:
                        seeds.add(seed)
        return seeds


def expand(
    source: StudySource,
    out: Path,
    changes: Mapping | None = None,
    seeds: tuple[int, ...] | None = None,
    smoke: bool = False,
) -> Matrix:
    """Return the cells of a study, or of a trial of it, below the folder `out`.

    `changes` come from `--set`, and `seeds` replace those of the study. Raises ConfigError for
    every mistake in the study.
    """
    variants = resolve(source, changes)
    seeds = source.study.seeds if seeds is None else seeds
    if (count := len(variants) * len(seeds)) > MAX_CELLS:
        raise source.error(
            ("seeds",),
            f"{len(variants):,} variants x {len(seeds):,} seeds = {count:,} cells exceed the limit"
            f" of {MAX_CELLS:,}; use fewer, or split the study",
        )
    settings = [] if changes is None else _effective_settings(source, variants, changes)
    notes = [f"with {', '.join(settings)}"] if settings else []
    if smoke:
        settings, notes = [*settings, SMOKE], [*notes, SMOKE_NOTE]
    name = _name(source.name, settings)
    title = source.study.title + "".join(f" ({note})" for note in notes)
    folder = out / name
    cells = (variant.cell(name, seed) for seed in seeds for variant in variants)
    jobs = [Job(cell, folder / cell.folder) for cell in cells]
    return Matrix(source, name, title, variants, seeds, folder, jobs)


def require_inputs(matrices: list[Matrix], jobs: list[Job]) -> None:
    """Raise ConfigError with the responsible line if input files of `jobs` are missing or wrong.

    With SLURM nothing calls this: a job may see folders that the submitting machine does not see.
    """
    names = {(job.cell.study, job.cell.variant) for job in jobs}
    checked: set[str] = set()
    for matrix in matrices:
        for variant in matrix.variants:
            if (matrix.name, variant.name) in names:
                _check_files(matrix.source, variant, checked)


def _check_files(source: StudySource, variant: Variant, checked: set[str]) -> None:
    """Check the files of a variant's data and model, except configurations in `checked`."""
    for section in ("data", "model"):
        part: Data | Model = getattr(variant.experiment, section)
        if (text := part.model_dump_json()) in checked:
            continue
        checked.add(text)
        try:
            part.check_files()
        except ConfigError as error:
            message = str(error) if str(error).startswith(f"{section}.") else f"{section}: {error}"
            keys = message.partition(": ")[0].split(".")
            place = locate(variant.tree, keys) or Where(str(source.experiment_path))
            context = f"{place}: {source.name}: variant '{variant.name}'"
            raise ConfigError(f"{context}: {message}") from error


def _effective_settings(
    source: StudySource, variants: list[Variant], changes: Mapping
) -> list[str]:
    """Return the overrides that change what any variant computes, as `key=value` strings.

    Paths, the number of devices, and values that the study has anyway are left out.
    """
    identities = _identities(variants)
    effective = changes
    for key in changes:
        fewer = Mapping(effective.at)
        for other, value in effective.items():
            if other != key:
                fewer.put(other, value, effective.where[other])
        try:
            has_effect = _identities(resolve(source, fewer)) != identities
        except ConfigError:
            # The study is incomplete without this override.
            has_effect = True
        if not has_effect:
            effective = fewer
    return sorted(f"{key}={format_value(value)}" for key, value in effective.items())


def _identities(variants: list[Variant]) -> list[str]:
    return [variant.cell(variant.name, 0).fingerprint for variant in variants]


def _name(study: str, settings: list[str]) -> str:
    """Return the study's name, with the settings of a trial after an @.

    Settings that cannot be part of a folder's name are replaced by their hash.
    """
    if not settings:
        return study
    label = ",".join(settings)
    if not LABEL.fullmatch(label):
        label = hashlib.sha256(label.encode()).hexdigest()[:10]
    return f"{study}@{label}"
