"""Committed records: a report reads them without training.

The floors of the small studies of papers stand beside their archives.

Another processor may write another twelfth digit (`helpers.processors`).
"""

import re
import shutil
import tarfile
from pathlib import Path

import pytest
from helpers.paths import EXPERIMENTS, ROOT
from helpers.processors import COORDINATE, assert_same_text

from lit_attn.papers.page import write_paper
from lit_attn.papers.source import read_paper
from lit_attn.report.records.read import read_studies
from lit_attn.report.tables.formats import rows_to_csv
from lit_attn.report.tables.labels import label_study
from lit_attn.report.tables.study_ranks import write_across
from lit_attn.report.tables.summary import list_cells

EVIDENCE = ROOT / "reports" / "evidence"


def unpack(name: str, runs: Path) -> None:
    """Unpack the records of a folder of the evidence."""
    with tarfile.open(EVIDENCE / name / "records.tar.xz") as archive:
        archive.extractall(runs, filter="data")
    floors = EVIDENCE / name / "floors"
    if floors.is_dir():
        shutil.copytree(floors, runs, dirs_exist_ok=True)


def list_floors(page: Path) -> list[str]:
    """Return the lines of the table of floors, and the rows and warnings of all tables."""
    lines = page.read_text("utf-8").splitlines()
    pattern = r"\| (floor|small-)|\*\*Warning: .*Below its floor|\(below its floor\) \|$"
    return [line for line in lines if re.search(pattern, line)]


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
    floors = list_floors(folder / "index.md")
    assert list_floors(page.with_name("index.md")) == floors
    assert len(floors) >= 2
    for committed in folder.glob("table-*.csv"):
        drawn = page.with_name(committed.name)
        assert_same_text(drawn.read_text("utf-8"), committed.read_text("utf-8"))
    for committed in folder.glob("figure-*.svg"):
        drawn = page.with_name(committed.name)
        # The records of paper-mgk-small lack the attention of all seeds but the first.
        if not committed.name.endswith("-ranks.svg"):
            texts = (drawn.read_text("utf-8"), committed.read_text("utf-8"))
            assert_same_text(*texts, absolute=COORDINATE)


@pytest.mark.slow
def test_the_records_of_studies_have_their_values_and_the_change(tmp_path: Path) -> None:
    folders = (path.parent.name for path in EVIDENCE.glob("*/records.tar.xz"))
    names = [name for name in folders if not name.startswith("paper-")]
    for name in names:
        unpack(name, tmp_path / "runs")
    for study in read_studies(tmp_path / "runs", names):
        committed = EVIDENCE / study.plan.study / "per_seed.csv"
        # Whole reports would spend their time on figures, which no line here compares.
        written = rows_to_csv(list_cells(label_study(study)))
        assert_same_text(written, committed.read_text("utf-8"))
    write_across(read_studies(tmp_path / "runs", ["text-tuned", "text-longer-tuned"]), tmp_path)
    assert "+0.058 [+0.043, +0.073]" in (tmp_path / "across.html").read_text()
