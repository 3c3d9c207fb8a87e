"""Table across studies: one row for each variant, one column for each study, and mean ranks."""

import statistics
from pathlib import Path

import numpy as np
import pandas as pd

from lit_attn.files import write_atomic
from lit_attn.report import stats
from lit_attn.report.columns import NOTHING, format_p, format_spread, make_scale
from lit_attn.report.comparison import ALPHA, compare_variants
from lit_attn.report.formats import Cell, Table, named_table, to_csv, to_latex, to_markdown
from lit_attn.report.read import StudyRecord
from lit_attn.report.results import SENTENCES
from lit_attn.report.summary import make_variant_frame
from lit_attn.report.write import Section, render_page

FEW = 6
"""Number of studies below which a test of mean ranks has little power."""


def write_across(studies: list[StudyRecord], reports: Path) -> Path:
    """Write `across.html`, `.md`, `.tex` and `.csv`; return the path of the page."""
    frames = {study.plan.study: _read_study(study) for study in studies}
    table = make_across_table(studies, frames)
    numbers = pd.concat({name: frame["mean"] for name, frame in frames.items()}, axis=1)
    files = {
        "across.csv": to_csv(numbers.rename_axis("variant").reset_index()),
        "across.md": to_markdown(table),
        "across.tex": to_latex(table, "across"),
    }
    page = render_page(table.title.rstrip("."), [Section(tables=[table])], warnings=table.warnings)
    for name, content in {**files, "across.html": page}.items():
        write_atomic(reports / name, content)
    return reports / "across.html"


def make_across_table(studies: list[StudyRecord], frames: dict[str, pd.DataFrame]) -> Table:
    """Return the means of all variants, and ranks of the variants with a result in every study."""
    variants = list(dict.fromkeys(name for frame in frames.values() for name in frame.index))
    complete = [v for v in variants if all(v in f.index and f.loc[v, "n"] for f in frames.values())]
    signs = [-1 if study.plan.metric.goal == "max" else 1 for study in studies]
    means = [
        sign * frame.loc[complete, "mean"]
        for sign, frame in zip(signs, frames.values(), strict=True)
    ]
    ranks = np.array([series.rank() for series in means]).reshape(len(studies), len(complete))
    rows = []
    for variant in variants:
        row = [Cell(variant)]
        for frame in frames.values():
            text, is_best = NOTHING, False
            if variant in frame.index:
                text, is_best = frame.loc[variant, "text"], bool(frame.loc[variant, "best"])
            row.append(Cell(text, is_bold=is_best))
        rank = NOTHING
        if variant in complete and len(complete) > 1:
            rank = f"{statistics.fmean(ranks[:, complete.index(variant)]):.2f}"
        rows.append([*row, Cell(rank)])
    labels = [f"{study.plan.study}: {study.plan.metric.label}" for study in studies]
    tested = ""
    if len(studies) > 1 and len(complete) > 2:
        p, critical = stats.friedman_nemenyi(ranks, ALPHA)
        tested = " " + SENTENCES["friedman"].format(p=format_p(p), alpha=ALPHA, critical=critical)
    headings = [*labels, "mean rank"]
    table = named_table("across", rows, headings, complete=len(complete), test=tested)
    if len(studies) < FEW:
        table.warnings.append(SENTENCES["few_studies"].format(count=len(studies), few=FEW))
    return table


def _read_study(study: StudyRecord) -> pd.DataFrame:
    """Return n, mean, printed value and whether the mean is the best one, by variant."""
    summary = make_variant_frame(study, compare_variants(study)).set_index("variant")
    digits = make_scale(summary).digits
    summary["text"] = [
        format_spread(mean, sd, digits)
        for mean, sd in zip(summary["mean"], summary["sd"], strict=True)
    ]
    return summary[["n", "mean", "best", "text"]]
