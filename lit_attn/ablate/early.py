"""First tables of a study, written while its other cells run.

A study shows something as soon as every variant has one result. Its tables are written by a forked
process, so the runner goes on watching its cells.
"""

import contextlib
import multiprocessing
import os
import signal
from collections.abc import Iterable
from multiprocessing.process import BaseProcess
from pathlib import Path

from lit_attn.ablate.plan import Job, Matrix, find_ended
from lit_attn.schema.errors import plural


class EarlyTables:
    """Writer of the first tables of each study that has a variant without a result."""

    def __init__(self, matrices: Iterable[Matrix], runs: Path, reports: Path) -> None:
        self.runs = runs
        self.reports = reports
        self.matrices = {matrix.folder: matrix for matrix in matrices}
        # Variants without a result, of each study in which a cell has ended.
        self.without_result: dict[Path, set[str]] = {}
        self.writers: list[BaseProcess] = []

    def update(self, ended: Job) -> str:
        """Begin the tables of a study if its cell `ended` was the last one that they needed.

        Return a line about them, or an empty text.
        """
        study = ended.folder.parents[1]
        if study not in self.without_result:
            self.without_result[study] = self._find_missing_variants(study, ended)
        needed = self.without_result[study]
        # If every variant had a result before, an earlier run has written the first tables.
        if not needed or ended.state() != "done":
            return ""
        needed.discard(ended.cell.variant)
        if needed:
            return ""
        missing = sum(job.state() != "done" for job in self.matrices[study].jobs)
        if not missing:
            # The tables after the last cell are about to be written.
            return ""
        # A fork has the modules of the run, also if another version was checked out since.
        context = multiprocessing.get_context("fork")
        arguments = (self.runs, self.reports, study.name)
        writer = context.Process(target=_write_quietly, args=arguments, daemon=True)
        writer.start()
        self.writers.append(writer)
        page = self.reports / study.name / "table.html"
        return f"tables   first ones, {plural(missing, 'cell')} to come: {page}"

    def _find_missing_variants(self, study: Path, ended: Job) -> set[str]:
        """Return the variants of a study that had no result before the cell `ended`."""
        matrix = self.matrices[study]
        missing = {job.cell.variant for job in matrix.jobs}
        # A rule of the study may have ended variants that get no result.
        unneeded = find_ended([matrix])
        for job in matrix.jobs:
            was_done = job.folder != ended.folder and job.state() == "done"
            if was_done or job.folder in unneeded:
                missing.discard(job.cell.variant)
        return missing

    def finish(self) -> None:
        """Wait until the last table is written."""
        for writer in self.writers:
            writer.join()
        self.writers.clear()


def _write_quietly(runs: Path, reports: Path, study: str) -> None:
    """Write the tables of one study without a word; the tables after the last cell report errors.

    Ctrl-C is for the runner.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    from lit_attn.report import write_reports

    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 1)
    os.dup2(nothing, 2)
    with contextlib.suppress(Exception):
        write_reports(runs, reports, [study])
