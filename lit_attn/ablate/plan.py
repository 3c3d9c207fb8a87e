"""Cells of a study, and the plan against which the report counts missing cells."""

import hashlib
import json
from dataclasses import dataclass, replace
from pathlib import Path

from lit_attn.ablate.job import Job
from lit_attn.ablate.match import apply_criteria, read_ratios
from lit_attn.ablate.origin import claim_folder
from lit_attn.ablate.screening import Design, apply_recorded, read_design, screen_variants
from lit_attn.ablate.side_study import find_changed, name_side_study
from lit_attn.ablate.tune import Point, Search, read_search
from lit_attn.ablate.variants import Variant, list_dropped_keys, list_levels, resolve
from lit_attn.cells import records
from lit_attn.cells.decisions import Seal, Seals
from lit_attn.cells.folder import CellStatus, read_cell
from lit_attn.cells.screening import SCREENING_FILE, Screening
from lit_attn.config.cell import LARGEST_SEED
from lit_attn.config.study import StudySource
from lit_attn.config.study_design import FIRST_FRESH_SEED
from lit_attn.config.study_values import Published, SeedChoice
from lit_attn.files import one_at_a_time
from lit_attn.schema.base import load
from lit_attn.schema.publish import hide_private
from lit_attn.schema.yaml_text import Mapping
from lit_attn.tasks.metrics import list_events

MAX_CELLS = 1_000_000  # Largest number of cells of a study.


@dataclass(frozen=True)
class Matrix:
    """The cells of a study, or of a side study of it, below `folder`.

    `name` is the name of the folder. `written` are the variants of the study, and `variants` these
    under each criterion of `match`, without those that are not measured or tuned yet. `jobs` are
    the cells of `seeds`, which this command runs. All variants of a seed come before the next seed,
    so a run that stops early still compares all variants. `trials` are the cells of the search of
    `tune` that have ended or can be run now. A study with `design` has the record of its
    `screening` and the `screening_jobs`; its `variants` and `jobs` are those of the confirmation,
    and there are none before the screening has ended. `published` are the published mean and
    deviation of the variants that compute what the file describes, and `parity` is the caption on
    released code; it is empty if a variant does not. `is_smoke` says that cells train for one step.
    `dropped` are the keys of the study that kinds of `--set` do not have.
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
    screening: Screening | None
    screening_jobs: list[Job]
    published: dict[str, Published]
    parity: str
    is_smoke: bool
    dropped: list[str]

    @property
    def early_jobs(self) -> list[Job]:
        """Cells whose results decide on further cells: trials, then those of the screening."""
        return [*self.trials, *self.screening_jobs]

    @property
    def selects(self) -> list[str]:
        """Names of the metrics that choose values or variants of the study."""
        choices = (self.tuning, self.screening)
        return [choice.select.name for choice in choices if choice is not None]

    @property
    def notes(self) -> list[str]:
        """Lines about a side study: its folder, and what it does not take from the study."""
        if self.name == self.source.name:
            return []
        lines = [f"{self.folder}: side study; study {self.source.name} does not change"]
        if self.dropped:
            keys = ", ".join(self.dropped)
            lines.append(f"{self.name}: without {keys}: the kinds of --set do not take these keys")
        return lines

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

    def list_without_choice(self) -> list[str]:
        """Return the names of the variants whose search has ended and chosen no values."""
        if self.tuning is None:
            return []
        ended = [entry for entry in self.tuning.variants if len(entry.trials) == self.tuning.trials]
        return [entry.variant for entry in ended if entry.chosen is None]

    @property
    def unplanned(self) -> list[Variant]:
        """Variants whose cells are not planned, because a search or the screening is open.

        A screening that keeps no variant plans no cell of the baseline either.
        """
        if self.screening is None:
            return self.untuned
        if self.screening.kept is None:
            return self.written
        return [] if self.screening.kept else [self.baseline]

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
        seeds = self.list_seeds()
        family = self.source.family
        if family:
            # A side study is not compared with the study itself.
            family += self.name.removeprefix(self.source.name)
        latex_columns: list[str] | None = None
        if study.latex.columns is not None:
            latex_columns = list(study.latex.columns)
        planned = [*self.variants, *self.unplanned]
        return records.Plan(
            study=self.name,
            title=self.title,
            source=study.source,
            baseline=study.baseline,
            metric=self.baseline.metric,
            criteria=list(study.match),
            family=family,
            level=self.source.level,
            variants=[self._plan_variant(variant) for variant in planned],
            levels={name: study.labels[name] for name in list_levels(study.labels, planned)},
            seeds=seeds,
            cells=self._plan_cells(seeds),
            trials=[_plan_cell(job, job.variant) for job in self.early_jobs],
            events=list_events(self.baseline.experiment),
            best_test_epoch=study.best_test_epoch,
            parity=self.parity,
            is_smoke=self.is_smoke,
            columns=None if study.columns is None else list(study.columns),
            latex=latex_columns,
        )

    def list_seeds(self) -> list[int]:
        """Return the seeds of the study, then the other seeds in ascending order."""
        study_seeds = self.source.study.seeds
        other_seeds = set(self.seeds) | self._started_seeds()
        other_seeds.difference_update(study_seeds)
        if self.screening is not None:
            # A seed that has chosen the variants never confirms them.
            other_seeds = {seed for seed in other_seeds if seed >= FIRST_FRESH_SEED}
        return [*study_seeds, *sorted(other_seeds)]

    def _plan_variant(self, variant: Variant) -> records.PlannedVariant:
        """Return the record of a variant in the plan."""
        study = self.source.study
        return records.PlannedVariant(
            name=variant.name,
            variant=variant.written_name,
            criterion=variant.criterion,
            stretch=variant.stretch,
            step_flops=variant.step_flops,
            published=self.published.get(variant.name),
            label=variant.label(study.labels),
        )

    def _plan_cells(self, seeds: list[int]) -> list[records.PlannedCell]:
        """Return the records of the cells of all variants, seed by seed."""
        # Cells of this command already have their identities.
        known_jobs = {(job.seed, job.variant): job for job in self.jobs}
        planned = []
        for seed in seeds:
            for variant in self.variants:
                job = known_jobs.get((seed, variant.cell_name))
                if job is None:
                    job = variant.job(self.folder, seed)
                planned.append(_plan_cell(job, variant.name))
        return planned

    def write_plan(self) -> None:
        """Write the plan, the records of earlier stages and a changed seal to the study's folder.

        Raises ConfigError if the folder belongs to another file of studies.
        """
        claim_folder(self.source, self.folder)
        plan = self.plan()
        plan.write(self.folder / "plan.json")
        if self.tuning is not None:
            self.tuning.write(self.folder / "tuning.json")
        else:
            # The report would describe the search of an earlier `tune`.
            (self.folder / "tuning.json").unlink(missing_ok=True)
        if self.screening is not None:
            self.screening.write(self.folder / SCREENING_FILE)
        else:
            # The record of an earlier `design` would mark variants that this plan trains.
            (self.folder / SCREENING_FILE).unlink(missing_ok=True)
        self._write_seal(plan.seeds)

    def _write_seal(self, seeds: list[int]) -> None:
        """Append the seal to those of the folder if the decisions have changed."""
        path = self.folder / "seals.json"
        with one_at_a_time(self.folder, "seals"):
            before = Seals.read(path)
            entries = [] if before is None else before.entries
            seal = self.seal(seeds)
            has_changed = not entries or entries[-1].hash != seal.hash
            if has_changed:
                # Results of variants that the plan no longer has were seen, too.
                results = len(list(self.folder.glob("*/*/result.json")))
                seal = seal.model_copy(update={"results": results})
                Seals(entries=[*entries, seal]).write(path)

    def seal(self, seeds: list[int]) -> Seal:
        """Return the decisions with their hash; measured times and tuned values come later."""
        study = self.source.study
        decisions = study.model_dump(include={"baseline", "match", "tune", "exclude"})
        # A seal is published before the results.
        decisions["tune"] = hide_private(decisions["tune"])
        decisions["exclude"] = hide_private(decisions["exclude"])
        identities = {}
        for variant in self.written:
            identities[variant.name] = variant.cell(self.name, 0).fingerprint
        decisions["variants"] = identities
        decisions["seeds"] = seeds
        decisions["metric"] = self.baseline.metric.decided.model_dump()
        if self.screening is not None:
            design = self.screening.model_dump(include={"seeds", "keep", "select"})
            # Seals of earlier versions have this key, and equal decisions keep their hash.
            design["budget"] = None
            decisions["design"] = design
        text = json.dumps(decisions, sort_keys=True)
        decisions_hash = hashlib.sha256(text.encode()).hexdigest()[:16]
        return Seal(hash=decisions_hash, **decisions)

    def _started_seeds(self) -> set[int]:
        """Return the seeds for which the folder of a cell with the same identity exists."""
        seeds: set[int] = set()
        for variant in self.variants:
            for path in (self.folder / variant.cell_name).glob("*-*"):
                number = path.name.partition("-")[0]
                if not number.isdecimal():
                    continue
                seed = int(number)
                if seed > LARGEST_SEED or seed in seeds:
                    continue
                if path == variant.job(self.folder, seed).folder:
                    seeds.add(seed)
        return seeds


def _plan_cell(job: Job, variant: str) -> records.PlannedCell:
    """Return the record of a cell in the plan of its study."""
    return records.PlannedCell(variant=variant, seed=job.seed, identity=job.identity, path=job.path)


def expand(
    source: StudySource,
    out: Path,
    changes: Mapping | None = None,
    seeds: SeedChoice | None = None,
    smoke: bool = False,
) -> Matrix:
    """Return the cells of a study, or of a side study of it, below the folder `out`.

    `changes` come from `--set` and `seeds` from `--seeds`. docs/design.md lists the
    stages from the study's file to its plan. Raises ConfigError for every mistake in the study.
    """
    written = resolve(source, changes)
    name, title = name_side_study(source, written, changes, smoke)
    folder = out / name
    design = read_design(source, seeds, written)
    if design is not None:
        study = source.study.model_copy(update={"seeds": design.fresh_seeds})
        source = replace(source, study=study)
    run_seeds = _choose_seeds(source, seeds)
    search = read_search(source, run_seeds if design is None else design.seeds, written, changes)
    tuning: records.Tuning | None = None
    trials: list[Job] = []
    without_values: set[str] = set()
    if search is None:
        tuned = {variant.name: variant for variant in written}
    else:
        tuning, tuned, trials, without_values = _run_search(search, written, folder)
    variants = apply_criteria(source, written, folder, tuned)
    screening: Screening | None = None
    screening_jobs: list[Job] = []
    if design is not None:
        screening, screening_jobs = _run_screening(
            source, design, written, variants, without_values, folder
        )
        variants = _choose_confirmed(variants, screening)
    published = _read_published(source, [variant.name for variant in written])
    # Numbers of a paper stand beside the experiment that they belong to, and nowhere else.
    changed = find_changed(source, written, changes)
    count = len(variants) * len(run_seeds)
    if count > MAX_CELLS:
        raise source.error(
            ("seeds",),
            f"{len(variants):,} variants x {len(run_seeds):,} seeds = {count:,} cells exceed the"
            f" limit of {MAX_CELLS:,}; split the study",
        )
    return Matrix(
        source=source,
        name=name,
        title=title,
        written=written,
        variants=variants,
        seeds=run_seeds,
        folder=folder,
        jobs=_make_jobs(variants, run_seeds, folder),
        trials=trials,
        tuning=tuning,
        screening=screening,
        screening_jobs=screening_jobs,
        published={name: number for name, number in published.items() if name not in changed},
        parity="" if changed else source.study.parity,
        is_smoke=smoke,
        dropped=[] if changes is None else list_dropped_keys(source, changes),
    )


def _read_published(source: StudySource, variants: list[str]) -> dict[str, Published]:
    """Return the published numbers of variants, from the study and from the paper that it names."""
    numbers = dict(source.study.published)
    paper = source.study.paper
    if paper is not None:
        numbers |= load(paper.reader)(source, variants)
    return numbers


def _choose_seeds(source: StudySource, choice: SeedChoice | None) -> tuple[int, ...]:
    """Return the seeds of the study, the first N of them, or the chosen seeds.

    A count above the number of the study's seeds continues after its largest seed.
    """
    study_seeds = source.study.seeds
    if choice is None:
        return study_seeds
    if isinstance(choice, tuple):
        return choice
    next_seed = max(study_seeds) + 1
    further = range(next_seed, next_seed + choice - len(study_seeds))
    if further and further[-1] > LARGEST_SEED:
        raise source.error(("seeds",), f"no seeds follow the largest one, {LARGEST_SEED}")
    return (*study_seeds, *further)[:choice]


def _run_search(
    search: Search, written: list[Variant], folder: Path
) -> tuple[records.Tuning, dict[str, Variant], list[Job], set[str]]:
    """Return the record of a search, the tuned variants, and the known cells of the trials.

    The last value has the names of the variants in which every trial has diverged.
    """
    jobs: dict[Path, Job] = {}

    def evaluate(name: str, point: Point) -> records.TuningTrial | None:
        """Return the trial of a variant at a point, or None before its end; note its cells."""
        tuned = {name: search.variant(name, point)}
        variants = apply_criteria(search.source, written, folder, tuned)
        if not variants:
            # The step time is not measured yet.
            return None
        variant = variants[0]
        trial_name = f"{name}@{search.label(point)}"
        trial_jobs = [variant.job(folder, seed, trial_name) for seed in search.options.seeds]
        ends = {job.seed: read_cell(job.folder, job.identity) for job in trial_jobs}
        trial = search.summarize(point, ends)
        for job in trial_jobs:
            # The other seeds of a trial with a diverged cell are not needed.
            if trial is None or ends[job.seed].state in ("done", "diverged"):
                jobs[job.folder] = job
        return trial

    tuning, points = search.run([variant.name for variant in written], evaluate)
    tuned = {}
    without_values = set()
    for name, point in points.items():
        if point is None:
            without_values.add(name)
        else:
            tuned[name] = search.variant(name, point)
    return tuning, tuned, list(jobs.values()), without_values


def _run_screening(
    source: StudySource,
    design: Design,
    written: list[Variant],
    variants: list[Variant],
    without_values: set[str],
    folder: Path,
) -> tuple[Screening, list[Job]]:
    """Return the record of a screening, and its cells that have ended or can be run now."""
    jobs: dict[str, list[Job]] = {}

    def read_cells(variant: Variant, seeds: tuple[int, ...]) -> dict[int, CellStatus]:
        """Return the state of the cell of a variant with each seed; note the cells."""
        ends = {}
        jobs[variant.name] = []
        for seed in seeds:
            job = variant.job(folder, seed)
            ends[seed] = read_cell(job.folder, job.identity)
            jobs[variant.name].append(job)
        return ends

    current = screen_variants(design, written, variants, without_values, read_cells, source.study)
    screening = apply_recorded(current, folder)
    needed: list[Job] = []
    for entry in screening.variants:
        variant_jobs = jobs.get(entry.variant, [])
        if entry.has_ended:
            # The other seeds of a variant with a diverged seed are not needed.
            variant_jobs = [job for job in variant_jobs if job.state() in ("done", "diverged")]
        needed += variant_jobs
    needed.sort(key=lambda job: job.seed)
    return screening, needed


def _choose_confirmed(variants: list[Variant], screening: Screening) -> list[Variant]:
    """Return the baseline and the kept variants, or none before the screening has ended."""
    if not screening.kept:
        return []
    names = {screening.baseline, *screening.kept}
    return [variant for variant in variants if variant.name in names]


def _make_jobs(variants: list[Variant], seeds: tuple[int, ...], folder: Path) -> list[Job]:
    """Return the cells of all variants, seed by seed, each once: criteria can share cells."""
    jobs: dict[Path, Job] = {}
    for seed in seeds:
        for variant in variants:
            job = variant.job(folder, seed)
            jobs[job.folder] = job
    return list(jobs.values())
