"""Records in, reports out: every file of every study, the same bytes from the same records."""

from pathlib import Path

from lit_attn.files import write_atomic
from lit_attn.report.caption import caption
from lit_attn.report.figures import write_figures
from lit_attn.report.page import index_page, study_page
from lit_attn.report.read import StudyRecord, read_studies
from lit_attn.report.summary import per_seed, per_variant
from lit_attn.report.table import make_table, to_html, to_latex, to_markdown


def write_reports(runs: Path, reports: Path, studies: list[str] | None = None) -> list[Path]:
    """Write reports/<study>/ for each study in `runs` (or those named) and reports/index.html.

    Returns the folders. Raises ConfigError where there is no such study.
    """
    written = [_write(study, reports) for study in read_studies(runs, studies)]
    listed = []
    for study in read_studies(runs):
        if (reports / study.plan.study / "table.html").exists():
            progress = f"{len(study.results)} / {len(study.cells)}"
            listed.append((study.plan.study, study.plan.title, progress))
    write_atomic(reports / "index.html", index_page(listed))
    return written


def _write(study: StudyRecord, reports: Path) -> Path:
    folder = reports / study.plan.study
    summary = per_variant(study)
    words = caption(study, summary)
    table = make_table(summary, study.plan.metric, words)
    figures = write_figures(study, folder)
    files = {
        "table.csv": summary.to_csv(index=False),
        "per_seed.csv": per_seed(study).to_csv(index=False),
        "table.md": to_markdown(table),
        "table.tex": to_latex(table, study.plan.study),
        "table.html": study_page(study, to_html(table), words, figures),
    }
    for name, content in files.items():
        write_atomic(folder / name, content)
    return folder
