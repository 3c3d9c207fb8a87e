"""Pages of papers from smoke runs, and from records that lead to errors."""

from pathlib import Path

import pytest
from helpers.invented_papers import FOLDER, run_invented

from lit_attn.papers.page import write_paper
from lit_attn.papers.source import read_paper
from lit_attn.report.__main__ import main
from lit_attn.schema.mistakes import EXIT_CODE

pytestmark = pytest.mark.usefixtures("no_rendering")

NOTE = "smoke run: every cell has trained for one step"


def value(name: str, seed: int) -> float:
    return 0.8 + 0.01 * seed + 0.1 * (name == "belief")


@pytest.mark.slow
@pytest.mark.parametrize("size", ["embedded", ""])
def test_the_page_of_a_paper_has_no_value_of_a_smoke_run(tmp_path: Path, size: str) -> None:
    pages = {}
    for is_smoke in (False, True):
        runs = tmp_path / f"runs-{is_smoke}"
        run_invented(runs, "beliefformer", ["3"], value, size, seeds=2, smoke=is_smoke)
        source = read_paper("beliefformer", size, FOLDER)
        page = write_paper(source, runs, tmp_path / f"reports-{is_smoke}")
        pages[is_smoke] = page.with_name("index.md").read_text("utf-8")
        table = page.with_name("table-3.csv").read_text("utf-8").splitlines()
        values = [line.rpartition(",")[2] for line in table[1:]]
        assert any(values) != is_smoke
    assert NOTE in pages[True]
    assert NOTE not in pages[False]
    assert "n=2" not in pages[True]
    assert "n=2" in pages[False]
    titles = {}
    for is_smoke, page in pages.items():
        titles[is_smoke] = next(line for line in page.splitlines() if "Claims of the" in line)
    assert " 0 agree, 0 disagree, 0 undecided" in titles[True]
    assert " 0 agree, 0 disagree, 0 undecided" not in titles[False]


def test_a_full_run_has_priority_over_a_smoke_run(tmp_path: Path) -> None:
    run_invented(tmp_path, "beliefformer", ["3"], lambda *_: 0.1, seeds=2, smoke=True)
    run_invented(tmp_path, "beliefformer", ["3"], lambda *_: 0.9, seeds=2)
    source = read_paper("beliefformer", "", FOLDER)
    page = write_paper(source, tmp_path, tmp_path / "reports").with_name("index.md")
    assert NOTE not in page.read_text("utf-8")
    assert "90.0" in page.read_text("utf-8")


def test_a_table_that_fails_leaves_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from lit_attn.papers import page as papers_page

    original = papers_page.make_tables

    def fail(source: object, item: object, records: object, caption: str) -> object:
        if caption.startswith("Table 2."):
            raise OverflowError("int too large\nto convert to float")
        return original(source, item, records, caption)

    monkeypatch.setattr(papers_page, "make_tables", fail)
    monkeypatch.chdir(FOLDER.parents[1])
    reports = tmp_path / "reports"
    run_invented(tmp_path / "runs", "beliefformer", ["3"], value, "embedded", seeds=2)
    arguments = [str(tmp_path / "runs"), "--paper", "beliefformer", "--small"]
    assert main([*arguments, "--reports", str(reports)]) == EXIT_CODE
    folder = reports / "paper-beliefformer-small"
    assert (folder / "table-3.csv").exists()
    assert not (folder / "table-2.csv").exists()
    assert "not drawn: see the warnings" in (folder / "index.md").read_text("utf-8")
    (warning,) = caplog.messages
    assert "Table 2: this is a mistake of lit_attn (OverflowError" in warning
    assert "\n" not in warning
