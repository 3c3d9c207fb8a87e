"""Images that cells have left out are counted and named once in the warnings of a table."""

from pathlib import Path

import pytest
from helpers.fake_study import report, write_study

from lit_attn.cells.rows import csv_lines, read_unreadable

pytestmark = pytest.mark.usefixtures("no_rendering")

ROWS = [("train", f"n0/{number}.png", "is empty") for number in range(7)]


def test_images_that_were_left_out_are_counted_and_named(tmp_path: Path) -> None:
    folder = write_study(tmp_path / "runs")
    cells = sorted(path.parent for path in folder.rglob("result.json"))
    (cells[0] / "unreadable-0.csv").write_text(csv_lines(ROWS[:4]))
    (cells[0] / "unreadable-1.csv").write_text(csv_lines(ROWS[3:]) + "test,torn li")
    (cells[1] / "unreadable-0.csv").write_text(csv_lines([("test", "n1/0.png", "is empty")]))
    assert [entry.image for entry in read_unreadable(cells[0])] == [row[1] for row in ROWS]
    text = (report(tmp_path) / "table.full.md").read_text()
    names = ", ".join(row[1] for row in ROWS[:5])
    assert (
        f"Images that could not be read were left out in 2 of {len(cells)} results: 7 of train "
        f"({names} and 2 more) and 1 of test (n1/0.png)."
    ) in text


def test_a_study_without_such_images_has_no_warning(tmp_path: Path) -> None:
    write_study(tmp_path / "runs")
    assert "could not be read" not in (report(tmp_path) / "table.full.md").read_text()
