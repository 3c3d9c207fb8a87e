"""Runs of the studies of a command line, which `run` and `rerun` start."""

import sys
from argparse import Namespace
from collections.abc import Callable

from lit_attn.ablate import dry_run
from lit_attn.ablate.commands.arguments import StudyOptions
from lit_attn.ablate.commands.execution import (
    cancel_jobs,
    measure_times,
    require_variants,
    run_cells,
)
from lit_attn.ablate.commands.options import expand_studies, read_options
from lit_attn.ablate.display import write_line
from lit_attn.ablate.job import Job
from lit_attn.ablate.launch import Launcher
from lit_attn.ablate.origin import require_origin
from lit_attn.ablate.plan import Matrix
from lit_attn.ablate.signals import handle_signals
from lit_attn.papers.runs import print_costs
from lit_attn.schema.errors import ConfigError, plural
from lit_attn.schema.sources import freeze_package

Select = Callable[[list[Matrix]], list[Job] | None]


def run_studies(options: Namespace, target: str, select: Select) -> int:
    """Run the cells with the function `target`, or do what --cost, --dry-run or --cancel ask for.

    `select` returns the cells to train from their first step, or None for those without a result.
    Returns the exit code.
    """
    study_options = read_options(options)
    matrices = expand_studies(study_options)
    if study_options.paper is not None and study_options.cost is not None:
        items = study_options.paper.items(study_options.table)
        print_costs(study_options.paper, items, matrices, study_options.cost)
        return 0
    _require_origins(matrices, study_options)
    launcher = Launcher(target, study_options.smoke)
    matrices = _measure_first(matrices, study_options, launcher)
    chosen = select(matrices)
    if study_options.dry_run:
        return _print_plan(matrices, study_options, chosen)
    # The tables after the last cell come from the same code, whatever is checked out meanwhile.
    freeze_package()
    # A signal during the check of the models or the reports removes temporary files.
    with handle_signals(lambda number, _: sys.exit(128 + number)):
        if study_options.cancel:
            return cancel_jobs(matrices, study_options)
        return run_cells(matrices, study_options, launcher, chosen)


def _require_origins(matrices: list[Matrix], options: StudyOptions) -> None:
    """Raise ConfigError if the folder of a study belongs to another file."""
    for matrix in matrices:
        change = require_origin(matrix.source, matrix.folder)
        if change:
            # JSON is the only text on stdout.
            write_line(change, sys.stderr if options.json else None)


def _measure_first(
    matrices: list[Matrix], options: StudyOptions, launcher: Launcher
) -> list[Matrix]:
    """Measure the step times that are needed before the cells, and return the cells after that.

    With --quiet-timing a local run measures all step times after its cells; a dry run has no cells,
    and with SLURM this machine is not the one that runs them.
    """
    starts_no_cells = options.dry_run or options.cancel
    measures_all = options.quiet_timing and (options.dry_run or options.is_slurm)
    if measures_all:
        unmeasured = matrices
    elif starts_no_cells:
        unmeasured = []
    else:
        unmeasured = [matrix for matrix in matrices if not matrix.is_measured]
    if not unmeasured:
        return matrices
    if not options.is_slurm:
        require_variants(unmeasured, options, launcher)
    measure_times(unmeasured, options)
    # The cells at equal time follow from the measurement.
    return expand_studies(options)


def _print_plan(matrices: list[Matrix], options: StudyOptions, chosen: list[Job] | None) -> int:
    """Print what a run would do, and return the exit code."""
    if options.json:
        if chosen is not None:
            raise ConfigError("--json: is for `run --dry-run`; leave it out with rerun")
        dry_run.print_answer(matrices)
        return 0
    if chosen is not None:
        for job in chosen:
            print(f"{job.name}  {job.state()}")
        print(plural(len(chosen), "cell"))
        return 0
    if options.estimate:
        return 0 if dry_run.print_estimate(matrices, options.jobs) else 1
    dry_run.print_cells(matrices, with_costs=options.params)
    return 0
