"""`--dry-run`: the cells of a study and their states, with `--params` or `--estimate` their costs.

`--estimate` times a few steps of every distinct model on this machine, with as many models at once
as there would be cells, so that models slow each other down as cells would.
"""

import multiprocessing
import sys
from collections import Counter
from dataclasses import replace

from lit_attn.ablate.display import make_display
from lit_attn.ablate.input_files import check_files
from lit_attn.ablate.job import Job
from lit_attn.ablate.launch import Launcher
from lit_attn.ablate.model_check import check_variants
from lit_attn.ablate.plan import Matrix
from lit_attn.ablate.power import find_study_power
from lit_attn.ablate.runner import Runner
from lit_attn.ablate.slots import Slots, make_slots
from lit_attn.ablate.status import StudyCell, make_cell_answers
from lit_attn.ablate.variants import Variant
from lit_attn.cells.folder import State, count_states, read_cell
from lit_attn.cells.inputs import change_finder
from lit_attn.cells.records import PlannedCell, Timing
from lit_attn.data.base import Data, find_paths
from lit_attn.models import factory
from lit_attn.models.base import find_mixers
from lit_attn.optim.decay import describe_decay
from lit_attn.report.answers.entry import write_answer
from lit_attn.report.answers.runs import (
    DryRunAnswer,
    PlannedStudy,
    StudyDesign,
)
from lit_attn.schema.errors import ConfigError, plural
from lit_attn.temporary import temporary_folder

HIGH_RATE = 1.0
"""Largest learning rate without a warning."""

DATA_LIMIT = 120.0
"""Seconds after which a dry run stops reading the data of a study."""

TIMING_TARGET = "lit_attn.train:time_cell"


def print_cells(matrices: list[Matrix], with_costs: bool) -> list[Job]:
    """Write every cell with its identity and state, `with_costs` also what its model costs.

    Returns the cells without a result, trials of `tune` included.
    """
    missing: list[Job] = []
    for matrix in matrices:
        missing += _print_study(matrix)
        if with_costs:
            _print_costs(matrix)
        if matrix.screening is not None:
            missing += _print_screening(matrix)
        states = _print_states(matrix, matrix.jobs)
        for job, state in zip(matrix.jobs, states, strict=True):
            if state != "done":
                missing.append(job)
        variants = {job.variant for job in matrix.jobs}
        seeds = plural(len(matrix.seeds), "seed")
        if matrix.jobs:
            print(f"  {plural(len(variants), 'variant')} x {seeds} = {count_states(states)}")
        if matrix.untuned and matrix.screening is None:
            cells = plural(len(matrix.untuned) * len(matrix.seeds), "cell")
            untuned = plural(len(matrix.untuned), "variant")
            print(f"  after the search: {untuned} x {seeds} = {cells}")
        print()
    return missing


def print_answer(matrices: list[Matrix]) -> None:
    """Write every study and cell, with its state, as JSON."""
    studies = []
    for matrix in matrices:
        jobs = [*matrix.screening_jobs, *matrix.jobs]
        cells = [_read_study_cell(job) for job in jobs]
        study_power = find_study_power(matrix)
        study = PlannedStudy(
            study=matrix.name,
            title=matrix.title,
            experiment=str(matrix.source.experiment_path),
            baseline=matrix.baseline.name,
            variants=[variant.name for variant in _list_known(matrix)],
            seeds=list(matrix.seeds),
            floors=list(matrix.baseline.experiment.data.floor_rules),
            warnings=find_warnings(matrix),
            counts=dict(Counter(cell.status.state for cell in cells)),
            trials=dict(Counter(job.state() for job in matrix.trials)),
            to_run=len(list_missing(matrix)),
            power=None if study_power is None else study_power.power,
            screening=None if study_power is None else study_power.screening,
            design=StudyDesign.describe(matrix.screening),
            cells=make_cell_answers(cells),
        )
        studies.append(study)
    print(write_answer(DryRunAnswer(studies=studies)))


def _list_known(matrix: Matrix) -> list[Variant]:
    """Return the variants that have cells, and all variants of a study with `design`."""
    return matrix.variants if matrix.screening is None else matrix.written


def list_missing(matrix: Matrix) -> list[Job]:
    """Return the cells that `run` would train, those of the search included."""
    return [
        job for job in (*matrix.early_jobs, *matrix.jobs) if job.state() not in ("done", "diverged")
    ]


def _read_study_cell(job: Job) -> StudyCell:
    """Return a cell of the study as `status` reads it from the plan."""
    planned = PlannedCell(
        variant=job.variant, seed=job.seed, identity=job.identity, path=job.folder.name
    )
    return StudyCell(planned, job.folder, read_cell(job.folder, job.identity))


def _print_study(matrix: Matrix) -> list[Job]:
    """Write the title of a study, and what is open or doubtful in it.

    Returns the trials of `tune` without a result.
    """
    missing = []
    print(f"{matrix.name}: {matrix.title}")
    print(f"  experiment {matrix.source.experiment_path}, baseline {matrix.baseline.name}")
    for line in matrix.notes:
        print(f"  {line}")
    floor_rules = matrix.baseline.experiment.data.floor_rules
    if floor_rules:
        print(f"  floors without attention: {', '.join(floor_rules)}")
    if not matrix.is_measured:
        print("  match: time: the step times are not measured yet")
    if matrix.tuning is not None:
        states = [job.state() for job in matrix.trials]
        missing = [job for job, state in zip(matrix.trials, states, strict=True) if state != "done"]
        counts = count_states(states)
        tuned = len(matrix.written) - len(matrix.untuned)
        print(f"  tuning: {tuned} of {len(matrix.written)} variants tuned; trials are {counts}")
    study_power = find_study_power(matrix)
    if study_power is not None:
        for line in study_power.describe():
            print(f"  {line}")
    for warning in find_warnings(matrix):
        print(f"  warning: {warning}")
    return missing


def find_warnings(matrix: Matrix) -> list[str]:
    """Return one line for each distinct warning about a study's variants.

    They are about missing files, data that do not fit, parameters that cannot be matched, rates and
    schedules, and about layers that a dry run cannot try out.
    """
    by_warning: dict[str, list[str]] = {}
    variants = _list_known(matrix)
    for variant in variants:
        for warning in _find_variant_warnings(variant):
            by_warning.setdefault(warning, []).append(variant.name)
    lines = []
    for warning, names in by_warning.items():
        if len(names) == len(variants):
            lines.append(f"all variants: {warning}" if len(names) > 1 else f"{names[0]}: {warning}")
        elif len(names) > 3:
            lines.append(f"{names[0]} and {plural(len(names) - 1, 'other variant')}: {warning}")
        else:
            lines.append(f"{', '.join(names)}: {warning}")
    return lines + _check_data(matrix)


def _check_data(matrix: Matrix) -> list[str]:
    """Return what the check before the first cell says about the data files on this machine."""
    variants: list[Variant] = []
    known: list[Data] = []
    for variant in _list_known(matrix):
        data = variant.experiment.data
        if data not in known and has_files(data):
            known.append(data)
            variants.append(variant)
    if not variants:
        return []
    end = check_variants(
        multiprocessing.get_context("spawn").Process,
        [variant.job(matrix.folder, matrix.seeds[0]).config for variant in variants],
        [variant.name for variant in variants],
        is_local=True,
        untried=[],
        selects=dict.fromkeys(range(len(variants)), matrix.selects),
        limit=DATA_LIMIT,
        # JSON is the only text on stdout.
        stream=sys.stderr,
    )
    lines = list(end.warnings)
    if end.mistake is not None:
        number, message, *_ = end.mistake
        lines.append(str(variants[number].error(matrix.source.name, message)))
    return lines


def has_files(data: Data) -> bool:
    """Return True if `data` names files that are all on this machine.

    Data with a folder `root` are left out: reading them may download what is missing there.
    """
    paths = list(find_paths(data.model_dump()))
    if not paths or any(key.endswith("root") for key, _ in paths):
        return False
    return all(path.exists() for _, path in paths)


def _find_variant_warnings(variant: Variant) -> list[str]:
    """Return the distinct warnings about one variant."""
    experiment = variant.experiment
    warnings = []
    try:
        check_files(experiment)
    except ConfigError as error:
        warnings.append(f"cannot run on this machine: {error}")
    if variant.match_to is not None:
        try:
            factory.resolve(experiment.model, variant.match_to, experiment.data)
        except ConfigError as error:
            warnings.append(f"cannot run: {error}")
    for mixer in find_mixers(experiment.model):
        warning = f"attention: {mixer.target} needs a GPU; nothing was tried"
        if mixer.needs_gpu and warning not in warnings:
            warnings.append(warning)
    if experiment.model.needs_foreign_code:
        kept_layers = factory.describe_kept_layers(experiment.model, experiment.data)
        if kept_layers:
            warnings.append(kept_layers)
    schedule_warning = experiment.schedule.warn(experiment.training.epochs)
    if schedule_warning:
        warnings.append(schedule_warning)
    rate = experiment.optimizer.lr
    if rate > HIGH_RATE:
        warnings.append(f"optimizer.lr: {rate:g} is above {HIGH_RATE:g}; most trainings diverge")
    return warnings


def _print_screening(matrix: Matrix) -> list[Job]:
    """Write the cells of the screening, and the cells that follow from their results.

    Returns the cells without a result.
    """
    screening = matrix.screening
    assert screening is not None
    jobs = matrix.screening_jobs
    states = _print_states(matrix, jobs)
    if jobs:
        variants = {job.variant for job in jobs}
        seeds = plural(screening.screen, "seed")
        counts = count_states(states)
        print(f"  screening: {plural(len(variants), 'variant')} x {seeds} = {counts}")
    print(f"  screening: {screening.describe_state()}")
    return [job for job, state in zip(jobs, states, strict=True) if state != "done"]


def _print_states(matrix: Matrix, jobs: list[Job]) -> list[State]:
    """Write a line for each of `jobs`, and return their states."""
    width = max((len(job.variant) for job in jobs), default=0)
    find_change = change_finder()
    states: list[State] = []
    for job in jobs:
        status = read_cell(job.folder, job.identity)
        states.append(status.state)
        description: str = status.state
        change = find_change(status.result)
        if change:
            description += f", stale: {change}"
        print(f"  {job.variant:<{width}}  seed {job.seed:<4} {job.identity}  {description}")
    return states


def print_estimate(matrices: list[Matrix], jobs: int | None) -> bool:
    """Time every distinct model and write the hours of each study; return False if one failed."""
    slots = make_slots(jobs)
    cells: list[Job] = []
    for matrix in matrices:
        cells += [*matrix.early_jobs, *matrix.jobs]
    slots.check(cells)
    launcher = Launcher(TIMING_TARGET)
    launcher.share_cores(slots.processes_at_once(cells))
    timings: dict[str, Timing] = {}
    with temporary_folder() as folder:
        samples = {}
        for job in cells:
            samples[job.cell.kind] = replace(job, folder=folder / job.cell.kind)
        display = make_display(sys.stderr)
        Runner(launcher, slots, display).run(samples.values())
        for kind, job in samples.items():
            timing = Timing.read(job.folder / "timing.json")
            if timing is not None:
                timings[kind] = timing
    for matrix in matrices:
        print(format_hours(matrix, timings, slots))
    return len(timings) == len(samples)


def format_hours(matrix: Matrix, timings: dict[str, Timing], slots: Slots) -> str:
    """Return the hours of one device and of this machine that the missing cells need."""
    missing = list_missing(matrix)
    measured = [job for job in missing if job.cell.kind in timings]
    at_once = slots.at_once(missing)
    devices = slots.processes_at_once(missing)
    hours = _sum_hours(missing, timings)
    line = (
        f"{matrix.name}: {plural(len(missing), 'cell')} to run, {len(measured)} of them measured:"
        f" {hours:.2f} {slots.unit} hours, {hours / devices:.2f} hours with"
        f" {at_once} at once"
    )
    if matrix.screening is None or matrix.screening.kept is not None or not measured:
        return line
    # The kept variants are not known yet, so each cell counts as the mean of the measured ones.
    fresh_cells = matrix.screening.confirm * (matrix.screening.keep + 1)
    fresh_hours = hours / len(measured) * fresh_cells
    return (
        f"{line}; after the screening {plural(fresh_cells, 'cell')}: about {fresh_hours:.2f}"
        f" {slots.unit} hours"
    )


def _sum_hours(jobs: list[Job], timings: dict[str, Timing]) -> float:
    """Return the hours of all devices of the measured ones of `jobs`."""
    hours = 0.0
    for job in jobs:
        if job.cell.kind in timings:
            hours += timings[job.cell.kind].seconds / 3600 * job.processes
    return hours


def _print_costs(matrix: Matrix) -> None:
    """Write parameters, FLOPs, cache and FFN width of each variant; and what does not decay."""
    width = max(len(variant.name) for variant in matrix.written)
    print(
        f"  {'':<{width}}  {'parameters':>12}  {'decayed':>12}  {'not decayed':>12}  "
        f"{'MFLOPs':>9}  {'layers':>8}  {'cache bytes':>11}  FFN width"
    )
    exempt: set[str] = set()
    for variant in matrix.written:
        data = variant.experiment.data
        try:
            model = factory.resolve(variant.experiment.model, variant.match_to, data)
            cost = factory.describe(model, data)
            decay = describe_decay(model, data, variant.experiment.optimizer)
        except ConfigError as error:
            raise variant.error(matrix.source.name, error) from error
        ffn_width: int | str
        if cost.ffn_width:
            ffn_width = cost.ffn_width
        elif model.ffn is None:
            ffn_width = "none"
        else:
            ffn_width = "unknown"
        matched = "  (matched)" if variant.match_to else ""
        exempt |= decay.exempt
        numbers = f"{cost.parameters:>12,}  {decay.decayed:>12,}  {decay.not_decayed:>12,}"
        layers = f"{cost.replaced_layers} of {cost.attention_layers}"
        cache = "none" if cost.cache_bytes is None else f"{cost.cache_bytes:,}"
        numbers += f"  {cost.flops / 1e6:>9,.2f}  {layers:>8}  {cache:>11}"
        print(f"  {variant.name:<{width}}  {numbers}  {ffn_width}{matched}")
    if exempt:
        print(f"  without weight decay: {', '.join(sorted(exempt))}")
