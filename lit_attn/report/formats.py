"""A result table as Markdown, LaTeX (booktabs) and HTML, whatever characters its names have."""

import html
import re
import unicodedata
from dataclasses import dataclass, replace

import pandas as pd

from lit_attn.cells.records import Metric
from lit_attn.report.caption import Caption
from lit_attn.report.columns import (
    DAGGER,
    STAR,
    Row,
    headings,
    make_rows,
    make_scale,
    used_columns,
)

COMMANDS = {
    **{character: rf"\{character}" for character in "&%$#_{}"},
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    "`": r"\textasciigrave{}",
    "\N{EN DASH}": r"\textendash{}",
    "\N{EM DASH}": r"\textemdash{}",
    "…": r"\dots{}",
    "†": r"\textdagger{}",
    "°": r"\textdegree{}",
    "\N{FIGURE SPACE}": r"\phantom{0}",
}

# Names of Unicode. LaTeX has no commands for Greek letters that look like Latin ones.
SMALL_GREEK = (
    "alpha beta gamma delta epsilon zeta eta theta iota kappa lamda mu nu xi pi rho sigma tau "
    "upsilon phi chi psi omega"
)
CAPITAL_GREEK = "Gamma Delta Theta Lamda Xi Pi Sigma Upsilon Phi Psi Omega"

MATHS = {
    "\N{MINUS SIGN}": "-",
    "±": r"\pm",
    "\N{MULTIPLICATION SIGN}": r"\times",
    "·": r"\cdot",
    "≤": r"\le",
    "≥": r"\ge",
    "≠": r"\ne",
    "≈": r"\approx",
    "∞": r"\infty",
    "→": r"\to",
    "⊥": r"\perp",
    "∥": r"\parallel",
    "√": r"\surd",
    **{
        unicodedata.lookup(f"GREEK {size} LETTER {name}"): rf"\{name}".replace("amda", "ambda")
        for size, names in (("SMALL", SMALL_GREEK), ("CAPITAL", CAPITAL_GREEK))
        for name in names.split()
    },
}

RAISED = {"<super>": "^", "<sub>": "_"}

# Accents that LaTeX's default font encoding can put on a letter (the ogonek is missing).
ACCENTS = "\u0300\u0301\u0302\u0303\u0304\u0306\u0307\u0308\u030a\u030b\u030c\u0327"


LATEX_COLUMNS = ("variant", "value", "n", "difference", "p", "flops")
"""Columns of the LaTeX table, which fit the text of a one-column page (397 pt)."""

NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?")
FIGURE_SPACE = "\N{FIGURE SPACE}"


@dataclass(frozen=True)
class Table:
    """Keys and headings of the columns, rows and caption of a result table as plain text."""

    keys: list[str]
    headings: list[str]
    rows: list[Row]
    caption: Caption

    @property
    def sentences(self) -> list[str]:
        """The sentences of the caption that concern these columns."""
        notes = self.caption.columns
        return [*(notes[key] for key in self.keys if key in notes), *self.caption.notes]

    def select(self, keys: tuple[str, ...]) -> "Table":
        """Return the table with the columns in `keys` only."""
        places = [place for place, key in enumerate(self.keys) if key in keys]
        rows = [replace(row, cells=[row.cells[place] for place in places]) for row in self.rows]
        headings = [self.headings[place] for place in places]
        return Table([self.keys[place] for place in places], headings, rows, self.caption)


def make_table(summary: pd.DataFrame, metric: Metric, caption: Caption) -> Table:
    """Print `summary` without the columns that would be empty in every row."""
    columns, scale = used_columns(summary), make_scale(summary)
    keys = [column.key for column in columns]
    rows = make_rows(summary, columns, scale)
    return Table(keys, headings(columns, metric, scale), rows, caption)


def to_markdown(table: Table) -> str:
    """Return a pipe table with its caption below."""
    lines = [
        "| " + " | ".join(markdown(heading) for heading in table.headings) + " |",
        "|" + "|".join("---" if i == 0 else "---:" for i in range(len(table.headings))) + "|",
    ]
    for row in table.rows:
        name, value, *rest = map(markdown, row.cells)
        name += f" {DAGGER}" if row.is_daggered else ""
        value = f"**{value}**" if row.is_bold else value
        value += f" {markdown(STAR)}" if row.is_starred else ""
        lines.append("| " + " | ".join([name, value, *rest]) + " |")
    caption = table.caption
    lines += ["", f"**{markdown(caption.title)}**"]
    lines += [f"**Warning: {markdown(warning)}**" for warning in caption.warnings]
    lines += map(markdown, table.sentences)
    return "\n".join([*lines, ""])


def to_latex(table: Table, label: str) -> str:
    """Return a table named `tab:label` with LATEX_COLUMNS, aligned at the decimal points.

    The caption is short; the definitions of the columns follow the table as notes. The alignment
    uses invisible digits, so that the table needs no package but booktabs.
    """
    table = table.select(LATEX_COLUMNS)
    caption = table.caption
    columns = zip(*(row.cells for row in table.rows), strict=True)
    aligned = zip(*(align_numbers(list(column)) for column in columns), strict=True)
    rows = [replace(row, cells=list(cells)) for row, cells in zip(table.rows, aligned, strict=True)]
    safe_label = "".join(c if c.isascii() and c.isalnum() else "-" for c in label)
    lines = [
        r"% \usepackage{booktabs}",
        r"\begin{table}",
        r"\centering\small",
        rf"\caption{{{latex(caption.title)}}}",
        rf"\label{{tab:{safe_label}}}",
        r"\begin{tabular}{@{}l" + "r" * (len(table.headings) - 1) + "@{}}",
        r"\toprule",
        " & ".join(map(latex, table.headings)) + r" \\",
        r"\midrule",
        *map(_latex_row, rows),
        r"\bottomrule",
        r"\end{tabular}\par\smallskip",
        r"\begin{minipage}{\linewidth}\footnotesize",
        *(rf"\textbf{{Warning: {latex(warning)}}}" for warning in caption.warnings),
        *map(latex, table.sentences),
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


def _latex_row(row: Row) -> str:
    name, value, *rest = map(latex, row.cells)
    name += rf"\textsuperscript{{{latex(DAGGER)}}}" if row.is_daggered else ""
    value = rf"\textbf{{{value}}}" if row.is_bold else value
    # The star takes no width, which would shift the number.
    value += rf"\rlap{{\textsuperscript{{{STAR}}}}}" if row.is_starred else ""
    # Without a guard the end of the previous row takes these characters for its own argument.
    guard = "{}" if name.startswith(("[", "*")) else ""
    return guard + " & ".join([name, value, *rest]) + r" \\"


def to_html(table: Table) -> str:
    """Return the table as HTML, with its caption below."""
    caption = table.caption
    sentences = [
        f"<strong>{html.escape(caption.title)}</strong>",
        *(f'<span class="alert">Warning: {html.escape(w)}</span>' for w in caption.warnings),
        *map(html.escape, table.sentences),
    ]
    return html_table(table.headings, list(map(_html_row, table.rows)), sentences, "results")


def html_table(
    headings: list[str], rows: list[str], sentences: list[str], kind: str = "plain"
) -> str:
    """Return a table of class `kind` that scrolls sideways, and its caption below, which does not.

    `rows` are `<tr>` elements, `sentences` the HTML of the caption's lines.
    """
    head = "".join(f'<th scope="col">{html.escape(heading)}</th>' for heading in headings)
    body, caption = "\n".join(rows), "<br>\n".join(sentences)
    return (
        f'<div class="wide">\n<table class="{kind}">\n<thead><tr>{head}</tr></thead>\n'
        f"<tbody>\n{body}\n</tbody>\n</table>\n</div>\n"
        f'<p class="caption">{caption}</p>\n'
    )


def _html_row(row: Row) -> str:
    name, value, *rest = map(html.escape, row.cells)
    name += f"<sup>{DAGGER}</sup>" if row.is_daggered else ""
    value = f"<strong>{value}</strong>" if row.is_bold else value
    value += f"<sup>{STAR}</sup>" if row.is_starred else ""
    cells = "".join(f"<td>{cell}</td>" for cell in (value, *rest))
    return f'<tr><th scope="row">{name}</th>{cells}</tr>'


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


def _latex_character(c: str) -> str:
    if c in COMMANDS:
        return COMMANDS[c]
    if c in MATHS:
        return f"${MATHS[c]}$"
    if c.isascii():
        return c if c.isprintable() else " "
    decomposed = unicodedata.normalize("NFD", c)
    if decomposed[0].isascii() and all(accent in ACCENTS for accent in decomposed[1:]):
        return c
    kind, _, point = unicodedata.decomposition(c).partition(" ")
    if kind in RAISED and (plain := chr(int(point.split()[0], 16))).isalnum() and plain.isascii():
        return f"${RAISED[kind]}{{{plain}}}$"
    return f"U+{ord(c):04X}"
