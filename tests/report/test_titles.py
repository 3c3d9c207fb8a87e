"""Titles of studies in the tables of their reports."""

from pathlib import Path

import pytest
from helpers.fake_study import write_study

from lit_attn.report import write_reports

pytestmark = pytest.mark.usefixtures("no_rendering")


@pytest.mark.parametrize(
    ("title", "heading"),
    [("A study", "A study."), ("Ends..", "Ends."), ("Which is best?", "Which is best?")],
)
def test_the_title_of_a_table_is_one_sentence(tmp_path: Path, title: str, heading: str) -> None:
    write_study(tmp_path / "runs", variants={"standard": 0.0}, title=title)
    write_reports(tmp_path / "runs", tmp_path / "reports")
    (table,) = tmp_path.glob("reports/*/table.md")
    assert f"\n**{heading}**\n" in table.read_text()
