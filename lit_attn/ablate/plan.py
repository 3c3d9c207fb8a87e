"""The cells of a study, and the plan that the report counts missing cells against."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from lit_attn.ablate.folder import State, state
from lit_attn.ablate.variants import Variant, resolve
from lit_attn.config.cell import Cell
from lit_attn.config.source import Mapping
from lit_attn.config.study import StudySource
from lit_attn.records import Plan, PlannedCell, PlannedVariant

SMOKE = " (smoke run: one step per cell, the numbers mean nothing)"


@dataclass(frozen=True)
class Job:
    """A cell and its folder."""

    cell: Cell
    folder: Path

    @property
    def name(self) -> str:
        return f"{self.cell.study}/{self.cell.variant}/{self.cell.seed}"

    @property
    def identity(self) -> str:
        return self.cell.fingerprint

    def state(self) -> State:
        return state(self.folder, self.identity)


@dataclass(frozen=True)
class Matrix:
    """A study's cells below `folder`, which is the study's.

    Every seed is complete before the next begins, so a matrix that is stopped early still compares
    all its variants.
    """

    source: StudySource
    variants: list[Variant]
    seeds: tuple[int, ...]
    folder: Path
    jobs: list[Job]

    def plan(self, smoke: bool) -> Plan:
        """The record of what was to be run."""
        study = self.source.study
        return Plan(
            study=self.source.name,
            title=study.title + (SMOKE if smoke else ""),
            source=study.source,
            baseline=study.baseline,
            metric=study.metric,
            variants=[
                PlannedVariant(name=variant.name, published=study.published.get(variant.name))
                for variant in self.variants
            ],
            seeds=list(self.seeds),
            cells=[
                PlannedCell(
                    variant=job.cell.variant,
                    seed=job.cell.seed,
                    identity=job.identity,
                    path=job.cell.folder,
                )
                for job in self.jobs
            ],
        )


def expand(
    source: StudySource,
    out: Path,
    changes: Mapping | None = None,
    seeds: tuple[int, ...] | None = None,
) -> Matrix:
    """All cells of a study below `out`; `seeds` replaces its own. ConfigError for any mistake."""
    variants = resolve(source, changes)
    seeds = source.study.seeds if seeds is None else seeds
    folder = out / source.name
    return Matrix(source, variants, seeds, folder, list(_jobs(source, variants, seeds, folder)))


def _jobs(
    source: StudySource, variants: list[Variant], seeds: tuple[int, ...], folder: Path
) -> Iterator[Job]:
    for seed in seeds:
        for variant in variants:
            cell = variant.cell(source.name, seed, source.study)
            yield Job(cell, folder / cell.folder)
