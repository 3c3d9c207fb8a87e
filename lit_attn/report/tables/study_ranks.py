"""Tables across studies: values with mean ranks, and changes of leads from the first study."""

import math
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple, cast

import pandas as pd

from lit_attn.files import write_atomic
from lit_attn.report.figures import drawing, forest
from lit_attn.report.numbers import fill, round_number, write_number
from lit_attn.report.pages.page import Section, render_page
from lit_attn.report.records.skipped import LOG, Outcome, describe_failure
from lit_attn.report.records.study_record import StudyRecord
from lit_attn.report.statistics import stats
from lit_attn.report.statistics.significance import TESTS
from lit_attn.report.statistics.significance_base import Step
from lit_attn.report.tables.columns import (
    NOTHING,
    PRINTERS,
    Record,
    choose_digits,
    format_difference,
    format_number,
    format_p,
    make_scale,
)
from lit_attn.report.tables.formats import (
    Cell,
    Table,
    make_markdown_files,
    named_table,
    read_asset,
    to_csv,
    to_latex,
)
from lit_attn.report.tables.labels import find_labels
from lit_attn.report.tables.results import SENTENCES, describe_origin
from lit_attn.report.tables.summary import make_variant_frame
from lit_attn.report.verdicts.comparison import compare_variants
from lit_attn.report.verdicts.floors import warn_of_floors
from lit_attn.schema.errors import ConfigError

FEW = 6  # Number of studies below which a test of mean ranks has little power.


class Entry(NamedTuple):
    """A study of the table: its frame of variants, by name, with the text of each mean."""

    study: StudyRecord
    frame: pd.DataFrame


class Forest(NamedTuple):
    """Combined differences of the variants as a table, and their forest plot as SVG and PNG."""

    table: Table
    image: dict[str, bytes]


def write_across(studies: Iterable[StudyRecord], reports: Path) -> Outcome:
    """Write `across.html`, `.md`, `.tex` and `.csv`, and a forest plot as `.svg` and `.png`.

    Variants with all planned seeds in every study have ranks. A study whose records lead to an
    error is skipped with a warning. Raises ConfigError if no study is left.
    """
    entries = []
    skipped = []
    for study in studies:
        try:
            entries.append(Entry(study, _make_frame(study)))
        except Exception as error:
            LOG.warning("%s: %s. This study is skipped.", study.plan.study, describe_failure(error))
            skipped.append(study.plan.study)
    if not entries:
        raise ConfigError(f"{reports}: no study could be read; the warnings have the reasons")
    ranks = _rank_variants(entries)
    centers = {entry.study.plan.study: entry.frame["center"] for entry in entries}
    values = pd.concat(centers, axis=1)
    table = _make_table(entries, ranks, list(values.index))
    page = reports / "across.html"
    _write_tables(table, values, page)
    _write_page(table, entries, page)
    return Outcome([page], skipped)


def _write_tables(table: Table, values: pd.DataFrame, page: Path) -> None:
    """Write the table beside `page` as Markdown and LaTeX, and all means and medians as CSV."""
    write_atomic(page.with_suffix(".csv"), to_csv(values.rename_axis("variant").reset_index()))
    for name, text in make_markdown_files(table, "across").items():
        write_atomic(page.parent / name, text)
    write_atomic(page.with_suffix(".tex"), to_latex(table, "across", "across.full.md"))


def _write_page(table: Table, entries: list[Entry], page: Path) -> None:
    """Write the page, with the combined differences if there are some, and their plot beside it."""
    tables = [table]
    images: dict[str, dict[str, bytes]] = {}
    comparable = _select_comparable(entries)
    combined = _combine_studies(comparable)
    if combined is not None:
        tables.append(combined.table)
        images["across"] = combined.image
        for kind, content in combined.image.items():
            write_atomic(page.with_suffix(f".{kind}"), content)
    if comparable:
        changes = _make_changes_table(comparable)
        if changes.rows:
            tables.append(changes)
    html = render_page(
        table.title.rstrip("."),
        [Section(figures=list(images), tables=tables)],
        [],
        warnings=table.warnings,
        images=images,
        captions={"across": read_asset("tables.yaml")["forest"]["figure"]},
    )
    write_atomic(page, html)


def _select_comparable(entries: list[Entry]) -> list[Entry]:
    """Return the studies with means, and with the metric of the first of them.

    Differences in other metrics have other units.
    """
    with_means = [entry for entry in entries if entry.study.test.has_means]
    if not with_means:
        return []
    first = with_means[0].study.plan.metric
    comparable = []
    for entry in with_means:
        metric = entry.study.plan.metric
        if (metric.label, metric.goal, metric.scale) == (first.label, first.goal, first.scale):
            comparable.append(entry)
    return comparable


def _make_changes_table(entries: list[Entry]) -> Table:
    """Return how the lead of each variant over its baseline differs from that in the first study.

    The change is paired by seed if both studies have the same seeds; otherwise its interval is
    Welch's.
    """
    first = entries[0].study
    labels = _find_labels(entries)
    changes = []
    leads = []
    for variant in first.plan.variants:
        before = _find_lead(first, variant.name)
        for study, _ in entries[1:]:
            after = _find_lead(study, variant.name)
            is_baseline = variant.name in (first.plan.baseline, study.plan.baseline)
            if is_baseline or before.empty or after.empty:
                continue
            test = TESTS["seed" if set(before.index) == set(after.index) else "none"]
            leads_by_seed = [dict(zip(lead.index, lead, strict=True)) for lead in (after, before)]
            sample = test.make_sample(*leads_by_seed)
            interval = test.find_interval(sample, 1 - stats.ALPHA, Step(study.resolution))
            changes.append((labels[variant.name], study.plan.study, before, after, interval))
            leads += [before, after]
    spreads = pd.Series([lead.std() for lead in leads], dtype=float)
    digits = choose_digits(spreads, pd.Series([lead.mean() for lead in leads], dtype=float))
    rows = []
    for label, name, before, after, interval in changes:
        low, high = (None, None) if interval is None else (interval.low, interval.high)
        change = after.mean() - before.mean()
        texts = [
            label,
            name,
            _describe_lead(before, digits),
            _describe_lead(after, digits),
            format_difference(change, low, high, f".{digits}f"),
        ]
        rows.append([Cell(text) for text in texts])
    return named_table("changes", rows, first=first.plan.study)


def _find_lead(study: StudyRecord, variant: str) -> "pd.Series[float]":
    """Return the differences of a variant to the baseline of its study, by seed."""
    values = pd.Series(study.values(variant), dtype=float)
    baseline = pd.Series(study.values(study.plan.baseline), dtype=float)
    return (values - baseline).dropna()


def _describe_lead(lead: "pd.Series[float]", digits: int) -> str:
    """Return the mean of a lead and its number of seeds, as "+0.31 (5)"."""
    return f"{format_number(lead.mean(), f'+.{digits}f')} ({len(lead)})"


def _combine_studies(entries: list[Entry]) -> Forest | None:
    """Return table and figure of the variants that two or more studies share, None without one."""
    if not entries:
        return None
    first = entries[0].study.plan.metric
    frames = {study.plan.study: frame for study, frame in entries}
    effects = forest.read_effects(frames)
    if not effects:
        return None
    labels = _find_labels(entries)
    with drawing.appearance():
        image = drawing.render(forest.draw_forest(effects, labels, first))
    return Forest(forest.make_forest_table(effects, labels), image)


def _find_labels(entries: list[Entry]) -> dict[str, str]:
    """Return the labels of variants by name; the first study decides on a label."""
    labels: dict[str, str] = {}
    for study, _ in reversed(entries):
        labels |= find_labels(study.plan)
    return labels


def _make_frame(study: StudyRecord) -> pd.DataFrame:
    """Return the frame of variants with the columns `center` and `text`.

    The center is the mean, or the median of times until an event. The text has its spread, or the
    number of runs with the event, and the missing seeds.
    """
    frame = make_variant_frame(study, compare_variants(study))
    scale = make_scale(frame)
    has_means = study.test.has_means
    texts = []
    for record in cast("list[Record]", frame.to_dict("records")):
        text = PRINTERS["value"](record | {"test": study.test}, scale)
        if not has_means and record["n"]:
            text += f" ({PRINTERS['reached'](record, scale)})"
        n, planned = record["n"], record["planned"]
        texts.append(text if n == planned else f"{text} ({n}/{planned})")
    center = frame["mean" if has_means else "median"]
    return frame.assign(center=center, text=texts).set_index("variant")


def _rank_variants(entries: list[Entry]) -> pd.DataFrame:
    """Return the rank of each variant with all planned seeds in every study, (variants, studies).

    Rank 1 is the best mean or median. A median that is not reached is worse than any other.
    """
    keys = {}
    for study, frame in entries:
        sign = -1 if study.plan.metric.goal == "max" else 1
        center = (sign * frame["center"]).astype(float).map(round_number)
        if not study.test.has_means:
            center = center.fillna(math.inf)
        keys[study.plan.study] = center.where(frame["n"] == frame["planned"])
    return pd.concat(keys, axis=1).dropna().rank()


def _make_table(entries: list[Entry], ranks: pd.DataFrame, variants: list[str]) -> Table:
    """Return one row for each variant: its mean or median in all studies, and its mean rank."""
    # A single variant has no rank.
    mean_ranks = ranks.mean(axis=1).to_dict() if len(ranks) > 1 else {}
    labels = _find_labels(entries)
    rows = []
    for variant in variants:
        row = [Cell(labels[variant])]
        for _, frame in entries:
            if variant in frame.index:
                text = str(frame.loc[variant, "text"])
                is_bold = bool(frame.loc[variant, "best"] and frame.loc[variant, "significant"])
                row.append(Cell(text, is_bold=is_bold))
            else:
                row.append(Cell(NOTHING))
        is_ranked = variant in mean_ranks
        row.append(Cell(write_number(mean_ranks[variant], ".2f") if is_ranked else NOTHING))
        rows.append(row)
    plans = [entry.study.plan for entry in entries]
    headings = [*(f"{plan.study}: {plan.metric.label}" for plan in plans), "mean rank"]
    test = ""
    if len(entries) > 1 and len(ranks) > 2:
        p, critical = stats.friedman_nemenyi(ranks.to_numpy().T, stats.ALPHA)
        test = " " + fill(
            SENTENCES["friedman"], p=format_p(p), alpha=stats.ALPHA, critical=critical
        )
    has_medians = not all(entry.study.test.has_means for entry in entries)
    medians = " " + SENTENCES["medians"] if has_medians else ""
    table = named_table("across", rows, headings, complete=len(ranks), medians=medians, test=test)
    table.notes.extend(describe_origin(plan) for plan in plans)
    table.warnings.extend(warn_of_floors(entry.study for entry in entries))
    if len(entries) < FEW:
        table.warnings.append(fill(SENTENCES["few_studies"], count=len(entries), few=FEW))
    return table
