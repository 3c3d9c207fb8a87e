"""Layout of the pages of papers: merged cells, groups, rows side by side, LaTeX."""

import csv
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from helpers.invented_papers import FOLDER, NAMES, draw, run_invented

from lit_attn.papers.figures import draw_panels
from lit_attn.papers.page import _lay_out, write_paper
from lit_attn.papers.published import make_entries, read_records
from lit_attn.papers.source import read_paper
from lit_attn.report.pages.page import Section, render_page
from lit_attn.report.tables.formats import Cell, Table, to_latex


@pytest.fixture(scope="module")
def dcmha(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the page of DCMHA without results."""
    root = tmp_path_factory.mktemp("dcmha")
    return write_paper(read_paper("dcmha", "", FOLDER), root / "none", root).parent


def test_merged_cells_are_one_cell_in_every_format(dcmha: Path, tmp_path: Path) -> None:
    """Belief2 prints one model size for three models, DCMHA one level for several methods."""
    page = write_paper(read_paper("belief2", "", FOLDER), tmp_path / "none", tmp_path)
    html, text = page.read_text(), page.with_name("index.md").read_text()
    assert '<th scope="row">model size</th><td colspan="3">3.38M</td></tr>' in html
    assert "| model size | 3.38M |  |  |" in text
    latex = (page.parent / "table-2.tex").read_text()
    row = latex[latex.index("{model size}") : latex.index("{time/epoch")]
    published = r"{model size} & \multicolumn{3}{c}{3.38M} \\"
    ours = r"{ours} & {3.38M (counted)} & {3.38M (counted)} & {3.38M (counted)} \\"
    assert " ".join(row.split()) == f"{published} {ours}"
    with (page.parent / "table-2.csv").open() as stream:
        sizes = [r["published"] for r in csv.DictReader(stream) if r["column"] == "model size"]
    assert sizes == ["3.38M"] * 3
    html, text = (dcmha / "index.html").read_text(), (dcmha / "index.md").read_text()
    section = html[html.index("Table 1</h2>") : html.index("Table 2</h2>")]
    bodies = section.split("<tbody>")[1:]
    assert [body.count("<tr>") for body in bodies] == [2, 1, 4]
    assert bodies[2].count('<th scope="row"></th>') == 3
    assert '<td class="text">THA dynamic</td><td>✓</td>' in bodies[2]
    assert "|  | THA dynamic | ✓ |" in text
    latex = (dcmha / "table-1.tex").read_text()
    assert "\n & {THA dynamic} & {$\\surd$}" in latex
    assert "asciicircum" not in latex


def test_rows_stand_side_by_side_as_in_the_paper(tmp_path: Path) -> None:
    """Table 9 of DCMHA prints three pairs of columns; a reading of some rows prints one pair."""
    run_invented(tmp_path, "dcmha", ["9"], lambda name, seed: 11 + seed / 100)
    source = read_paper("dcmha", "", FOLDER)
    item = source.paper.tables["9"]
    table = draw(tmp_path, "dcmha", "9")[0]
    texts = [[cell.text for cell in row] for row in table.rows]
    assert table.headings == ["Config", "ppl"] * 3
    assert texts[0] == ["TFM++", "11.68", "", "", "", ""]
    assert texts[2] == ["+static proj.ᵃ", "11.17", "+query-wise", "10.89", "R=1", "10.87"]
    value = "11.02 ± 0.02 (n=5)"
    assert texts[3] == ["ours", value, "ours", value, "ours", value]
    assert [row[0] for row in texts[::2]] == [line[0] for line in item.side_by_side]
    grid = make_entries(source, item, read_records(source, [item], tmp_path))
    ours = _lay_out(item, grid, "T", [], "o")
    assert [cell.text for cell in ours.rows[4][::2]] == ["+all", "+post comp.", ""]
    assert [len(row) for row in _lay_out(item, grid[:3], "T", [], "o").rows] == [2] * 3


def test_negative_numbers_have_a_typographic_minus(tmp_path: Path) -> None:
    """Published differences, ours and the cells of tables have the same sign."""

    def value(name: str, seed: int) -> float:
        return 11 - (name == "dcformer") + seed / 100 + (seed % 2) / 50 * (name == "standard")

    run_invented(tmp_path, "dcmha", ["9"], value)
    source = read_paper("dcmha", "", FOLDER)
    text = write_paper(source, tmp_path, tmp_path / "reports").with_name("index.md").read_text()
    text = text.replace("\N{MINUS SIGN}", "~")
    (line,) = (line for line in text.splitlines() if line.startswith("| DCFormer++ has a lower"))
    published, ours = line.split(" | ")[3:5]
    assert published == "~0.85"
    assert re.fullmatch(r"~1\.\d\d \\\[~1\.\d\d, ~0\.\d\d\\\]", ours)
    assert "6.36 /~0.27" in text
    signs = re.findall(r"[| \[/]-\d", "\n".join(x for x in text.splitlines() if x[:1] == "|"))
    assert signs == []


def test_groups_of_columns_and_rows_have_headings_of_their_own(dcmha: Path) -> None:
    """Table 8 of DCMHA has groups of columns, Table 4 groups of rows; the texts name both."""
    html, texts = (dcmha / "index.html").read_text(), (dcmha / "index.md").read_text()
    columns = (dcmha / "table-8.tex").read_text()
    heading, rules, names = (
        columns[columns.index(start) : columns.index(end)]
        for start, end in ((r"\toprule", r"\cmid"), (r"\cmid", "{Model}"), ("{Model}", r"\midrule"))
    )
    assert re.findall(r"\\multicolumn{(\d)}{c}{(.*?)}", heading) == [
        ("1", ""),
        ("2", "Epoch 90"),
        ("2", "Epoch 300"),
        ("1", ""),
    ]
    assert rules.split() == [r"\cmidrule(lr){2-3}", r"\cmidrule(lr){4-5}"]
    assert re.findall(r"{(.*?)}", names) == [
        *("Model", "Top-1", "Top-5", "Top-1", "Top-5", "Relative size")
    ]
    assert '<th scope="colgroup" colspan="2">Epoch 300</th>' in html
    assert "Epoch 300 / Top-1" not in html.replace("\n", "")[html.index("Table 8</h2>") :]
    assert "| Model | Epoch 90 / Top-1 |" in texts
    rows = (dcmha / "table-4.tex").read_text()
    places = [rows.index(text) for text in ("0-shot} ", "{Pythia-2.8B}", "5-shot} ")]
    assert places == sorted(places)
    assert rows.count("-shot} ") == 2
    assert html.count('<tbody class="group"><tr><th scope="rowgroup" colspan="15">') == 2
    assert "| 5-shot / Pythia-2.8B |" in texts


def test_a_slash_in_the_table_of_a_study_is_no_group() -> None:
    table = Table(["variant", "ms / step"], [[Cell("a / b"), Cell("5")]])
    assert r"\multicolumn" not in to_latex(table, "x")
    assert "{ms / step}" in to_latex(table, "x")
    assert "{a / b}" in to_latex(table, "x")
    assert 'scope="colgroup"' not in render_page("Study", [Section(tables=[table])], [])


@pytest.mark.parametrize("kind", ["plain", "paper"])
def test_a_page_reads_the_rows_of_a_table_as_often_for_more_rows(kind: str) -> None:
    """A page that read all rows for every cell took minutes for 5,041 variants."""

    class Rows(list[list[Cell]]):
        reads = 0

        def __iter__(self) -> Iterator[list[Cell]]:
            self.reads += 1
            return super().__iter__()

    few, many = (Rows([[Cell(f"v{n}"), Cell("5")] for n in range(count)]) for count in (2, 20))
    for rows in (few, many):
        render_page("Study", [Section(tables=[Table(["variant", "loss"], rows, kind=kind)])], [])
    assert few.reads == many.reads


def test_rows_that_the_paper_prints_side_by_side_are_one_row(tmp_path: Path) -> None:
    """Table 3 of BeliefFormer has a pair of columns for each of its three models."""
    run_invented(tmp_path, "beliefformer", ["3"], lambda name, seed: 0.8 + seed / 100)
    (table,) = draw(tmp_path, "beliefformer", "3")
    assert table.group_columns() == [
        ("", [0]),
        ("Transformer", [1, 2]),
        ("BeliefFormer", [3, 4]),
        ("BeliefFormer*", [5, 6]),
    ]
    published, ours = ([cell.text for cell in row[:4]] for row in table.rows)
    assert published == ["published", "88.15±0.55", "1.66", "89.14±0.17"]
    assert ours == ["ours", "82.00 ± 1.58 (n=5)", "2.00 (n=5)", "82.00 ± 1.58 (n=5)"]


def test_four_panels_stand_in_two_rows(tmp_path: Path) -> None:
    """Figure 1 of MGK has loss and accuracy of softmax above those of linear attention."""
    run_invented(tmp_path, "mgk", ["figure-1"], lambda name, seed: 0.5 + seed / 10, seeds=2)
    source = replace(read_paper("mgk", "", FOLDER), runs=tmp_path)
    item = source.paper.figures["1"]
    records = read_records(source, [item], tmp_path)
    lines = {label: line for (label, _), line in source.locate(item).items()}
    figure = draw_panels(source, item, lines, records, {})
    assert figure is not None
    places = [axes.get_subplotspec() for axes in figure.axes]
    assert [(p.rowspan.start, p.colspan.start) for p in places if p] == [
        *((0, 0), (0, 1), (1, 0), (1, 1))
    ]


@pytest.mark.process
def test_numbers_of_the_text_are_no_numbered_tables(tmp_path: Path) -> None:
    page = write_paper(read_paper("mgk", "", FOLDER), tmp_path / "none", tmp_path)
    headings = re.findall("<h2>(.*?)</h2>", page.read_text())
    assert headings[5:9] == ["Table 4", "Variances", "Likelihoods", "Table 5"]


@pytest.mark.process
@pytest.mark.skipif(shutil.which("pdflatex") is None, reason="needs pdflatex")
@pytest.mark.parametrize("name", NAMES)
def test_tables_compile_and_fit_a_column(name: str, tmp_path: Path) -> None:
    folder = write_paper(read_paper(name, "", FOLDER), tmp_path / "none", tmp_path).parent
    tables = "\n".join(
        path.read_text().replace(r"\begin{table}", r"\begin{table}[p]")
        for path in sorted(folder.glob("table-*.tex"))
    )
    text = (
        "\\documentclass[twocolumn]{article}\n\\usepackage{booktabs,graphicx,siunitx}\n"
        f"\\begin{{document}}\n{tables}\n\\end{{document}}\n"
    )
    (folder / "all.tex").write_text(text)
    command = ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "all.tex"]
    run = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if "siunitx.sty' not found" in run.stdout:
        pytest.skip("needs siunitx")
    assert run.returncode == 0, run.stdout[-2000:]
    assert "Overfull \\hbox" not in run.stdout


def test_a_table_with_long_rows_spans_the_page(dcmha: Path) -> None:
    """Table 10 of DCMHA has few columns, whose texts would be tiny in one column of the page."""
    texts = [(dcmha / f"table-{number}.tex").read_text() for number in (4, 10, 9)]
    assert [text.count(r"\begin{table*}") for text in texts] == [1, 1, 0]
    assert [text.count(r"\end{table*}") for text in texts] == [1, 1, 0]
    assert r"\begin{table}" in texts[2]


def test_latex_prints_published_numbers_without_separators(dcmha: Path) -> None:
    """A year, a width and a number of tokens stand in the tables as the papers print them."""
    assert "group-digits=none" in (dcmha / "table-11.tex").read_text()
    assert "group-separator={,}" in to_latex(
        Table(["name", "steps"], [[Cell("a"), Cell("1,000")]]), "x"
    )


def test_sentences_in_a_table_have_several_lines(dcmha: Path) -> None:
    """Table 11 of DCMHA has the questions of its synthetic tasks."""
    latex = (dcmha / "table-11.tex").read_text()
    assert r"\caption{Examples of the synthetic data set." in latex
    assert r"\begin{tabular}{@{}llp{85mm}" in latex
    assert "{Jeff has shoes. Laura has a baseball. Joseph has pizza. Who possesses shoes?" in latex
