"""Brief tables: six columns and six sentences, and the files and keys that lead to the others."""

import re
from pathlib import Path

import pytest
from helpers import studies
from helpers.fake_study import EFFECTS, report, write_study

from lit_attn.ablate.plan import expand
from lit_attn.report.tables.captions import shorten, split_sentences
from lit_attn.report.tables.formats import (
    MOST_COLUMNS,
    Cell,
    Table,
    make_markdown_files,
    read_asset,
    to_latex,
)
from lit_attn.report.tables.terminal import FILE_SCREEN, Column, draw_table
from lit_attn.schema.errors import ConfigError
from lit_attn.tasks.metrics import DEFAULT_METRIC

pytestmark = pytest.mark.usefixtures("no_rendering")

HEADINGS = ["variant", "accuracy (%)", "n", r"difference \[95 %\]", "p", "ms / step"]


def read_headings(path: Path) -> list[str]:
    """Return the headings of a Markdown table."""
    first, *_ = path.read_text().splitlines()
    return first.strip("| ").split(" | ")


def count_sentences(path: Path) -> int:
    """Return the number of sentences below the title of a Markdown table."""
    _, _, caption = path.read_text().rpartition("**\n")
    return len(split_sentences(caption))


def test_the_captions_of_a_papers_page_have_at_most_six_sentences() -> None:
    """Captions of a paper have no short form, so all of their sentences are on the page."""
    tables = read_asset("tables.yaml")
    for caption in (tables["claims"]["note"], *tables["paper"].values()):
        assert 1 <= len(split_sentences(caption)) <= 6, caption


def test_tables_have_six_columns_and_six_sentences(tmp_path: Path) -> None:
    write_study(tmp_path / "runs", seeds=6, parity="someone/code, losses within 1e-12.")
    folder = report(tmp_path)
    assert read_headings(folder / "table.md") == HEADINGS
    assert count_sentences(folder / "table.md") <= 6
    latex = (folder / "table.tex").read_text().splitlines()
    heading = next(line for line in latex if line.startswith("{variant}"))
    assert heading.count("&") == 5
    full = read_headings(folder / "table.full.md")
    assert len(full) > len(HEADINGS)
    assert set(HEADINGS) < set(full)
    assert "someone/code" in (folder / "table.full.md").read_text()
    assert "(table.full.md)" in (folder / "table.md").read_text()


def test_the_page_has_the_forest_plot_first_and_a_phone_what_a_reader_decides_by(
    tmp_path: Path,
) -> None:
    write_study(tmp_path / "runs", seeds=6)
    page = (report(tmp_path) / "table.html").read_text()
    assert page.index('<figure class="seeds">') < page.index('<table class="results"')
    assert page.index('<table class="results"') < page.index('<figure class="cost">')
    assert '<p class="verdict">fake: against standard, ' in page
    assert "<summary>Complete caption</summary>" in page
    table = page[page.index('<table class="results"') : page.index("</table>")]
    phone = re.findall(r'<th scope="col" class="[\w ]*phone">(.*?)</th>', table)
    assert phone == ["variant", "accuracy (%)", "n", "difference [95 %]", "p", "verdict"]
    assert re.findall(r"<td[^>]*>(better|worse|undecided)</td>", table)


@pytest.mark.parametrize(
    ("changes", "clause"),
    [
        ({"skip": (("belief", 1),)}, "planned seeds are still to run"),
        ({"failures": {("belief", 1): "diverged"}}, "failed seeds have no value"),
        ({"criteria": ["parameters", "flops"]}, "variants with @flops have equal training FLOPs"),
    ],
)
def test_the_brief_caption_keeps_what_changes_the_reading(
    changes: dict[str, object], clause: str, tmp_path: Path
) -> None:
    write_study(tmp_path / "runs", **changes)
    assert clause in (report(tmp_path) / "table.md").read_text()


def test_a_study_chooses_its_columns(tmp_path: Path) -> None:
    write_study(
        tmp_path / "runs", seeds=6, columns=["verdict", "flops"], latex=["variant", "value"]
    )
    folder = report(tmp_path)
    assert read_headings(folder / "table.md") == ["variant", "verdict", "MFLOPs"]
    assert "{variant} & {accuracy (\\%)} \\\\" in (folder / "table.tex").read_text()


def test_steps_are_shown_where_they_are_asked_for(tmp_path: Path) -> None:
    """Without early stopping a table leaves them out, unless the study names them."""
    write_study(tmp_path / "runs", seeds=6, columns=["value", "steps_run"])
    assert read_headings(report(tmp_path) / "table.md") == ["variant", "accuracy (%)", "steps"]


def test_an_unknown_column_is_one_line_with_the_nearest(tmp_path: Path) -> None:
    body = "baseline: a\ncells: {a: {}}\ncolumns: [value, verdct]"
    with pytest.raises(ConfigError, match=r"columns\.1: no column 'verdct'; did you mean 'verdict"):
        expand(studies.study(tmp_path, body), tmp_path)
    plan = expand(studies.study(tmp_path, body.replace("verdct", "verdict")), tmp_path).plan()
    assert plan.columns == ["value", "verdict"]


def test_the_terminal_has_the_answer_and_aligned_columns(tmp_path: Path) -> None:
    write_study(tmp_path / "runs", seeds=6)
    text = (report(tmp_path) / "table.txt").read_text()
    assert text.splitlines()[1].startswith("fake: against standard, ")
    heading, rule, *rows = text.splitlines()[-5:]
    assert heading.startswith("variant ")
    assert len(rows) == len(EFFECTS)
    assert {len(row) for row in (heading, *rows)} == {len(rule)}
    assert "|" not in text


def test_a_long_label_hides_no_values(tmp_path: Path) -> None:
    label = "validation loss (nats per token) of averaged weights"
    metric = DEFAULT_METRIC.model_copy(update={"label": label})
    write_study(tmp_path / "runs", seeds=6, metric=metric)
    text = (report(tmp_path) / "table.txt").read_text()
    assert f"fake: A study that never ran; {label}," in " ".join(text.split())
    heading, *_ = text.splitlines()[-5:]
    assert heading.split()[:3] == ["variant", "verdict", "test/accuracy"]


def test_a_table_fits_a_terminal_of_80_columns_and_24_lines(tmp_path: Path) -> None:
    names = [
        f"residual={a}-of-the-value,zz={b},ffn=with,lr={c}"
        for a in ("full", "no")
        for b in "xy"
        for c in range(9)
    ]
    variants = {"standard": 0.0} | dict.fromkeys(names, 0.0) | {names[-1]: 0.05}
    write_study(tmp_path / "runs", seeds=7, variants=variants, title="A long title " * 8)
    lines = (report(tmp_path) / "table.txt").read_text().splitlines()
    assert max(map(len, lines)) <= FILE_SCREEN.width
    assert len(lines) <= FILE_SCREEN.height
    rows = [line.split()[0] for line in lines if "decided  " in line or "better  " in line]
    assert len(set(rows)) == len(rows) >= 7
    # The decided variant is the last one of the plan, and undecided ones are left out.
    assert rows[-1] == "no-of-the-value,y,8"
    hidden = len(names) - len(rows)
    assert f"Hidden: {hidden} variants; table.full.md has them" in " ".join(lines)


@pytest.mark.parametrize("width", [60, 80, 140])
def test_names_fit_the_width_of_the_terminal(width: int) -> None:
    names = [f"a={i},{'b' * 30}=1,c={i}" for i in "123"]
    columns = [
        Column("variant", [*names, "floor: the most frequent class of all"]),
        Column("value", ["1.00 ± 0.10"] * 4),
        Column("verdict", ["undecided"] * 4),
        Column("rare", ["9" * 30] * 4, 2),
    ]
    lines = draw_table(columns, width).splitlines()
    assert max(map(len, lines)) <= width
    assert len(set(lines)) == len(lines)
    assert ("rare" in lines[0]) == (width > 60)
    assert " ".join(line[:30].strip() for line in lines[5:]).startswith("floor: the most frequent")


def test_a_wide_table_of_another_kind_is_brief_too() -> None:
    headings = [f"h{number}" for number in range(9)]
    table = Table(headings, [[Cell("1")] * 9], "Title", notes=["One. Two. Three."])
    files = make_markdown_files(table, "wide")
    assert list(files) == ["wide.md", "wide.full.md"]
    assert files["wide.md"].splitlines()[0].count("|") == MOST_COLUMNS + 1
    assert "h8" not in to_latex(table, "wide")
    small = Table(["a", "b"], [[Cell("1")] * 2], "Title", notes=["One."])
    assert list(make_markdown_files(small, "small")) == ["small.md"]
    # A table of a paper has the columns of the paper.
    paper = Table(headings, [[Cell("1")] * 9], "Title", kind="paper")
    assert "h8" in to_latex(paper, "paper")


def test_long_captions_are_cut_at_a_sentence() -> None:
    sentences = [f"Sentence {number} of Fig. 3, e.g. this one." for number in range(8)]
    assert split_sentences(" ".join(sentences)) == sentences
    assert shorten([" ".join(sentences)]) == [" ".join(sentences[:5])]
    assert shorten(sentences[:6]) == sentences[:6]


def test_the_first_column_is_on_the_left() -> None:
    columns = [Column("name", ["a", "long name"]), Column("value", ["1.0", "10.25"])]
    lines = draw_table(columns).splitlines()
    assert lines == ["name       value", "-" * 16, "a            1.0", "long name  10.25"]
