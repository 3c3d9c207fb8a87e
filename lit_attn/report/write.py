"""Records in, reports out: every file of every study, the same bytes from the same records."""

from pathlib import Path

from lit_attn.files import write_atomic
from lit_attn.report.attention import Recorded, ranks_table, read_recorded, values_table
from lit_attn.report.caption import make_caption
from lit_attn.report.diagnostics import mixture_table
from lit_attn.report.figures import FIGURES, draw
from lit_attn.report.formats import to_html, to_latex, to_markdown
from lit_attn.report.page import index_page, study_page
from lit_attn.report.read import StudyRecord, read_studies
from lit_attn.report.segmentation import class_table, per_class
from lit_attn.report.summary import per_seed, per_variant
from lit_attn.report.table import make_table

# Tables that not every study has.
OPTIONAL = {"classes.csv", "diagnostics.csv", "ranks.csv"}


def write_reports(runs: Path, reports: Path, studies: list[str] | None = None) -> list[Path]:
    """Write reports/<study>/ for each study in `runs` (or those named) and reports/index.html.

    The index lists every study in `reports`. Returns the folders that were written. Raises
    ConfigError where `runs` has no such study, or a plan in it cannot be read.
    """
    written = [_write(study, reports) for study in read_studies(runs, studies)]
    write_atomic(reports / "index.html", index_page(reports))
    return written


def table_files(
    study: StudyRecord, figures: list[str], recorded: dict[str, Recorded]
) -> dict[str, str]:
    """Everything but the figures: file name to content; the page shows `figures`."""
    summary = per_variant(study)
    table = make_table(summary, study.plan.metric, make_caption(study, summary))
    classes = per_class(study)
    files = {
        "table.csv": summary.to_csv(index=False, lineterminator="\n"),
        "per_seed.csv": per_seed(study).to_csv(index=False, lineterminator="\n"),
        "table.md": to_markdown(table),
        "table.tex": to_latex(table, study.plan.study),
    }
    tables = [to_html(table)]
    if len(classes):
        files["classes.csv"] = classes.to_csv(index=False, lineterminator="\n")
        tables.append(class_table(classes))
    for name, frame in (
        ("diagnostics.csv", values_table(recorded)),
        ("ranks.csv", ranks_table(recorded)),
    ):
        if len(frame):
            files[name] = frame.to_csv(index=False, lineterminator="\n")
    mixture = mixture_table(recorded)
    links = list(files)
    files["table.html"] = study_page(study, tables, links, table.caption, figures, mixture)
    return files


def _write(study: StudyRecord, reports: Path) -> Path:
    folder = reports / study.plan.study
    recorded = read_recorded(study)
    images = draw(study, recorded)
    for name in FIGURES:
        for kind in ("svg", "png"):
            if (name, kind) in images:
                write_atomic(folder / f"{name}.{kind}", images[name, kind])
            else:
                # What records of before filled, and these no longer do.
                (folder / f"{name}.{kind}").unlink(missing_ok=True)
    shown = [name for name in FIGURES if (name, "svg") in images]
    files = table_files(study, shown, recorded)
    for name in OPTIONAL - files.keys():
        (folder / name).unlink(missing_ok=True)
    for name, content in files.items():
        write_atomic(folder / name, content)
    return folder
