"""Cells of a study, and the plan against which the report counts missing cells.

A run that does not compute what the study's file describes is a trial: a run with `--set`, or a
smoke run. Its results and tables have their own folders next to the study's, named after the
changes (`digits@training.max_steps=20`; names of studies contain no @), so the plan and report of
the study do not change.
"""

import contextlib
import hashlib
import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import get_args

from lit_attn.ablate.match import apply_criteria, read_ratios
from lit_attn.ablate.origin import claim_folder
from lit_attn.ablate.tune import Point, Search, read_search
from lit_attn.ablate.variants import Variant, make_label, resolve
from lit_attn.cells import records
from lit_attn.cells.folder import State, read_cell, read_result
from lit_attn.cells.inputs import MAX_FILES, change_finder, collect_data
from lit_attn.cells.lock import CellLocked, hold_lock
from lit_attn.config.cell import LARGEST_SEED, Cell
from lit_attn.config.data.base import Data
from lit_attn.config.models.base import Model
from lit_attn.config.source import Mapping, format_value
from lit_attn.config.study import StudySource
from lit_attn.config.training import MetricLogger
from lit_attn.files import one_at_a_time
from lit_attn.schema.errors import ConfigError, require
from lit_attn.schema.publish import hide_private

SMOKE_NOTE = "smoke run: one step per cell, the numbers mean nothing"
MAX_CELLS = 1_000_000  # Largest number of cells of a study.


@dataclass(frozen=True)
class Job:
    """A cell and its folder."""

    cell: Cell
    folder: Path

    @property
    def variant(self) -> str:
        return f"{self.cell.study}/{self.cell.variant}"

    @cached_property
    def name(self) -> str:
        return f"{self.variant}/{self.cell.seed}"

    @property
    def identity(self) -> str:
        return self.cell.fingerprint

    def state(self) -> State:
        return read_cell(self.folder, self.identity).state


@dataclass(frozen=True)
class Matrix:
    """The cells of a study, or of a trial of it, below `folder`.

    `name` is the name of the folder. `written` are the variants of the study, and `variants` these
    under each criterion of `match`, without those that are not measured or tuned yet. `jobs` are
    the cells of `seeds`, which this command runs. All variants of a seed come before the next seed,
    so a run that stops early still compares all variants. `trials` are the cells of the search of
    `tune` that have ended or can be run now.
    """

    source: StudySource
    name: str
    title: str
    written: list[Variant]
    variants: list[Variant]
    seeds: tuple[int, ...]
    folder: Path
    jobs: list[Job]
    trials: list[Job]
    tuning: records.Tuning | None

    @property
    def baseline(self) -> Variant:
        """The baseline as written."""
        name = self.source.study.baseline
        return next(variant for variant in self.written if variant.name == name)

    @property
    def untuned(self) -> list[Variant]:
        """Variants whose search has not ended, or in which every trial has diverged."""
        entries = () if self.tuning is None else self.tuning.variants
        names = {entry.variant for entry in entries if entry.chosen is None}
        return [variant for variant in self.written if variant.name in names]

    @property
    def is_measured(self) -> bool:
        """False if `match: time` needs step times that were not measured yet."""
        if "time" not in self.source.study.match:
            return True
        ratios = read_ratios(self.folder, self.written, self.baseline)
        return {variant.name for variant in self.written} <= {self.baseline.name, *ratios}

    def plan(self) -> records.Plan:
        """Return the plan of all seeds: the study's, this command's, and those with a folder."""
        study = self.source.study
        others = {*self.seeds, *self._started_seeds()} - set(study.seeds)
        seeds = (*study.seeds, *sorted(others))
        # Cells of this command already have their identities.
        cells = {(job.cell.seed, job.cell.variant): job.cell for job in self.jobs}
        planned = []
        for seed, variant in itertools.product(seeds, self.variants):
            cell = cells.get((seed, variant.cell_name)) or variant.cell(self.name, seed)
            planned.append(_plan_cell(cell, variant.name))
        family = self.source.family
        if family:
            # A trial is not compared with the study itself.
            family += self.name.removeprefix(self.source.name)
        return records.Plan(
            study=self.name,
            title=self.title,
            source=study.source,
            baseline=study.baseline,
            metric=self.baseline.metric,
            criteria=list(study.match),
            family=family,
            level=self.source.level,
            variants=[
                records.PlannedVariant(
                    name=variant.name,
                    variant=variant.written_name,
                    criterion=variant.criterion,
                    stretch=variant.stretch,
                    step_flops=variant.step_flops,
                    published=study.published.get(variant.name),
                    label=variant.label(study.labels),
                )
                for variant in (*self.variants, *self.untuned)
            ],
            seeds=list(seeds),
            cells=planned,
            trials=[_plan_cell(job.cell, job.cell.variant) for job in self.trials],
            best_test_epoch=study.best_test_epoch,
            parity=study.parity,
            contrast=study.contrast,
            columns=None if study.columns is None else list(study.columns),
            latex=None if study.latex.columns is None else list(study.latex.columns),
        )

    def write_plan(self) -> None:
        """Write the plan, the record of the search and a changed seal to the study's folder.

        Raises ConfigError if the folder belongs to another file of studies.
        """
        claim_folder(self.source, self.folder)
        plan = self.plan()
        plan.write(self.folder / "plan.json")
        if self.tuning is not None:
            self.tuning.write(self.folder / "tuning.json")
        path = self.folder / "seals.json"
        with one_at_a_time(self.folder, "seals"):
            before = records.Seals.read(path)
            entries = [] if before is None else before.entries
            seal = self.seal(plan.seeds)
            if not entries or entries[-1].hash != seal.hash:
                # Results of variants that the plan no longer has were seen, too.
                results = len(list(self.folder.glob("*/*/result.json")))
                seal = seal.model_copy(update={"results": results})
                records.Seals(entries=[*entries, seal]).write(path)

    def seal(self, seeds: list[int]) -> records.Seal:
        """Return the decisions with their hash; measured times and tuned values come later."""
        keys = {"baseline", "match", "tune", "exclude"}
        decisions = self.source.study.model_dump(include=keys) | {
            "variants": {v.name: v.cell(self.name, 0).fingerprint for v in self.written},
            "seeds": seeds,
            "metric": self.baseline.metric.model_dump(),
        }
        # A seal is published before the results.
        for key in ("tune", "exclude"):
            decisions[key] = hide_private(decisions[key])
        text = json.dumps(decisions, sort_keys=True)
        return records.Seal(hash=hashlib.sha256(text.encode()).hexdigest()[:16], **decisions)

    def _started_seeds(self) -> set[int]:
        """Return the seeds for which the folder of a cell with the same identity exists."""
        seeds: set[int] = set()
        for variant in self.variants:
            for path in (self.folder / variant.cell_name).glob("*-*"):
                number = path.name.partition("-")[0]
                seed = int(number) if number.isdecimal() else -1
                is_new = 0 <= seed <= LARGEST_SEED and seed not in seeds
                if is_new and path == self.folder / variant.cell(self.name, seed).folder:
                    seeds.add(seed)
        return seeds


def _plan_cell(cell: Cell, variant: str) -> records.PlannedCell:
    return records.PlannedCell(
        variant=variant, seed=cell.seed, identity=cell.fingerprint, path=cell.folder
    )


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
    written = resolve(source, changes)
    if seeds is None:
        seeds = source.study.seeds
    name, title = _name_trial(source, written, changes, smoke)
    folder = out / name
    search = read_search(source, seeds, written, changes)
    tuned = {variant.name: variant for variant in written}
    tuning: records.Tuning | None = None
    trials: list[Job] = []
    if search is not None:
        tuning, tuned, trials = _run_search(search, written, name, folder)
    variants = apply_criteria(source, written, folder, tuned)
    count = len(variants) * len(seeds)
    if count > MAX_CELLS:
        raise source.error(
            ("seeds",),
            f"{len(variants):,} variants x {len(seeds):,} seeds = {count:,} cells exceed the"
            f" limit of {MAX_CELLS:,}; split the study",
        )
    # Criteria may share cells.
    cells: dict[str, Cell] = {}
    for seed in seeds:
        for variant in variants:
            cell = variant.cell(name, seed)
            cells[cell.folder] = cell
    jobs = [Job(cell, folder / path) for path, cell in cells.items()]
    return Matrix(
        source=source,
        name=name,
        title=title,
        written=written,
        variants=variants,
        seeds=seeds,
        folder=folder,
        jobs=jobs,
        trials=trials,
        tuning=tuning,
    )


def _name_trial(
    source: StudySource, written: list[Variant], changes: Mapping | None, smoke: bool
) -> tuple[str, str]:
    """Return the name of the folder and the title of a study, or of a trial of it."""
    settings = []
    title = source.study.title
    if changes is not None:
        settings = _list_settings(source, written, changes)
    if settings:
        title += f" (with {', '.join(settings)})"
    if smoke:
        settings.append(records.SMOKE)
        title += f" ({SMOKE_NOTE})"
    if not settings:
        return source.name, title
    return f"{source.name}@{make_label(','.join(settings), 80)}", title


def _run_search(
    search: Search, written: list[Variant], study: str, folder: Path
) -> tuple[records.Tuning, dict[str, Variant], list[Job]]:
    """Return the record of a search, the tuned variants, and the known cells of the trials."""
    jobs: dict[Path, Job] = {}

    def evaluate(name: str, point: Point, share: float) -> records.TuningTrial | None:
        tuned = {name: search.variant(name, point)}
        variants = apply_criteria(search.source, written, folder, tuned)
        if not variants:
            # The step time is not measured yet.
            return None
        shortened = replace(variants[0], stretch=variants[0].stretch * share)
        trial_name = f"{name}@{search.label(point, share)}"
        trial_jobs = []
        for seed in search.options.seeds:
            cell = shortened.cell(study, seed).model_copy(update={"variant": trial_name})
            trial_jobs.append(Job(cell, folder / cell.folder))
        ends = {job.cell.seed: read_cell(job.folder, job.identity) for job in trial_jobs}
        trial = search.summarize(point, share, ends)
        for job in trial_jobs:
            # The other seeds of a trial with a diverged cell are not needed.
            if trial is None or ends[job.cell.seed].state in ("done", "diverged"):
                jobs[job.folder] = job
        return trial

    tuning, points = search.run([variant.name for variant in written], evaluate)
    tuned = {name: search.variant(name, point) for name, point in points.items()}
    return tuning, tuned, list(jobs.values())


def find_variants(matrices: list[Matrix], jobs: list[Job]) -> list[tuple[str, Variant, Cell]]:
    """Return the variants of `jobs` in their order, with the study's name and one of the cells."""
    cells: dict[tuple[str, str], Cell] = {}
    for job in jobs:
        written_name = job.cell.variant.partition("@")[0]
        cells[job.cell.study, written_name] = job.cell
    variants = []
    for matrix in matrices:
        for variant in matrix.written:
            key = (matrix.name, variant.name)
            if key in cells:
                variants.append((matrix.source.name, variant, cells[key]))
    return variants


def require_inputs(matrices: list[Matrix], jobs: list[Job]) -> None:
    """Raise ConfigError with the responsible line if input files of `jobs` are missing or wrong.

    With SLURM nothing calls this: a job may see folders that the submitting machine does not see.
    """
    for study, variant, _ in find_variants(matrices, jobs):
        experiment = variant.experiment
        parts: list[tuple[str, Data | Model | MetricLogger]] = [
            ("data", experiment.data),
            ("model", experiment.model),
        ]
        parts += [("training.loggers", logger) for logger in experiment.training.loggers]
        for section, part in parts:
            try:
                part.check_files()
            except ConfigError as error:
                has_key = str(error).startswith(f"{section}.")
                raise variant.error(study, error if has_key else f"{section}: {error}") from error


def _list_settings(source: StudySource, variants: list[Variant], changes: Mapping) -> list[str]:
    """Return the overrides that change an identity, as `key=value` strings."""

    def identities(variants: list[Variant]) -> list[str]:
        return [variant.cell(variant.name, 0).fingerprint for variant in variants]

    for key in changes:
        fewer = changes.copy()
        del fewer[key]
        # The study may be incomplete without this override.
        with contextlib.suppress(ConfigError):
            if identities(resolve(source, fewer)) == identities(variants):
                changes = fewer
    return sorted(f"{key}={format_value(value)}" for key, value in changes.items())


def select_cells(matrices: list[Matrix], choice: str) -> list[Job]:
    """Return the stale cells, the failed cells, or the one cell that `choice` names.

    A result is stale if the code, the parts or the data have changed since. Raises ConfigError for
    an unknown cell, and if the data of a result cannot be read.
    """
    jobs = [job for matrix in matrices for job in (*matrix.trials, *matrix.jobs)]
    if choice == "stale":
        return list(_find_stale(jobs))
    if choice == "failed":
        return [job for job in jobs if job.state() in get_args(records.FailureClass)]
    named = [job for job in jobs if choice == job.name or Path(choice) == job.folder]
    if not named:
        require("rerun: no cell", choice, ["stale", "failed", *(job.name for job in jobs)])
    return named


def set_aside(job: Job) -> None:
    """Rename the folder of a cell to `aside-<number>-...`, and write its config.yaml to a new one.

    Neither status nor reports read the renamed folder. A SLURM job that waits finds the config.yaml
    in the new one. Raises ConfigError if the cell is running, and OSError.
    """
    if not job.folder.exists():
        return
    try:
        with hold_lock(job.folder):
            rename_aside(job.folder)
        job.cell.write(job.folder / "config.yaml")
    except CellLocked as error:
        raise ConfigError(f"rerun: {job.name} is running; stop it first") from error


def rename_aside(folder: Path) -> None:
    """Rename the folder of a cell, whose lock this process holds, to `aside-<number>-...`."""
    number = 1
    aside = folder.with_name(f"aside-{number}-{folder.name}")
    while aside.exists():
        number += 1
        aside = folder.with_name(f"aside-{number}-{folder.name}")
    folder.rename(aside)
    (aside / "lock").unlink(missing_ok=True)


def _find_stale(jobs: list[Job]) -> Iterator[Job]:
    """Yield the cells whose results were computed with other code, parts or data."""
    # Imported here, because both take long.
    import torch

    from lit_attn.training.provenance import code_hash

    # Loading the data takes long, so cells with the same data share the hash.
    hashes: dict[str, str] = {}
    find_change = change_finder()
    for job in jobs:
        result = read_result(job.folder, job.identity)
        if result is None:
            continue
        # A module that only training imports has no other stamp here than the recorded one.
        code = {name: stamp for name, stamp in result.inputs.items() if name.endswith(".py")}
        change = find_change(result.model_copy(update={"inputs": code}))
        data = job.cell.experiment.data
        stamps = collect_data(data.input_paths())
        inputs = stamps | code
        if change or result.code != code_hash(job.cell.parts):
            yield job
            continue
        # Some data have no files, an empty stamp is unknown, and of many files some are recorded.
        has_all_stamps = 0 < len(stamps) < MAX_FILES and "" not in stamps.values()
        if inputs == result.inputs and has_all_stamps:
            continue
        key = data.model_dump_json()
        if key not in hashes:
            hashes[key] = str(data.build(job.cell.seed, torch.device("cpu")).fingerprint())
        if result.data != hashes[key]:
            yield job
        elif inputs != result.inputs:
            # With the new stamps, status and dry run do not report the cell any more.
            with contextlib.suppress(OSError):
                result.model_copy(update={"inputs": inputs}).write(job.folder / "result.json")
