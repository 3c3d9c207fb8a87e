"""Table across studies: one row for each variant, one column for each study, and mean ranks."""

from pathlib import Path

import pandas as pd

from lit_attn.files import write_atomic
from lit_attn.report import stats
from lit_attn.report.columns import NOTHING, format_p, format_spread, make_scale
from lit_attn.report.comparison import ALPHA, compare_variants
from lit_attn.report.formats import Cell, named_table, to_csv, to_latex, to_markdown
from lit_attn.report.numbers import fill, write_number
from lit_attn.report.page import Section, render_page
from lit_attn.report.read import StudyRecord
from lit_attn.report.results import SENTENCES, describe_origin
from lit_attn.report.summary import make_variant_frame

FEW = 6  # Number of studies below which a test of mean ranks has little power.


def write_across(studies: list[StudyRecord], reports: Path) -> Path:
    """Write `across.html`, `.md`, `.tex` and `.csv`; return the path of the page.

    Variants with all planned seeds in every study have ranks.
    """
    frames = {}
    for study in studies:
        frame = make_variant_frame(study, compare_variants(study)).set_index("variant")
        digits = make_scale(frame).digits
        frame["text"] = [*map(format_spread, frame["mean"], frame["sd"], [digits] * len(frame))]
        counts = " (" + frame["n"].astype(str) + "/" + frame["planned"].astype(str) + ")"
        frame["text"] += counts.where(frame["n"] < frame["planned"], "")
        frames[study.plan.study] = frame
    # Rows are variants and columns are studies.
    numbers = pd.concat({name: frame["mean"] for name, frame in frames.items()}, axis=1)
    complete = {name: f["mean"].where(f["n"] == f["planned"]) for name, f in frames.items()}
    signs = [-1 if study.plan.metric.goal == "max" else 1 for study in studies]
    ranks = (pd.concat(complete, axis=1) * signs).dropna().astype(float).rank()
    mean_ranks = (ranks if len(ranks) > 1 else ranks.iloc[:0]).mean(axis=1)
    ranked = {name: write_number(rank, ".2f") for name, rank in mean_ranks.items()}
    rows = []
    for variant in numbers.index:
        row = [Cell(variant)]
        for frame in frames.values():
            is_planned = variant in frame.index
            text, is_best = frame.loc[variant, ["text", "best"]] if is_planned else (NOTHING, False)
            row.append(Cell(text, is_bold=bool(is_best)))
        rows.append([*row, Cell(ranked.get(variant, NOTHING))])
    headings = [*(f"{s.plan.study}: {s.plan.metric.label}" for s in studies), "mean rank"]
    tested = ""
    if len(studies) > 1 and len(ranks) > 2:
        p, critical = stats.friedman_nemenyi(ranks.to_numpy().T, ALPHA)
        tested = " " + fill(SENTENCES["friedman"], p=format_p(p), alpha=ALPHA, critical=critical)
    table = named_table("across", rows, headings, complete=len(ranks), test=tested)
    table.notes.extend(describe_origin(study.plan) for study in studies)
    if len(studies) < FEW:
        table.warnings.append(fill(SENTENCES["few_studies"], count=len(studies), few=FEW))
    section, title = Section(tables=[table]), table.title.rstrip(".")
    page = reports / "across.html"
    write_atomic(page.with_suffix(".csv"), to_csv(numbers.rename_axis("variant").reset_index()))
    write_atomic(page.with_suffix(".md"), to_markdown(table))
    write_atomic(page.with_suffix(".tex"), to_latex(table, "across"))
    write_atomic(page, render_page(title, [section], [], warnings=table.warnings))
    return page
