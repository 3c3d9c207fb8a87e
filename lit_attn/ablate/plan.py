"""The cells of a study, and the plan that the report counts missing cells against."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from lit_attn.ablate import trial
from lit_attn.ablate.variants import Variant, resolve
from lit_attn.cells.folder import State, read_state
from lit_attn.cells.records import Plan, PlannedCell, PlannedVariant
from lit_attn.config.cell import LARGEST_SEED, Cell
from lit_attn.config.source import Mapping
from lit_attn.config.study import StudySource

SMOKE = "smoke run: one step per cell, the numbers mean nothing"


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
        return read_state(self.folder, self.identity)


@dataclass(frozen=True)
class Matrix:
    """A study's cells below `folder`, which is the study's, or those of a trial of it.

    `name` is the folder's, see lit_attn.ablate.trial. `jobs` are the cells of `seeds`, those that
    are to run now. Every seed is complete before the next begins, so a matrix that is stopped early
    still compares all its variants.
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
        """The record of what was to be run: the study's seeds, also where others are to run now,
        those, and every seed that was begun before."""
        study = self.source.study
        own = dict.fromkeys(study.seeds)
        others = {*self.seeds, *self._begun()} - own.keys()
        seeds = (*own, *sorted(others))
        return Plan(
            study=self.name,
            title=self.title,
            source=study.source,
            baseline=study.baseline,
            metric=study.metric,
            variants=[
                PlannedVariant(name=variant.name, published=study.published.get(variant.name))
                for variant in self.variants
            ],
            seeds=list(seeds),
            cells=[
                PlannedCell(
                    variant=cell.variant,
                    seed=cell.seed,
                    identity=cell.fingerprint,
                    path=cell.folder,
                )
                for cell in _cells(self.source, self.name, self.variants, seeds)
            ],
        )

    def _begun(self) -> set[int]:
        """The seeds with a folder of this very cell, of any variant."""
        found: set[int] = set()
        for variant in self.variants:
            for path in (self.folder / variant.name).glob("*-*"):
                number = path.name.partition("-")[0]
                seed = int(number) if number.isdecimal() else -1
                if 0 <= seed <= LARGEST_SEED and seed not in found:
                    cell = variant.cell(self.name, seed, self.source.study)
                    if self.folder / cell.folder == path:
                        found.add(seed)
        return found


def expand(
    source: StudySource,
    out: Path,
    changes: Mapping | None = None,
    seeds: tuple[int, ...] | None = None,
    smoke: bool = False,
) -> Matrix:
    """All cells of a study below `out`, or of a trial of it; `seeds` run now in place of its own.

    Raises ConfigError for any mistake.
    """
    variants = resolve(source, changes)
    seeds = source.study.seeds if seeds is None else seeds
    said = [] if changes is None else trial.settings(source, variants, changes)
    notes = [f"with {', '.join(said)}"] if said else []
    if smoke:
        said, notes = [*said, trial.SMOKE], [*notes, SMOKE]
    name = trial.named(source.name, said)
    title = source.study.title + "".join(f" ({note})" for note in notes)
    folder = out / name
    jobs = [Job(cell, folder / cell.folder) for cell in _cells(source, name, variants, seeds)]
    return Matrix(source, name, title, variants, seeds, folder, jobs)


def _cells(
    source: StudySource, name: str, variants: list[Variant], seeds: tuple[int, ...]
) -> Iterator[Cell]:
    for seed in seeds:
        for variant in variants:
            yield variant.cell(name, seed, source.study)
