"""Tables and figures made from records. This package imports nothing that trains."""

import os
from pathlib import Path


def write_reports(runs: Path, reports: Path, studies: list[str] | None = None) -> list[Path]:
    """Write reports/<study>/ for each study in `runs` (or in `studies`) and reports/index.html.

    The index lists every study in `reports`. A study whose records cannot be read or reported is
    skipped with a warning. Returns the folders that were written. Raises ConfigError if there is
    nothing to report on.
    """
    # pandas is imported only when it is needed.
    from lit_attn.report import write
    from lit_attn.report.read import read_studies

    folders = write.write_reports(read_studies(runs, studies), reports).written
    for folder in folders:
        _record_origin(folder, runs / folder.name)
    return folders


def _record_origin(report: Path, study: Path) -> None:
    """Record which folder of runs a report shows, and warn if it replaces the report of another."""
    from lit_attn.cells.records import Origin
    from lit_attn.report.read import LOG

    path = report / "origin.json"
    recorded = Origin.read_valid(path)
    before = None if recorded is None else Path(os.path.normpath(report.resolve() / recorded.file))
    if before is not None and before != study.resolve() and (before / "plan.json").exists():
        LOG.warning(
            "%s: replaces the tables of %s by those of %s; choose another --reports to keep both",
            report,
            before,
            study,
        )
    origin = Origin(file=os.path.relpath(study.resolve(), report.resolve()))
    if origin != recorded:
        origin.write(path)
