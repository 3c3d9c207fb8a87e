"""Index of a folder of reports: one row for each study, with its numbers and its verdicts.

A family of hypotheses is the sealed studies of one file in one folder of runs that have enough
seeds for a star. The p values of a family are corrected for its number of studies, whether they
have a report or not. A study without a seal and a table of another program stand alone. A study
with fewer seeds, a trial, a second metric of the same cells and a report whose records are gone are
listed, and no verdict about them is given.
"""

import html
import itertools
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from lit_attn.cells.decisions import Seals
from lit_attn.cells.records import Origin
from lit_attn.report.pages.page import Section, render_page
from lit_attn.report.records.skipped import LOG
from lit_attn.report.statistics import stats
from lit_attn.report.statistics.significance import TESTS
from lit_attn.report.tables.columns import (
    NOTHING,
    choose_digits,
    format_difference,
    format_number,
    format_spread,
)
from lit_attn.report.tables.formats import Cell, named_table, read_csv
from lit_attn.report.verdicts.floors import BELOW_FLOOR, BELOW_FLOOR_WARNING
from lit_attn.schema.errors import ConfigError

INDEX_COLUMNS = [
    "variant",
    "n",
    "planned",
    "mean",
    "sd",
    "difference",
    "low",
    "high",
    "significant",
]
PHONE = (0, 2, 3)
"""Places of the columns of a narrow screen."""
MOST_NAMED = 6
"""Largest number of variants that a cell of the index names."""


class Entry(NamedTuple):
    """A report: its page, its frame of variants, and the folder of its records (None: a table)."""

    page: Path
    frame: pd.DataFrame
    records: Path | None

    @property
    def name(self) -> str:
        """Name of the study."""
        return self.page.parent.name


class Family(NamedTuple):
    """The sealed studies of one file, and the studies among them with a second metric."""

    file: str
    studies: list[str]
    second_metrics: dict[str, str]


class Correction(NamedTuple):
    """Corrected p by place of the variant, and the words about what they are corrected for."""

    p_values: Mapping[Any, float]
    words: str


def make_index_page(reports: Path) -> str:
    """Return a page that lists all studies in `reports` by name, read from their own files.

    A variant differs from its baseline if it has a star in its study and its p is still at most
    ALPHA after the correction over the studies of its family.
    """
    entries = _read_entries(reports)
    corrections = _correct(entries)
    rows = [_make_row(entry, corrections[entry.name]) for entry in entries]
    for page in sorted(reports.glob("*/scaling.html")):
        link = f"{page.parent.name}/scaling.html"
        rows.append([Cell(page.parent.name, link=link), Cell("Scaling"), *[Cell("")] * 6])
    table = replace(named_table("index", rows, alpha=stats.ALPHA), phone=PHONE)
    return render_page("Studies", [Section(tables=[table])], [])


def _read_entries(reports: Path) -> list[Entry]:
    """Return the reports in a folder by name; a folder without a table of ours is left out."""
    entries = []
    for page in sorted(reports.glob("*/table.html")):
        try:
            frame = read_csv(page.with_name("table.csv"))
            _require_columns(frame)
        except (OSError, ValueError) as error:
            LOG.warning("%s: is not a report and is left out of the index: %s", page.parent, error)
            continue
        # Several looks at the results of a study leave a smaller level.
        frame["p_adjusted"] *= stats.ALPHA / frame.get("level", stats.ALPHA)
        frame["variant"] = frame.get("label", frame["variant"])
        frame = frame[[*INDEX_COLUMNS, "p_adjusted"]]
        origin = Origin.read_valid(page.with_name("origin.json"))
        folder = None
        if origin is not None:
            folder = Path(os.path.normpath(page.parent.resolve() / origin.file))
        entries.append(Entry(page, frame, folder))
    return entries


def _require_columns(frame: pd.DataFrame) -> None:
    """Raise ConfigError if a table.csv lacks a column that the index reads."""
    missing = [name for name in (*INDEX_COLUMNS, "p_adjusted") if name not in frame]
    if missing:
        raise ConfigError(f"table.csv has no column {', '.join(missing)}")


def _correct(entries: Sequence[Entry]) -> dict[str, Correction]:
    """Return the correction of every report, by name of the study."""
    p_values: dict[str, dict[int, float]] = {}
    for entry in entries:
        column = entry.frame["p_adjusted"].dropna()
        p_values[entry.name] = dict(zip(column.index.tolist(), column.tolist(), strict=True))
    corrections: dict[str, Correction] = {}
    for entry in entries:
        name = entry.name
        if entry.records is None:
            corrections[name] = Correction(p_values[name], "its own study alone")
        elif not (entry.records / "plan.json").exists():
            corrections[name] = Correction({}, "no verdict: its records are gone")
        elif "@" in entry.records.name:
            corrections[name] = Correction({}, "no verdict: a trial")
        elif _has_damaged_seal(entry.records):
            corrections[name] = Correction({}, "no verdict: its seals.json cannot be read")
        elif not _is_sealed(entry.records):
            corrections[name] = Correction(p_values[name], "its own study alone")
        elif not _has_enough_seeds(entry.records):
            corrections[name] = Correction({}, "no verdict: too few seeds for a star")
        else:
            family = _read_family(entry.records)
            primary = family.second_metrics.get(entry.records.name)
            if primary is None:
                corrections[name] = _correct_in_family(entry, family, entries, p_values)
            else:
                words = f"no verdict: a second metric of the cells of {primary}"
                corrections[name] = Correction({}, words)
    return corrections


def _correct_in_family(
    entry: Entry, family: Family, entries: Sequence[Entry], p_values: dict[str, dict[int, float]]
) -> Correction:
    """Return the correction of a study over its family; a study without a report has p = 1."""
    assert entry.records is not None
    reported = {other.records: list(p_values[other.name].values()) for other in entries}
    ordered = [entry.name, *(name for name in family.studies if name != entry.records.name)]
    studies = [reported.get(entry.records.with_name(name), [1.0]) for name in ordered]
    studies[0] = list(p_values[entry.name].values())
    corrected = stats.holm_over_studies(studies)[0]
    count = len(family.studies)
    words = "1 study" if count == 1 else f"{count} studies"
    by_place = dict(zip(p_values[entry.name], corrected, strict=True))
    return Correction(by_place, f"the {words} of {family.file}")


def _read_family(folder: Path) -> Family:
    """Return the sealed studies in the folder of runs whose file is that of the study `folder`."""
    file = _read_file(folder)
    studies = []
    for seal in sorted(folder.parent.glob("*/seals.json")):
        study = seal.parent
        is_of_file = "@" not in study.name and _read_file(study) == file
        is_planned = (study / "plan.json").exists() and _is_sealed(study)
        if is_of_file and is_planned and _has_enough_seeds(study):
            studies.append(study)
    second_metrics: dict[str, str] = {}
    primary_studies: dict[str, set[str]] = {}
    for study in sorted(studies, key=_find_first_seal):
        identities = _read_identities(study)
        for primary, others in primary_studies.items():
            if identities and identities <= others:
                second_metrics[study.name] = primary
                break
        else:
            primary_studies[study.name] = identities
    names = [study.name for study in studies if study.name not in second_metrics]
    shown = Path(file).name if file else "the folder of runs"
    return Family(shown, names, second_metrics)


def _is_sealed(folder: Path) -> bool:
    return Seals.read_valid(folder / "seals.json") is not None


def _has_enough_seeds(folder: Path) -> bool:
    """Return True if the last plan of a sealed study has enough seeds for a star."""
    seals = Seals.read_valid(folder / "seals.json")
    if seals is None:
        return False
    test = TESTS[seals.entries[-1].metric.pairs]
    return len(seals.seeds) >= test.find_fewest(stats.ALPHA)


def _has_damaged_seal(folder: Path) -> bool:
    return (folder / "seals.json").exists() and not _is_sealed(folder)


def _find_first_seal(folder: Path) -> tuple[str, str]:
    """Return the time of a study's first seal, and its name."""
    seals = Seals.read_valid(folder / "seals.json")
    return ("" if seals is None else seals.entries[0].time, folder.name)


def _read_file(folder: Path) -> str:
    """Return the file of studies that a study's folder belongs to, "" if that is not recorded."""
    origin = Origin.read_valid(folder / "origin.json")
    return "" if origin is None else origin.file


def _read_identities(folder: Path) -> set[str]:
    """Return the identities of the cells of a plan; none of a plan that cannot be read."""
    try:
        cells = json.loads((folder / "plan.json").read_text(encoding="utf-8"))["cells"]
        return {f"{cell['identity']}" for cell in cells}
    except (OSError, ValueError, LookupError, TypeError) as error:
        LOG.warning("%s: unreadable and skipped: %s", folder / "plan.json", error)
        return set()


def _make_row(entry: Entry, correction: Correction) -> list[Cell]:
    """Return the row of a study: its size, its values, and the variants that differ."""
    frame = entry.frame
    digits = choose_digits(frame["sd"], frame["mean"])
    page = entry.page.read_text(encoding="utf-8")
    title = re.search("<title>(.*)</title>", page)
    mark = f" {BELOW_FLOOR}" if BELOW_FLOOR_WARNING in page else ""
    fewest, most = int(frame["n"].min()), int(frame["n"].max())
    # Only the baseline has no difference, unless no seed of a variant has a pair.
    differences = {}
    baseline = NOTHING
    for place, row in frame.iterrows():
        if not pd.isna(row["difference"]):
            text = format_difference(row["difference"], row["low"], row["high"], f".{digits}f")
            differences[place] = f"{row['variant']} {text}"
        elif baseline == NOTHING and pd.isna(row["p_adjusted"]):
            baseline = _describe_baseline(row, digits)
    largest = NOTHING
    if differences:
        sizes = frame["difference"].abs()
        largest = differences[sizes.idxmax()]
    differing = []
    for place, p in correction.p_values.items():
        if frame.loc[place, "significant"] and p <= stats.ALPHA:
            # A median that is not reached has no difference.
            differing.append(differences.get(place, frame.loc[place, "variant"]))
    texts = [
        html.unescape(title[1]) if title else "",
        _name_first(differing) + mark if correction.p_values else NOTHING,
        largest,
        baseline + mark,
        str(most) if fewest == most else f"{fewest} to {most}",
        f"{frame['n'].sum()} / {frame['planned'].sum()}",
        correction.words,
    ]
    return [Cell(entry.name, link=f"{entry.name}/table.html"), *map(Cell, texts)]


def _describe_baseline(row: "pd.Series[Any]", digits: int) -> str:
    """Return the name of the baseline with its mean, or the median of its times until an event."""
    median = row.get("median")
    if not pd.isna(row["mean"]):
        return f"{row['variant']} {format_spread(row['mean'], row['sd'], digits)}"
    if median is not None and not pd.isna(median):
        return f"{row['variant']} {format_number(median, 'g')}"
    return NOTHING


def _name_first(texts: Sequence[str]) -> str:
    """Return the first texts, and the number of the others."""
    if not texts:
        return "none"
    named = list(itertools.islice(texts, MOST_NAMED))
    if len(texts) > MOST_NAMED:
        named.append(f"{len(texts) - MOST_NAMED} more")
    return "; ".join(named)
