"""Tables and figures made from records. This package imports nothing that trains."""

from pathlib import Path


def write_reports(runs: Path, reports: Path, studies: list[str] | None = None) -> list[Path]:
    """Call `lit_attn.report.write.write_reports`, which imports pandas only when it is needed."""
    from lit_attn.report.write import write_reports as write

    return write(runs, reports, studies)
