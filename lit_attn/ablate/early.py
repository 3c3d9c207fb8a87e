"""First tables of a study, written while its other cells run.

A study shows something as soon as every variant has one result. Its tables are written by a forked
process, so the command goes on watching its cells, whether they run here or as jobs of a cluster.
"""

import contextlib
import logging
import multiprocessing
import os
import signal
from collections.abc import Iterable, Iterator
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType
from typing import NamedTuple

from lit_attn.ablate.display import write_line
from lit_attn.ablate.hooks import Observer
from lit_attn.ablate.plan import Job
from lit_attn.cells.records import Plan, PlannedCell
from lit_attn.cells.rules import read_ended_cells
from lit_attn.report import write_reports
from lit_attn.schema.errors import ConfigError, plural
from lit_attn.schema.mistakes import describe_mistake


@contextlib.contextmanager
def write_early(runs: Path, reports: Path, jobs: Iterable[Job]) -> Iterator[Observer]:
    """Yield the function that gets every cell that has ended and writes the first tables.

    `jobs` are the cells of this run. At the end, wait for the tables, and write a line about those
    that could not be written.
    """
    early = EarlyTables(runs, reports, [job.folder for job in jobs])
    try:
        yield early.update
    finally:
        for line in early.finish():
            write_line(line)


class Writer(NamedTuple):
    """Process that writes the tables of a study, and the end of the pipe for its error."""

    study: str
    process: BaseProcess
    errors: Connection


class StudyProgress(NamedTuple):
    """Plan of a study, and its variants without a result as far as the last cell has shown."""

    plan: Plan
    without_result: set[str]


class EarlyTables:
    """Writer of the first tables of each study that has a variant without a result."""

    def __init__(self, runs: Path, reports: Path, folders: Iterable[Path]) -> None:
        self.runs = runs
        self.reports = reports
        # Folders of the cells of this run, which can be a part of the planned cells.
        self.folders = set(folders)
        # Studies in which a cell has ended.
        self.studies: dict[Path, StudyProgress] = {}
        self.writers: list[Writer] = []

    def update(self, ended: Job) -> str:
        """Begin the tables of a study if every variant has a result since the cell `ended`.

        Return lines about them and about tables that could not be written, or an empty text.
        """
        lines = self._collect_errors()
        line = self._begin(ended)
        if line:
            lines.append(line)
        return "\n".join(lines)

    def _begin(self, ended: Job) -> str:
        """Begin the tables of a study if they can be written now, and return a line about them."""
        study = ended.folder.parents[1]
        if study not in self.studies:
            plan = Plan.read_valid(study / "plan.json")
            if plan is None:
                return ""
            missing = _list_missing_variants(plan, study, ended.folder)
            self.studies[study] = StudyProgress(plan, missing)
        plan, without_result = self.studies[study]
        # If every variant had a result before, an earlier run has written the first tables.
        if not without_result:
            return ""
        # Another command on the same folder may have trained some of them.
        without_result.intersection_update(_list_missing_variants(plan, study))
        if without_result:
            return ""
        ended_cells = read_ended_cells(plan, study)
        paths = set()
        for cell in plan.cells:
            folder = study / cell.path
            if folder in self.folders and folder not in ended_cells:
                paths.add(cell.path)
        missing_count = sum(not _has_result(study, path) for path in paths)
        if not missing_count:
            # The tables after the last cell are about to be written.
            return ""
        # A fork has the modules of the run, also if another version was checked out since.
        context = multiprocessing.get_context("fork")
        receiver, sender = context.Pipe(duplex=False)
        arguments = (self.runs, self.reports, study.name, sender)
        process = context.Process(target=_write_quietly, args=arguments, daemon=True)
        process.start()
        sender.close()
        self.writers.append(Writer(study.name, process, receiver))
        page = self.reports / study.name / "table.html"
        return f"tables   first ones, {plural(missing_count, 'cell')} to come: {page}"

    def _collect_errors(self) -> list[str]:
        """Return a line about each writer that has ended with an error since the last call."""
        lines = []
        for writer in list(self.writers):
            if writer.process.is_alive():
                continue
            self.writers.remove(writer)
            reason = ""
            with contextlib.suppress(EOFError):
                reason = writer.errors.recv()
            if not reason and writer.process.exitcode:
                reason = f"their process ended with exit code {writer.process.exitcode}"
            writer.errors.close()
            if reason:
                lines.append(f"tables   first ones of {writer.study} not written: {reason}")
        return lines

    def finish(self) -> list[str]:
        """Wait until the last table is written, and return lines about errors."""
        for writer in self.writers:
            writer.process.join()
        return self._collect_errors()


def _list_missing_variants(plan: Plan, study: Path, ignored: Path | None = None) -> set[str]:
    """Return the variants that need a result and have none in a cell other than `ignored`.

    A variant that a rule of the study has ended needs none.
    """
    ended_cells = read_ended_cells(plan, study)
    by_variant: dict[str, list[PlannedCell]] = {}
    for cell in plan.cells:
        by_variant.setdefault(cell.variant, []).append(cell)
    missing = set()
    for name, cells in by_variant.items():
        has_result = False
        is_needed = False
        for cell in cells:
            path = study / cell.path
            is_needed |= path not in ended_cells
            has_result |= path != ignored and _has_result(study, cell.path)
        if is_needed and not has_result:
            missing.add(name)
    return missing


def _has_result(study: Path, path: str) -> bool:
    return (study / path / "result.json").exists()


class LastWarning(logging.Handler):
    """Handler that keeps the last warning: it has the reason why a study was skipped."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.text = ""

    def emit(self, record: logging.LogRecord) -> None:
        """Keep the text of `record` in one line."""
        self.text = " ".join(record.getMessage().split())


def _write_quietly(runs: Path, reports: Path, study: str, errors: Connection) -> None:
    """Write the tables of one study, and send an error as one line to the command.

    Ctrl-C is for the command. Another signal ends this process, which removes temporary files.
    """

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, leave)
    signal.signal(signal.SIGHUP, leave)
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 1)
    os.dup2(nothing, 2)
    warning = LastWarning()
    logging.getLogger("lit_attn.report").addHandler(warning)
    try:
        write_reports(runs, reports, [study])
    except (ConfigError, OSError) as error:
        # The disk is full, a folder cannot be written, or a record cannot be read.
        errors.send(warning.text or str(error))
    except Exception as error:
        # The cells do not depend on the tables.
        errors.send(describe_mistake(error))
