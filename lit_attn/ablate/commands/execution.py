"""Execution of cells by `run` and `rerun`: from the checks before the first cell to the tables."""

import contextlib
import functools
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from lit_attn.ablate.commands.arguments import StudyOptions
from lit_attn.ablate.commands.options import expand_studies
from lit_attn.ablate.display import make_display, write_line
from lit_attn.ablate.early import EarlyTables
from lit_attn.ablate.floors import write_floors
from lit_attn.ablate.input_files import require_inputs
from lit_attn.ablate.job import Job
from lit_attn.ablate.launch import Launcher
from lit_attn.ablate.outcomes import Summary
from lit_attn.ablate.plan import Matrix
from lit_attn.ablate.rerun import set_aside
from lit_attn.ablate.runner import Runner
from lit_attn.ablate.slots import make_slots
from lit_attn.ablate.slurm.follow import Follower
from lit_attn.ablate.slurm.job import SlurmCell
from lit_attn.ablate.slurm.queue import cancel
from lit_attn.ablate.slurm.submit import require_resources, submit_missing
from lit_attn.ablate.step_times import measure_step_times
from lit_attn.cells.folder import CellStatus, read_cell
from lit_attn.cells.inputs import change_finder
from lit_attn.cells.lock import require_locks
from lit_attn.files import require_writable
from lit_attn.report import write_reports
from lit_attn.schema.errors import ConfigError, plural, program

Start = Callable[[list[Job]], Summary]
"""Function that runs cells until all have ended."""

MOST_NAMES = 5
"""Variants without a result that a line about a screening names."""


class Selection(NamedTuple):
    """Cells of a command: those to run, and the state of the others.

    `total` is the number of all cells, and `diverged` the number of cells that are left out because
    they have diverged.
    """

    jobs: list[Job]
    done: list[CellStatus]
    diverged: int
    total: int


class RunEnd(NamedTuple):
    """The studies of a run, with their tuned variants, and how the run has ended.

    `has_failed`: a selected cell has failed or diverged, or a variant could not be tuned.
    """

    matrices: list[Matrix]
    stopped_by: signal.Signals | None
    has_failed: bool


def run_cells(
    matrices: list[Matrix], options: StudyOptions, launcher: Launcher, chosen: list[Job] | None
) -> int:
    """Run the missing cells, or the `chosen` cells from their first step, and write the tables.

    Return the exit code.
    """
    prepare = _prepare_slurm if options.is_slurm else _prepare_local
    start = prepare(matrices, options, launcher)
    require_locks(options.out)
    require_writable(options.reports, "--reports")
    for matrix in matrices:
        require_writable(options.reports / matrix.name, "--reports")

    matrices, stopped_by, has_failed = run_selected(matrices, options, launcher, start, chosen)
    try:
        if stopped_by is None and options.quiet_timing:
            measure_times(matrices, options)
        if stopped_by is None and not options.smoke and not options.is_slurm:
            write_floors(matrices, launcher)
    finally:
        # The tables are written whatever happens to the times and the floors.
        if stopped_by in (None, signal.SIGINT):
            _write_tables(matrices, options)
    if stopped_by is not None:
        return 128 + stopped_by
    return 1 if has_failed else 0


def run_selected(
    matrices: list[Matrix],
    options: StudyOptions,
    launcher: Launcher,
    start: Start,
    chosen: list[Job] | None,
) -> RunEnd:
    """Run the missing cells, or the `chosen` cells from their first step."""
    limit = options.limit
    if chosen is None:
        matrices, limit = _run_early_stages(matrices, options, launcher, start, limit)
    selection = _select(matrices, chosen, limit)
    _prepare_folders(matrices, options, launcher, selection.jobs, is_rerun=chosen is not None)
    _announce(matrices, selection)
    summary = start(selection.jobs)
    has_failed = bool(summary.failed) or selection.diverged > 0
    is_cut = chosen is None and limit == 0
    # A rerun decides nothing: the next run reads its results.
    screened = matrices if chosen is None else []
    has_failed |= _report_open_searches(matrices, is_cut=is_cut)
    has_failed |= _report_open_screenings(screened, is_cut=is_cut)
    return RunEnd(matrices, summary.stopped_by, has_failed)


def cancel_jobs(matrices: list[Matrix], options: StudyOptions) -> int:
    """Cancel the SLURM jobs of the studies, print their number, and return the exit code."""
    count = cancel(matrices, options.cancel_removed)
    print(f"{plural(count, 'job')} cancelled")
    if options.cancel_removed:
        for matrix in matrices:
            if matrix.folder.exists():
                matrix.write_plan()
    return 0


def measure_times(matrices: list[Matrix], options: StudyOptions) -> None:
    """Measure the missing step times for `match: time` or --quiet-timing."""
    for matrix in matrices:
        if options.is_slurm:
            command = f"{options.file} --study {matrix.source.name} --dry-run --quiet-timing"
            raise ConfigError(
                f"{matrix.name}: step times: measure on a node first:"
                f" srun {program('run')} {command}"
            )
        is_noise_allowed = options.allow_noisy_timing or options.smoke
        measure_step_times(matrix, make_slots(options.jobs), is_noise_allowed=is_noise_allowed)


def require_variants(matrices: list[Matrix], options: StudyOptions, launcher: Launcher) -> None:
    """Raise ConfigError if the input files or the model of a variant cannot be used.

    The cells of these studies follow from step times, and are not known before the measurement.
    """
    jobs = []
    for matrix in matrices:
        for variant in matrix.written:
            jobs += [variant.job(matrix.folder, seed) for seed in matrix.seeds]
    require_inputs(matrices, jobs)
    launcher.require_cells(matrices, jobs, options.jobs, is_local=True)


def _select(matrices: list[Matrix], chosen: list[Job] | None, limit: int | None) -> Selection:
    """Return the first `limit` of the chosen cells, or of the cells that have no result."""
    every_job: list[Job] = []
    for matrix in matrices:
        every_job += matrix.jobs
    cells = [(job, read_cell(job.folder, job.identity)) for job in every_job]
    diverged = 0
    if chosen is None:
        jobs = [job for job, cell in cells if cell.state not in ("done", "diverged")]
        diverged = sum(cell.state == "diverged" for _, cell in cells)
    else:
        jobs = chosen
    jobs = jobs[:limit]
    folders = {job.folder for job in jobs}
    done = [cell for job, cell in cells if cell.state == "done" and job.folder not in folders]
    return Selection(jobs, done, diverged, len(cells))


def _announce(matrices: list[Matrix], selection: Selection) -> None:
    """Write the number of the cells, and what else a user can do about them."""
    for matrix in matrices:
        for line in matrix.notes:
            write_line(line)
    cell_count = plural(selection.total, "cell")
    write_line(f"{cell_count}: {len(selection.done)} done, {len(selection.jobs)} to run")
    rerun = program("rerun")
    find_change = change_finder()
    changes = [find_change(cell.result) for cell in selection.done]
    changes = [change for change in changes if change]
    if changes:
        write_line(f"stale: {plural(len(changes), 'done cell')}; {changes[0]}; see `{rerun} stale`")
    if selection.diverged:
        cells = plural(selection.diverged, "cell")
        write_line(f"skipped: {cells} that diverged; see `{rerun} failed`")


def _prepare_folders(
    matrices: list[Matrix],
    options: StudyOptions,
    launcher: Launcher,
    jobs: list[Job],
    is_rerun: bool,
) -> None:
    """Check what `jobs` need, set their folders aside for a rerun, and write the plans."""
    _require_cells(matrices, options, launcher, jobs)
    if is_rerun:
        for job in jobs:
            set_aside(job)
    for matrix in matrices:
        matrix.write_plan()


def _require_cells(
    matrices: list[Matrix], options: StudyOptions, launcher: Launcher, jobs: list[Job]
) -> None:
    """Raise ConfigError if the folders, the input files or the models of `jobs` cannot be used."""
    is_local = not options.is_slurm
    if is_local:
        for folder in sorted({job.folder.parent for job in jobs if job.folder.parent.exists()}):
            require_writable(folder, "--out")
        require_inputs(matrices, jobs)
    launcher.require_cells(matrices, jobs, options.jobs, is_local)


def _report_open_searches(matrices: list[Matrix], *, is_cut: bool) -> bool:
    """Write a line about searches that have chosen nothing, or that --limit has cut (`is_cut`).

    Return True if a search has not ended for another reason. The next run continues a cut one.
    """
    for matrix in matrices:
        for name in matrix.list_without_choice():
            reason = f"no trial of '{name}' has a mean, so this variant is not trained"
            write_line(f"{matrix.name}: tuning: {reason}")
    searched = [matrix for matrix in matrices if matrix.screening is None]
    untuned = [variant for matrix in searched for variant in matrix.untuned]
    if untuned and is_cut:
        variants = plural(len(untuned), "variant")
        write_line(f"tuning: the search of {variants} has not ended; run again to continue it")
    return bool(untuned) and not is_cut


def _report_open_screenings(matrices: list[Matrix], *, is_cut: bool) -> bool:
    """Write a line about each screening that has kept no variant.

    Return True if one of them has not been cut by --limit.
    """
    lines = [describe_open_screening(matrix) for matrix in matrices]
    lines = [line for line in lines if line]
    for line in lines:
        write_line(line)
    return bool(lines) and not is_cut


def describe_open_screening(matrix: Matrix) -> str:
    """Return why the screening of a study has not kept any variant, or an empty text."""
    screening = matrix.screening
    if screening is None or screening.kept:
        return ""
    if screening.kept is not None:
        return (
            f"{matrix.name}: screening: no variant has a value of {screening.select.name}, so"
            " nothing is confirmed"
        )
    names = [entry.variant for entry in screening.variants if not entry.has_ended]
    first = ", ".join(names[:MOST_NAMES])
    more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    return (
        f"{matrix.name}: screening: {first}{more} need a result of every seed before variants are"
        " chosen; remove the reason and run again, or remove the variant"
    )


def _run_early_stages(
    matrices: list[Matrix],
    options: StudyOptions,
    launcher: Launcher,
    start: Start,
    limit: int | None,
) -> tuple[list[Matrix], int | None]:
    """Run the trials of `tune` and the screenings of `design`.

    Return the cells that follow from their results and the rest of `limit`. A cell is tried once in
    a run: a stage with a failed cell continues in the next run. Raises SystemExit if the run is
    stopped.
    """
    names = {matrix.name for matrix in matrices}
    attempted: set[Path] = set()
    while True:
        early = []
        screening: set[Path] = set()
        for matrix in matrices:
            early += [job for job in matrix.early_jobs if job.folder not in attempted]
            screening.update(job.folder for job in matrix.screening_jobs)
        early = [job for job in early if job.state() not in ("done", "diverged")]
        early = early[:limit]
        if not early:
            return matrices, limit
        _prepare_folders(matrices, options, launcher, early, is_rerun=False)
        screened = sum(job.folder in screening for job in early)
        if screened < len(early):
            write_line(f"tuning: {plural(len(early) - screened, 'cell')} to run")
        if screened:
            write_line(f"screening: {plural(screened, 'cell')} to run")
        summary = start(early)
        if summary.stopped_by is not None:
            raise SystemExit(128 + summary.stopped_by)
        attempted.update(job.folder for job in early)
        if limit is not None:
            limit -= len(early)
        matrices = [matrix for matrix in expand_studies(options) if matrix.name in names]


def _write_tables(matrices: list[Matrix], options: StudyOptions) -> None:
    """Write the plans and the reports, and print a short table of each study."""
    # Written again, because another command may have started further seeds in the meantime. On a
    # full disk the first plan remains.
    with contextlib.suppress(OSError):
        for matrix in matrices:
            matrix.write_plan()
    names = [matrix.name for matrix in matrices]
    for folder in write_reports(options.out, options.reports, names):
        table = (folder / "table.txt").read_text(encoding="utf-8")
        write_line(f"\n{table.rstrip()}")
        write_line(f"{folder / 'table.html'}")
    write_line(f"{options.reports / 'index.html'}")
    if options.paper is not None:
        # Imported here, because it imports pandas.
        from lit_attn.papers.page import write_paper

        # The page has all tables, whichever of them this command has run.
        write_line(str(write_paper(options.paper, options.out, options.reports)))


def _prepare_local(matrices: list[Matrix], options: StudyOptions, launcher: Launcher) -> Start:
    """Return the function that runs cells on this machine. Raises ConfigError if a cell cannot."""
    slots = make_slots(options.jobs)
    for matrix in matrices:
        slots.check([*matrix.early_jobs, *matrix.jobs])

    def start(missing: list[Job]) -> Summary:
        write_line(f"{slots.at_once(missing)} at once")
        stall = options.stall_seconds
        early = EarlyTables(options.out, options.reports, [job.folder for job in missing])
        return Runner(launcher, slots, make_display(sys.stdout), stall, early.update).run(missing)

    return start


def _prepare_slurm(matrices: list[Matrix], options: StudyOptions, launcher: Launcher) -> Start:
    """Return the function that runs cells as SLURM jobs. Raises ConfigError for wrong resources."""
    for matrix in matrices:
        require_resources(matrix)

    def start(missing: list[Job]) -> Summary:
        stall = options.stall_seconds
        make_cell = functools.partial(SlurmCell, launcher.target, options.smoke, stall)
        count = submit_missing(matrices, missing, make_cell, options.jobs)
        write_line(f"{plural(count, 'job')} submitted, {len(missing) - count} already submitted")
        early = EarlyTables(options.out, options.reports, [job.folder for job in missing])
        return Follower(matrices, make_display(sys.stdout), early.update).run(missing)

    return start
