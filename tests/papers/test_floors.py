"""Floors on the pages of papers: rows of tables, warnings, marks of claims, and their table."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers.invented_papers import FOLDER, draw, run_invented

from lit_attn.cells.floors import Floors, FloorValues
from lit_attn.papers.page import make_claims_table, write_paper
from lit_attn.papers.published import read_records
from lit_attn.papers.source import read_paper
from lit_attn.report.tables.formats import Table

pytestmark = pytest.mark.usefixtures("no_rendering")

WARNING = "Below its floor: standard has accuracy (%) 80.2, and 1 nearest neighbour 90 without"


def write_floors(runs: Path, study: str, **values: dict[str, float]) -> None:
    """Write the floors of a study: the values by metric of each split, and a worse rule."""
    floors = []
    for split, by_metric in values.items():
        for rule in ("frequent class", "1 nearest neighbour"):
            factor = 1.0 if rule == "1 nearest neighbour" else 0.5
            scaled = {name: factor * value for name, value in by_metric.items()}
            conditions = f"10 samples of {split}"
            floor = FloorValues(rule=rule, split=split, values=scaled, conditions=conditions)
            floors.append(floor)
    Floors(data="d", floors=floors).write(runs / study / "floors.json")


def floor_rows(table: Table) -> list[list[str]]:
    """Return the rows of floors as texts."""
    rows = [[cell.text for cell in row] for row in table.rows]
    return [row for row in rows if row[0].startswith("floor")]


def near(mean: float, lead: float = 0.0) -> Callable[[str, int], float]:
    """Return values near `mean`, with a lead of all variants but the baseline."""
    return lambda name, seed: mean + 0.001 * seed + lead * (name != "standard")


@pytest.mark.parametrize(("floor", "is_below"), [(0.9, True), (0.7, False)])
def test_a_table_has_the_row_of_its_floor_and_a_mark_below_it(
    tmp_path: Path, floor: float, is_below: bool
) -> None:
    run_invented(tmp_path, "attentionx", ["1"], near(0.8), "embedded")
    before = draw(tmp_path, "attentionx", "1", "embedded")[-1]
    assert floor_rows(before) == []
    assert before.warnings == []
    write_floors(tmp_path, "small-attentionx-images", test={"accuracy": floor})
    table = draw(tmp_path, "attentionx", "1", "embedded")[-1]
    text = f"{100 * floor:.2f}"
    assert floor_rows(table) == [["floor: 1 nearest neighbour", text, text]]
    assert table.rows[: len(before.rows)] == before.rows
    assert any("a rule without attention reaches" in note for note in table.notes)
    assert [WARNING in warning for warning in table.warnings] == [True] * is_below


def test_each_study_of_a_table_has_its_row(tmp_path: Path) -> None:
    run_invented(tmp_path, "attentionx", ["1"], near(0.8), "real")
    write_floors(tmp_path, "small-attentionx-images", test={"accuracy": 0.9})
    write_floors(tmp_path, "small-attentionx-images-data", test={"accuracy": 0.5})
    table = draw(tmp_path, "attentionx", "1", "real")[-1]
    assert floor_rows(table) == [
        ["floor of small-attentionx-images: 1 nearest neighbour", "90.00", "90.00"],
        ["floor of small-attentionx-images-data: 1 nearest neighbour", "50.00", "50.00"],
    ]
    assert len(table.warnings) == 1
    assert table.warnings[0].startswith(f"small-attentionx-images: {WARNING}")


def test_a_column_has_the_floor_of_its_split_and_a_mean_has_none(tmp_path: Path) -> None:
    """Table 3 of MGK has two splits; the mean in Table 1 is that of several studies."""
    run_invented(tmp_path, "mgk", ["1", "3"], lambda name, seed: 0.3 + seed / 100)
    rule = {"perplexity": 44.0, "bits_per_byte": 0.1}
    write_floors(tmp_path, "mgk-wikitext103", val=rule, test={"perplexity": 60.0})
    write_floors(tmp_path, "mgk-listops", test={"accuracy": 0.4})
    # Lower is better, so the rule with half of the perplexity is the best one.
    assert floor_rows(draw(tmp_path, "mgk", "3")[-1]) == [
        ["floor: frequent class", "22.00", "30.00"]
    ]
    assert floor_rows(draw(tmp_path, "mgk", "1")[-1]) == [
        ["floor: 1 nearest neighbour", "40.00", "", "", ""]
    ]


def test_times_and_counts_have_no_floor(tmp_path: Path) -> None:
    run_invented(tmp_path, "beliefformer", ["1", "3"], near(0.8))
    for study in ("beliefformer-cifar10", "beliefformer-imagenet-time"):
        write_floors(tmp_path, study, test={"accuracy": 0.9}, val={"accuracy": 0.9})
    assert floor_rows(draw(tmp_path, "beliefformer", "1")[-1]) == []
    (row,) = floor_rows(draw(tmp_path, "beliefformer", "3")[-1])
    shown = [text for text in row[1:] if text]
    # Three rows stand side by side, each with accuracy and time.
    assert shown == ["90.00"] * 3
    assert len(row) == 7


def test_a_claim_about_a_study_below_its_floor_is_marked(tmp_path: Path) -> None:
    run_invented(tmp_path, "attentionx", ["1"], near(0.8, lead=0.05), "embedded")
    source = read_paper("attentionx", "embedded", FOLDER)
    items = {"1": source.paper.tables["1"]}

    def judge() -> tuple[list[str], Table]:
        records = read_records(source, items.values(), tmp_path)
        table = make_claims_table(source, items, records)
        return [row[-1].text for row in table.rows], table

    write_floors(tmp_path, "small-attentionx-images", test={"accuracy": 0.5})
    verdicts, table = judge()
    assert verdicts == ["agree", "not measured"]
    assert table.rows[0][-1].is_bold
    write_floors(tmp_path, "small-attentionx-images", test={"accuracy": 0.9})
    verdicts, table = judge()
    assert verdicts == ["agree (below its floor)", "not measured"]
    assert not table.rows[0][-1].is_bold
    assert "1 agree" in table.title, "the mark changes no count"


def test_a_claim_about_a_time_has_no_mark(tmp_path: Path) -> None:
    run_invented(tmp_path, "beliefformer", ["1"], near(0.8), "embedded")
    source = read_paper("beliefformer", "embedded", FOLDER)
    items = {"1": source.paper.tables["1"]}
    write_floors(tmp_path, "small-beliefformer-images-time", test={"accuracy": 0.9})
    records = read_records(source, items.values(), tmp_path)
    for row in make_claims_table(source, items, records).rows:
        assert "floor" not in row[-1].text


def test_a_page_lists_its_floors_and_marks_its_figures(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    run_invented(runs, "attentionx", [], near(0.8), "embedded")
    source = read_paper("attentionx", "embedded", FOLDER)
    page = write_paper(source, runs, tmp_path).with_name("index.md")
    assert "## Floors" not in page.read_text("utf-8")
    write_floors(runs, "small-attentionx-images", test={"accuracy": 0.5})
    write_floors(runs, "small-attentionx-text", val={"loss": 0.25})
    table = write_paper(source, runs, tmp_path).with_name("table-1.csv").read_text("utf-8")
    assert "floor" not in table, "the file has the values of seeds only"
    text = page.read_text("utf-8")
    floors = text.partition("## Floors")[2].partition("\n## ")[0]
    lines = {line.split(" | ")[0].strip("| "): line for line in floors.splitlines() if "|" in line}
    assert lines["small-attentionx-images"].endswith("| above |")
    assert lines["small-attentionx-text"].endswith("| **below** |")
    assert "frequent class (10 samples of val)" in lines["small-attentionx-text"]
    assert "reaches: 1 of 2." in floors
    warning = "small-attentionx-text: Below its floor"
    (figure,) = re.findall(r"!\[Figure 1\..*", text)
    assert warning in figure
    assert text.index(f"**{warning}") < text.index("## Claims")
    html = page.with_name("index.html").read_text("utf-8")
    assert html.count(warning) >= 2
    latex = page.with_name("table-1.tex").read_text("utf-8")
    assert "floor: 1 nearest neighbour" in latex
