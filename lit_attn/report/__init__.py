"""Tables and figures made from records. This package imports nothing that trains."""

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

    return write.write_reports(read_studies(runs, studies), reports).written
