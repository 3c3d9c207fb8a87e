"""Formats of a table: HTML, Markdown, LaTeX and CSV, with every name escaped."""

import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pandas as pd
import pytest
from helpers.fake_study import report, write_study

from lit_attn.report import write_reports
from lit_attn.report.tables.formats import Cell, Table, escape_latex, to_latex

NASTY = r"50% & <b>_x_</b> $y$ #1 {z} ~ ^ \ | café"


def has_siunitx() -> bool:
    if shutil.which("pdflatex") is None or shutil.which("kpsewhich") is None:
        return False
    return subprocess.run(["kpsewhich", "siunitx.sty"], check=False).returncode == 0


def test_equal_records_give_equal_bytes(tmp_path: Path) -> None:
    """A copy of the records lists its folders in another order."""
    write_study(tmp_path / "a" / "runs")
    shutil.copytree(tmp_path / "a" / "runs", tmp_path / "b" / "runs")
    one, two = report(tmp_path / "a"), report(tmp_path / "b")
    names = sorted(path.name for path in one.iterdir())
    assert names == sorted(path.name for path in two.iterdir())
    assert {"cost.png", "progress.svg", "seeds.svg", "per_seed.csv", "table.tex"} <= set(names)
    for name in names:
        assert (one / name).read_bytes() == (two / name).read_bytes(), name


class Balanced(HTMLParser):
    """HTML parser that fails if the wrong element is closed."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in ("meta", "img", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def test_names_are_escaped_everywhere(tmp_path: Path) -> None:
    write_study(tmp_path / "runs", variants={"standard": 0.0, NASTY: 0.01}, title=NASTY)
    folder = report(tmp_path)
    for page in (folder / "table.html", tmp_path / "reports" / "index.html"):
        parser = Balanced()
        parser.feed(page.read_text())
        assert parser.open == []
        assert any(NASTY in text for text in parser.text)
    assert r"\|" in (folder / "table.md").read_text()
    assert pd.read_csv(folder / "table.csv")["variant"].tolist() == ["standard", NASTY]


@pytest.mark.process
@pytest.mark.skipif(not has_siunitx(), reason="no pdflatex or no siunitx")
@pytest.mark.parametrize("name", [NASTY, "belief2-without-mixing"])
def test_latex_compiles_and_fits_a_page_of_397_points(name: str, tmp_path: Path) -> None:
    omega = "\N{GREEK SMALL LETTER OMEGA}"
    write_study(
        tmp_path / "runs", variants={"standard": 0.0, name: 0.02, omega: 0.01}, title=name, seeds=6
    )
    folder = report(tmp_path)
    (folder / "paper.tex").write_text(
        "\\documentclass{article}\\usepackage{booktabs,graphicx,siunitx}\n"
        "\\setlength\\textwidth{397pt}\\begin{document}\n"
        "\\input{table.tex}\\end{document}\n"
    )
    command = ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "paper.tex"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:]
    assert "Overfull" not in done.stdout


def test_latex_escapes_text() -> None:
    assert escape_latex("a_b 95 % ± 1") == r"a\_b 95 \% $\pm$ 1"
    assert escape_latex("\N{GREEK SMALL LETTER OMEGA}²") == r"$\omega$$^{2}$"
    assert escape_latex("✓✗") == r"$\surd$$\times$"
    assert escape_latex("a 中--") == "a U+4E2D-{}-"
    assert escape_latex("\\") == r"\textbackslash{}"


@pytest.mark.process
@pytest.mark.parametrize("name", ["null", "None", "NA", "nan"])
def test_no_name_of_a_variant_is_a_missing_value(name: str, tmp_path: Path) -> None:
    write_study(tmp_path / "runs", variants={"standard": 0.0, name: 0.1})
    write_reports(tmp_path / "runs", tmp_path / "reports")
    assert f">{name} +" in (tmp_path / "reports" / "index.html").read_text()


def test_a_latex_table_has_the_names_of_its_rows(tmp_path: Path) -> None:
    write_study(tmp_path / "runs", latex=["published"])
    (folder,) = write_reports(tmp_path / "runs", tmp_path / "reports")
    assert "{belief2}" in (folder / "table.tex").read_text()


def test_siunitx_aligns_numbers_and_their_spread() -> None:
    rows = [
        [
            Cell("a"),
            Cell("9.1 ± 0.5", is_bold=True, mark="*"),
            Cell("+1.0 [+10.0, +2.0]"),
            Cell("5"),
        ],
        [Cell("10"), Cell("1,010.2 ± 12.0"), Cell("\N{EM DASH}"), Cell("4/5, 1 diverged")],
    ]
    text = to_latex(Table(["name", "value", "difference", "n"], rows), "x")
    assert r"S[table-format=4.1(3)]" in text
    assert r"S[table-format=+1.1, table-space-text-post={\,[+10.0, +2.0]}]" in text
    _, first, second = text[text.index(r"\midrule") : text.index(r"\bottomrule")].splitlines()
    mark = r"{\rlap{\textsuperscript{*}}}"
    assert first == rf"{{a}} & \bfseries 9.1 \pm 0.5{mark} & +1.0{{\,[+10.0, +2.0]}} & 5 \\"
    assert second == r"{10} & 1010.2 \pm 12.0 & {\textemdash{}} & {4/5, 1 diverged} \\"


def test_siunitx_prints_a_published_spread_and_one_that_rounds_to_zero() -> None:
    rows = [[Cell("a"), Cell("88.15±0.55")], [Cell("b"), Cell("9.00 ± 0.00")]]
    text = to_latex(Table(["name", "value"], rows), "x")
    assert r"{a} & 88.15 \pm 0.55 \\" in text
    # Without this option siunitx leaves out the spread of zero.
    assert "retain-zero-uncertainty" in text
