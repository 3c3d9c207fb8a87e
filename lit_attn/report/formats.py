"""A table of strings as Markdown, LaTeX (booktabs), HTML and CSV, whatever characters it has."""

import re
import unicodedata
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import yaml

if TYPE_CHECKING:
    import pandas as pd
    from jinja2 import Environment

ASSETS = Path(__file__).parent / "assets"
"""Templates, style sheet, script and captions of the report."""

RAISED = {"<super>": "^", "<sub>": "_"}

# Accents that LaTeX's default font encoding can put on a letter (the ogonek is missing).
ACCENTS = "\u0300\u0301\u0302\u0303\u0304\u0306\u0307\u0308\u030a\u030b\u030c\u0327"

NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?")
FIGURE_SPACE = "\N{FIGURE SPACE}"


class Cell(NamedTuple):
    """Text of one cell. `mark` is raised behind the text, `link` is its address in HTML."""

    text: str
    is_bold: bool = False
    mark: str = ""
    link: str = ""


@dataclass(frozen=True)
class Table:
    """Headings and rows of a table, and the lines of its caption as plain text.

    `kind` is the class of the table in HTML.
    """

    headings: list[str]
    rows: list[list[Cell]]
    title: str = ""
    warnings: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    kind: str = "plain"


def to_markdown(table: Table) -> str:
    """Return a pipe table with its caption below."""
    lines = [
        "| " + " | ".join(map(markdown, table.headings)) + " |",
        "|---|" + "---:|" * (len(table.headings) - 1),
        *("| " + " | ".join(map(_markdown_cell, row)) + " |" for row in table.rows),
        "",
        f"**{markdown(table.title)}**",
        *(f"**Warning: {markdown(warning)}**" for warning in table.warnings),
        *map(markdown, table.notes),
    ]
    return "\n".join([*lines, ""])


def _markdown_cell(cell: Cell) -> str:
    text = markdown(cell.text)
    text = f"**{text}**" if cell.is_bold else text
    return f"{text} {markdown(cell.mark)}" if cell.mark else text


def to_latex(table: Table, label: str) -> str:
    """Return a table named `tab:label` with a short caption and the notes below the table.

    Numbers are aligned at the decimal points by invisible digits, so that the table needs no
    package but booktabs.
    """
    columns = [
        align_numbers([cell.text for cell in column]) for column in zip(*table.rows, strict=True)
    ]
    rows = [
        [cell._replace(text=text) for cell, text in zip(row, texts, strict=True)]
        for row, texts in zip(table.rows, zip(*columns, strict=True), strict=True)
    ]
    safe_label = "".join(c if c.isascii() and c.isalnum() else "-" for c in label)
    lines = [
        r"% \usepackage{booktabs}",
        r"\begin{table}",
        r"\centering\small",
        rf"\caption{{{latex(table.title)}}}",
        rf"\label{{tab:{safe_label}}}",
        r"\begin{tabular}{@{}l" + "r" * (len(table.headings) - 1) + "@{}}",
        r"\toprule",
        " & ".join(map(latex, table.headings)) + r" \\",
        r"\midrule",
        *map(_latex_row, rows),
        r"\bottomrule",
        r"\end{tabular}\par\smallskip",
        r"\begin{minipage}{\linewidth}\footnotesize",
        *(rf"\textbf{{Warning: {latex(warning)}}}" for warning in table.warnings),
        *map(latex, table.notes),
        r"\end{minipage}",
        r"\end{table}",
    ]
    return "\n".join([*lines, ""])


def align_numbers(cells: list[str]) -> list[str]:
    """Pad the integer parts of the numbers in a column with figure spaces to a common width.

    Only cells with as many numbers as most of the column take part.
    """
    numbers = [NUMBER.findall(cell) for cell in cells]
    count = max(map(len, numbers))
    full = [row for row in numbers if len(row) == count]
    widths = [max(len(row[i].partition(".")[0]) for row in full) for i in range(count)]

    def pad(cell: str) -> str:
        places = iter(widths)

        def fill(match: re.Match[str]) -> str:
            missing = next(places) - len(match[0].partition(".")[0])
            return FIGURE_SPACE * missing + match[0]

        return NUMBER.sub(fill, cell)

    # A name is text, also one with numbers.
    is_text = all(cell[:1].isalpha() for cell in cells)
    return [
        pad(cell) if len(row) == count and not is_text else cell
        for cell, row in zip(cells, numbers, strict=True)
    ]


def _latex_row(cells: list[Cell]) -> str:
    row = " & ".join(map(_latex_cell, cells))
    # Without a guard the end of the previous row takes these characters for its own argument.
    return ("{}" if row.startswith(("[", "*")) else "") + row + r" \\"


def _latex_cell(cell: Cell) -> str:
    text = latex(cell.text)
    text = rf"\textbf{{{text}}}" if cell.is_bold else text
    # The mark takes no width, which would shift the number.
    return text + (rf"\rlap{{\textsuperscript{{{latex(cell.mark)}}}}}" if cell.mark else "")


def to_html(table: Table) -> str:
    """Return the table as HTML that scrolls sideways, with its caption below."""
    macros = templates().get_template("table.html").module
    return str(macros.table(table))  # type: ignore[attr-defined]


@cache
def templates() -> "Environment":
    """Return the Jinja2 environment of the templates in ASSETS, which escapes all text."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    return Environment(
        loader=FileSystemLoader(ASSETS),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )


def to_csv(frame: "pd.DataFrame") -> str:
    """Return `frame` as CSV in which no text cell or heading can start a spreadsheet formula."""
    frame = frame.rename(columns=_neutralise)
    for name in frame.select_dtypes(include=["object", "string"]):
        frame[name] = frame[name].map(_neutralise)
    return frame.to_csv(index=False, lineterminator="\n")


def _neutralise(value: object) -> object:
    """Put an apostrophe before a text that a spreadsheet would evaluate."""
    if isinstance(value, str) and value.startswith(("=", "+", "-", "@", "\t", "\r")):
        return f"'{value}"
    return value


def markdown(text: str) -> str:
    """Return `text` on one line, escaped so that no Markdown reader takes it for markup."""
    return "".join(rf"\{c}" if c in r"\|*_`<>[]#~$&" else c for c in " ".join(text.split()))


def latex(text: str) -> str:
    """Escape `text` for the body of a document that `pdflatex` compiles without further packages.

    Latin letters, Greek letters and the usual mathematical signs are printed as they are. A
    character that the default fonts lack is printed as its code point, for example U+4E2D.
    """
    escaped = "".join(map(_latex_character, text))
    # Two hyphens in a row would print as a dash, two apostrophes as a double quote.
    return re.sub(r"([-'])(?=\1)", r"\1{}", escaped)


@cache
def _latex_commands() -> dict[str, str]:
    """Return the commands of special characters."""
    commands = yaml.safe_load((ASSETS / "latex.yaml").read_text(encoding="utf-8"))
    return {**commands, FIGURE_SPACE: r"\phantom{0}"}


def _latex_character(c: str) -> str:
    if c in _latex_commands():
        return _latex_commands()[c]
    if c.isascii():
        return c if c.isprintable() else " "
    decomposed = unicodedata.normalize("NFD", c)
    if decomposed[0].isascii() and all(accent in ACCENTS for accent in decomposed[1:]):
        return c
    kind, _, point = unicodedata.decomposition(c).partition(" ")
    if kind in RAISED and (plain := chr(int(point.split()[0], 16))).isalnum() and plain.isascii():
        return f"${RAISED[kind]}{{{plain}}}$"
    return f"U+{ord(c):04X}"
