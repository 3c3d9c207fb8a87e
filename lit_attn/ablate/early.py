"""First tables of a study, written by the runner between two of its cells.

A study shows something as soon as every variant has one result, whether its cells run here or as
jobs of a cluster. The other cells go on meanwhile.
"""

import contextlib
import io
import logging
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from lit_attn.ablate.job import Job
from lit_attn.cells.records import Plan
from lit_attn.report import write_reports
from lit_attn.schema.errors import ConfigError, plural
from lit_attn.schema.mistakes import describe_mistake


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

    def update(self, ended: Job) -> str:
        """Write the tables of a study if every variant has a result since the cell `ended`.

        Return a line about them, or an empty text.
        """
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
        paths = {cell.path for cell in plan.cells if study / cell.path in self.folders}
        missing_count = sum(not _has_result(study, path) for path in paths)
        if not missing_count:
            # The tables after the last cell are about to be written.
            return ""
        error = _write_quietly(self.runs, self.reports, study.name)
        if error:
            return f"tables   first ones of {study.name} not written: {error}"
        page = self.reports / study.name / "table.html"
        return f"tables   first ones, {plural(missing_count, 'cell')} to come: {page}"


def _list_missing_variants(plan: Plan, study: Path, ignored: Path | None = None) -> set[str]:
    """Return the variants without a result in a cell other than `ignored`."""
    missing = {cell.variant for cell in plan.cells}
    for cell in plan.cells:
        if cell.variant not in missing or study / cell.path == ignored:
            continue
        if _has_result(study, cell.path):
            missing.remove(cell.variant)
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


def _write_quietly(runs: Path, reports: Path, study: str) -> str:
    """Write the tables of one study without output, and return why they were not written, or ""."""
    warning = LastWarning()
    logger = logging.getLogger("lit_attn.report")
    logger.addHandler(warning)
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            write_reports(runs, reports, [study])
    except (ConfigError, OSError) as error:
        # The disk is full, a folder cannot be written, or a record cannot be read.
        return warning.text or str(error)
    except Exception as error:
        # The cells do not depend on the tables.
        return describe_mistake(error)
    finally:
        logger.removeHandler(warning)
    return ""
