"""Committed records: a report reads them without training.

Another processor may write another twelfth digit (`helpers.processors`).
"""

import csv
import re
import tarfile
from pathlib import Path

import pytest
from helpers.paths import EXPERIMENTS, ROOT
from helpers.processors import COORDINATE, assert_same_text

from lit_attn.config.papers import read_paper
from lit_attn.report import write_reports
from lit_attn.report.papers_page import write_paper

EVIDENCE = ROOT / "reports" / "evidence"


def unpack(name: str, runs: Path) -> None:
    """Unpack the records of a folder of the evidence."""
    with tarfile.open(EVIDENCE / name / "records.tar.xz") as archive:
        archive.extractall(runs, filter="data")


@pytest.mark.slow
@pytest.mark.parametrize("folder", sorted(EVIDENCE.glob("paper-*")), ids=lambda path: path.name)
def test_the_records_of_a_page_have_its_values(folder: Path, tmp_path: Path) -> None:
    if not (folder / "records.tar.xz").is_file():
        pytest.skip("its records were not kept")
    paper, _, data = folder.name.removeprefix("paper-").partition("-small")
    # A page with real data repeats the studies that have no such data.
    for name in {f"paper-{paper}-small", folder.name}:
        unpack(name, tmp_path / "runs")
    source = read_paper(paper, "real" if data else "embedded", EXPERIMENTS / "papers")
    page = write_paper(source, tmp_path / "runs", tmp_path)
    for committed in folder.glob("table-*.csv"):
        drawn = page.with_name(committed.name)
        assert_same_text(drawn.read_text("utf-8"), committed.read_text("utf-8"))
    for committed in folder.glob("figure-*.svg"):
        drawn = page.with_name(committed.name)
        # The records of paper-mgk-small lack the attention of all seeds but the first.
        if not committed.name.endswith("-ranks.svg"):
            texts = (drawn.read_text("utf-8"), committed.read_text("utf-8"))
            assert_same_text(*texts, absolute=COORDINATE)


def test_the_page_of_results_has_the_verdicts_of_the_pages() -> None:
    row = re.compile(r"\]\(\.\./(reports/evidence/paper-\S+/index.md)\) \|(.*)\|")
    rows = row.findall((ROOT / "docs" / "results.md").read_text(encoding="utf-8"))
    assert len(rows) == 5
    for page, cells in rows:
        verdicts = zip(cells.split("|"), ("agree", "disagree", "undecided", "not run"), strict=True)
        totals = ", ".join(f"{number.strip()} {verdict}" for number, verdict in verdicts)
        assert f"Claims of the paper: {totals}." in (ROOT / page).read_text(encoding="utf-8"), page


def read_interval(cell: str) -> tuple[list[float], int, bool]:
    """Return [difference, low, high], their decimals, and whether the cell has a star."""
    numbers = re.findall(r"[+-]?[0-9]+\.[0-9]+", cell.replace("\N{MINUS SIGN}", "-"))
    decimals = len(numbers[0].partition(".")[2])
    return [float(number) for number in numbers], decimals, "*" in cell


def test_the_tables_of_results_have_the_numbers_of_the_evidence() -> None:
    """Differences with intervals and stars, at equal steps and at equal time."""
    text = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    section = re.compile(
        r"\[table\]\(\.\./reports/evidence/(\S+)/table\.md\)[^\n]*(?:\n[^|\n]+)*\n\n"
        r"(\| variant \|(?:.*\n)+?)\n"
    )
    compared = 0
    for study, table in section.findall(text):
        with (EVIDENCE / study / "table.csv").open(encoding="utf-8") as file:
            committed = {row["variant"]: row for row in csv.DictReader(file)}
        for line in table.splitlines()[2:]:
            name, *cells = line.strip("| ").split(" | ")
            variant = name.strip("`")
            for row_name, cell in ((variant, cells[0]), (f"{variant}@time", cells[1])):
                row = committed[row_name]
                numbers, decimals, has_star = read_interval(cell)
                expected = [float(row[key]) for key in ("difference", "low", "high")]
                rounding = 0.51 * 10**-decimals
                assert numbers == pytest.approx(expected, abs=rounding), (study, row_name)
                assert has_star == (row["significant"] == "True"), (study, row_name)
                compared += 1
    assert compared >= 40


@pytest.mark.slow
def test_the_records_of_studies_have_their_values_and_the_change(tmp_path: Path) -> None:
    folders = (path.parent.name for path in EVIDENCE.glob("*/records.tar.xz"))
    names = [name for name in folders if not name.startswith("paper-")]
    for name in names:
        unpack(name, tmp_path / "runs")
    write_reports(tmp_path / "runs", tmp_path)
    for name in names:
        written, committed = (f / name / "per_seed.csv" for f in (tmp_path, EVIDENCE))
        assert_same_text(written.read_text("utf-8"), committed.read_text("utf-8"))
    page = (tmp_path / "text-longer-tuned" / "table.html").read_text()
    assert "Change of each lead from text-tuned." in page
