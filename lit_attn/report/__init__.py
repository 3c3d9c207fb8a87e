"""Records to tables and figures; knows nothing of training."""

from pathlib import Path


def write_reports(runs: Path, reports: Path, studies: list[str] | None = None) -> list[Path]:
    """See `lit_attn.report.write.write_reports`; pandas is imported when this is called."""
    from lit_attn.report.write import write_reports as write

    return write(runs, reports, studies)
