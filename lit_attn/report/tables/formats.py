"""Tables of strings as Markdown and LaTeX (booktabs), and frames as CSV."""

import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from jinja2 import Environment, FunctionLoader, StrictUndefined

from lit_attn.cells.rows import csv_lines
from lit_attn.report.numbers import fill, round_number
from lit_attn.report.tables.captions import shorten
from lit_attn.schema.sources import read_package_file
from lit_attn.schema.yaml_text import parse_plain

if TYPE_CHECKING:
    import pandas as pd

MOST_COLUMNS = 6
"""Largest number of columns of a table, unless a study or a reader chooses more."""

ASSETS = Path(__file__).parents[1] / "assets"
"""Templates, style sheet, script and captions of the report."""


def read_text(name: str) -> str:
    """Return the text of a file in ASSETS."""
    return read_package_file(ASSETS / name).decode()


TEMPLATES = Environment(loader=FunctionLoader(read_text), undefined=StrictUndefined)
TEMPLATES.autoescape = TEMPLATES.trim_blocks = TEMPLATES.keep_trailing_newline = True
PLAIN = TEMPLATES.overlay("<%", "%>", "<<", ">>", autoescape=False)
"""Templates of LaTeX and Markdown."""

# Accents that LaTeX's default font encoding can put on a letter (the ogonek is missing).
ACCENTS = "\u0300\u0301\u0302\u0303\u0304\u0306\u0307\u0308\u030a\u030b\u030c\u0327"

NUMBER = re.compile(
    r"(?P<sign>[+-]|\N{MINUS SIGN}|)(?P<integer>\d+)(?P<decimals>\.\d+|)"
    r"(?: ?± ?(?P<spread>[\d.]+))?(?P<rest> .*|)"
)
"""A cell that starts with a number."""


@cache
def read_asset(name: str) -> Any:
    """Return the content of a YAML file in ASSETS, which no caller may change."""
    return parse_plain(read_text(name), name)


class Cell(NamedTuple):
    """Text of one cell. `mark` is raised behind the text, `link` is its address in HTML."""

    text: str
    is_bold: bool = False
    mark: str = ""
    link: str = ""


@dataclass(frozen=True)
class Table:
    """Headings and rows of a table, and the lines of its caption as plain text.

    `kind` is the class of the table in HTML. Each `entry` rows belong together. `blocks` has the
    heading of the block of each row ("": all blocks), and is empty without blocks. In tables of the
    kind "paper", columns and rows named "GROUP / NAME" stand below the name of their group, a cell
    ^ is merged with the one above it, and a cell < with the one on its left.

    `shown` are the places of the columns of the brief table, and `phone` those of a narrow screen;
    if they are empty, `brief` chooses the first columns. `summary` are the lines of the brief
    caption; if they are empty, `brief` chooses the first sentences of `notes`. The variants of the
    last `screened_out` rows were screened out.
    """

    headings: list[str]
    rows: list[list[Cell]]
    title: str = ""
    warnings: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    kind: str = "plain"
    entry: int = 1
    blocks: Sequence[str] = ()
    shown: tuple[int, ...] = ()
    phone: tuple[int, ...] = ()
    summary: list[str] = field(default_factory=list)
    screened_out: int = 0

    @property
    def is_printed(self) -> bool:
        """True for a table of a paper, which has the columns and the caption that it needs."""
        return self.kind in ("paper", "claims")

    @property
    def shown_places(self) -> tuple[int, ...]:
        """Places of the columns of the brief table."""
        if self.is_printed:
            return tuple(range(len(self.headings)))
        return self.shown or tuple(range(len(self.headings))[:MOST_COLUMNS])

    @property
    def short_notes(self) -> list[str]:
        """Lines of the brief caption."""
        if self.is_printed:
            return self.notes
        return self.summary or shorten(self.notes)

    @property
    def has_further_columns(self) -> bool:
        """True if the brief table lacks columns."""
        return len(self.shown_places) < len(self.headings)

    @property
    def has_more(self) -> bool:
        """True if the brief table lacks columns or sentences."""
        return self.has_further_columns or self.short_notes != self.notes

    def brief(self) -> "Table":
        """Return the table with its brief caption and at most MOST_COLUMNS columns."""
        if not self.has_more:
            return self
        places = self.shown_places
        rows = [[row[place] for place in places] for row in self.rows]
        headings = [self.headings[place] for place in places]
        return replace(
            self, headings=headings, rows=rows, notes=self.short_notes, shown=(), phone=()
        )

    def column_class(self, place: int) -> str:
        """Return the classes of a column in HTML.

        They are "text" for the words of a paper's table, "more" for a column outside the brief
        table, and "phone" for a column of a narrow screen.
        """
        classes = []
        filled = [row[place].text for row in self.rows if row[place].text]
        if self.kind == "paper" and filled and filled[0].lstrip("+")[:1].isalpha():
            classes.append("text")
        if place not in self.shown_places:
            classes.append("more")
        if place in self.phone:
            classes.append("phone")
        return " ".join(classes)

    def group_columns(self) -> list[tuple[str, list[int]]]:
        """Return the groups of columns in their order, and the places of each."""
        return _group_equal([self.split(name)[0] for name in self.headings])

    def group_rows(self) -> list[tuple[str, list[int]]]:
        """Return the groups of entries of rows in their order, and the places of each.

        Rows without a heading stand first in every block.
        """
        if not self.blocks:
            names = [row[0].text for row in self.rows[:: self.entry]]
            return _group_equal([self.split(name)[0] for name in names])
        shared = [place for place, heading in enumerate(self.blocks) if not heading]
        groups = []
        for heading in dict.fromkeys(heading for heading in self.blocks if heading):
            inside = [place for place, other in enumerate(self.blocks) if other == heading]
            groups.append((heading, [*shared, *inside]))
        return groups

    def list_blocks(self) -> "list[tuple[str, Table]]":
        """Return the heading and the table of every block, or the table itself without blocks."""
        if not self.blocks:
            return [("", self)]
        blocks = []
        for heading, places in self.group_rows():
            rows = [self.rows[place] for place in places]
            blocks.append((heading, replace(self, rows=rows, blocks=())))
        return blocks

    def split(self, name: str) -> tuple[str, str]:
        """Return the group of a column or row, or an empty text, and the name in this group."""
        if self.kind != "paper":
            return "", name
        group, _, rest = name.rpartition(" / ")
        return group, rest


def _group_equal(names: Sequence[str]) -> list[tuple[str, list[int]]]:
    """Return each run of equal names, and the places of the run."""
    groups: list[tuple[str, list[int]]] = []
    for place, name in enumerate(names):
        if groups and groups[-1][0] == name:
            groups[-1][1].append(place)
        else:
            groups.append((name, [place]))
    return groups


def named_table(
    name: str, rows: list[list[Cell]], headings: Sequence[str] = (), pairs: str = "", **values: Any
) -> Table:
    """Return the table `name` of tables.yaml with these rows and further `headings`.

    `pairs` is that of the test whose texts it has. `values` fill the placeholders of its texts.
    """
    entry = read_asset("tables.yaml")[name]
    entry = entry | entry.get("tests", {}).get(pairs, {})
    first = [fill(heading, **values) for heading in entry["headings"]]
    return Table(
        [*first, *headings],
        rows,
        title=fill(entry["title"], **values),
        notes=[fill(entry["note"], **values)],
        kind=entry.get("kind", "plain"),
    )


def to_markdown(table: Table, full: str = "") -> str:
    """Return a pipe table with its caption below.

    `full` is the file with all columns and the complete caption, to which a brief table leads.
    """
    values = {"table": table, "full": full, "escape": escape_markdown}
    return PLAIN.get_template("table.md").render(values)


def make_markdown_files(table: Table, stem: str) -> dict[str, str | bytes]:
    """Return the files STEM.md, which is brief, and STEM.full.md, if it says more."""
    if not table.has_more:
        return {f"{stem}.md": to_markdown(table)}
    full = f"{stem}.full.md"
    return {f"{stem}.md": to_markdown(table.brief(), full), full: to_markdown(table)}


def to_latex(table: Table, label: str, full: str = "") -> str:
    """Return a table named `tab:label` with a short caption and the notes below the table.

    The columns are those of the brief table, and the notes those of its caption. A comment names
    the file `full`, which has all columns and the complete caption.

    Columns of numbers are aligned at the decimal points by siunitx, and texts of more than 80
    letters have several lines. A table whose rows have more than 80 letters is as wide as both
    columns of a page.
    """
    if not table.has_more:
        full = ""
    table = table.brief()
    first, *others = zip(*table.rows, strict=True)
    names = [_latex_cell(cell._replace(text=table.split(cell.text)[1])) for cell in first]
    kinds = ["l"]
    columns = [names]
    for cells in others:
        kind, texts = _latex_column(list(cells))
        kinds.append(kind)
        columns.append(texts)
    letters = 0
    for heading, cells in zip(table.headings, [first, *others], strict=True):
        lengths = [len(cell.text) for cell in cells]
        letters += max(len(table.split(heading)[1]), *lengths)
    return PLAIN.get_template("table.tex").render(
        table=table,
        full=full,
        label="".join(c if c.isascii() and c.isalnum() else "-" for c in label),
        letters=letters,
        columns="".join(kinds),
        lines=[" & ".join(row) for row in zip(*columns, strict=True)],
        escape=escape_latex,
    )


def _latex_column(cells: list[Cell]) -> tuple[str, list[str]]:
    """Return the type of a column and its cells; a column with numbers is of siunitx's type S."""
    # siunitx groups digits itself.
    ungrouped = [re.sub(r"(?<=\d),(?=\d{3})", "", cell.text) for cell in cells]
    matches = [NUMBER.fullmatch(text) for text in ungrouped]
    numbers = [match.groupdict("") for match in matches if match]
    if not numbers:
        return _latex_text_type(cells), [_latex_cell(cell) for cell in cells]
    texts = []
    for cell, match in zip(cells, matches, strict=True):
        text = _latex_cell(cell) if match is None else _latex_number(cell, match.groupdict(""))
        texts.append(text)
    return _latex_number_type(numbers), texts


def _latex_number(cell: Cell, parts: dict[str, str]) -> str:
    """Return a number for a column of type S, from the parts of the cell's text (see NUMBER)."""
    sign = parts["sign"].replace("\N{MINUS SIGN}", "-")
    number = sign + parts["integer"] + parts["decimals"]
    if parts["spread"]:
        number += rf" \pm {parts['spread']}"
    if cell.is_bold:
        number = rf"\bfseries {number}"
    # siunitx takes the braces and the text in them as the end of the cell, not as a number.
    rest = _latex_rest(parts["rest"]) + _latex_mark(cell)
    return f"{number}{{{rest}}}" if rest else number


def _latex_text_type(cells: list[Cell]) -> str:
    """Return the type of a column without numbers: words on the left, all else on the right."""
    if any(len(cell.text) > 80 for cell in cells):
        return "p{85mm}"
    filled = [cell.text for cell in cells if cell.text]
    first_letter = filled[0].lstrip("+")[:1] if filled else ""
    return "l" if first_letter.isalpha() else "r"


def _latex_number_type(numbers: list[dict[str, str]]) -> str:
    """Return siunitx's type S with the most digits of each part of the numbers (see NUMBER)."""
    most_digits = {}
    for part in ("integer", "decimals", "spread"):
        most_digits[part] = max(len(number[part].replace(".", "")) for number in numbers)
    sign = "+" if any(number["sign"] for number in numbers) else ""
    kind = f"table-format={sign}{most_digits['integer']}.{most_digits['decimals']}"
    if most_digits["spread"]:
        kind += f"({most_digits['spread']})"
    longest = max((number["rest"] for number in numbers), key=len)
    if longest:
        kind += f", table-space-text-post={{{_latex_rest(longest)}}}"
    return f"S[{kind}]"


def _latex_cell(cell: Cell) -> str:
    """Return the text of a cell with its mark."""
    text = escape_latex(cell.text)
    if cell.is_bold:
        text = rf"\textbf{{{text}}}"
    # Without braces the end of the previous row takes a bracket or star for its own argument.
    return f"{{{text}{_latex_mark(cell)}}}"


def _latex_rest(text: str) -> str:
    """Return the text behind a number, with a thin space before it."""
    return rf"\,{escape_latex(text.strip())}" if text else ""


def _latex_mark(cell: Cell) -> str:
    """Return the raised mark, which takes no width."""
    return rf"\rlap{{\textsuperscript{{{escape_latex(cell.mark)}}}}}" if cell.mark else ""


def to_csv(frame: "pd.DataFrame", names: Mapping[str, str] | None = None) -> str:
    """Return `frame` as CSV: rounded numbers, and no text that starts a spreadsheet formula.

    `names` has the name of each variant by its label, which the column `variant` contains. Then
    that column has the names, and a column `label` follows it.
    """
    if names and "variant" in frame:
        labels = frame["variant"]
        frame = frame.assign(variant=labels.map(lambda label: names.get(label, label)))
        frame.insert(list(frame.columns).index("variant") + 1, "label", labels)
    frame = frame.rename(columns=neutralise)
    for name in frame.select_dtypes(include="number"):
        frame[name] = frame[name].map(round_number, na_action="ignore")
    for name in frame.select_dtypes(include=["object", "string"]):
        frame[name] = frame[name].map(_prepare_value)
    return frame.to_csv(index=False, lineterminator="\n")


def rows_to_csv(rows: Iterable[Iterable[Any]]) -> str:
    """Return rows as CSV: rounded numbers, and no text that starts a spreadsheet formula."""
    return csv_lines(map(_prepare_value, row) for row in rows)


def _prepare_value(value: object) -> object:
    """Return a number with the digits of a report, and a text that is no spreadsheet formula."""
    return round_number(value) if isinstance(value, float) else neutralise(value)


def read_csv(path: Path) -> "pd.DataFrame":
    """Return a table.csv, in which only an empty cell is missing: a variant can be called null."""
    import pandas as pd

    texts = {"variant": str, "label": str}
    return pd.read_csv(path, dtype=texts, keep_default_na=False, na_values="")


def neutralise(value: object) -> object:
    """Put an apostrophe before a text that a spreadsheet would evaluate."""
    if isinstance(value, str) and value.startswith(("=", "+", "-", "@", "\t", "\r")):
        return f"'{value}"
    return value


def escape_markdown(text: str) -> str:
    """Return `text` on one line, escaped so that no Markdown reader takes it for markup."""
    line = " ".join(text.split())
    return "".join(rf"\{c}" if c in r"\|*_`<>[]#~$&" else c for c in line)


def escape_latex(text: str) -> str:
    """Escape `text` for the body of a document that `pdflatex` compiles without further packages.

    Latin letters, Greek letters and the usual mathematical signs are printed as they are. A
    character that the default fonts lack is printed as its code point, for example U+4E2D.
    """
    escaped = "".join(map(_latex_character, text))
    # Two hyphens in a row would print as a dash, two apostrophes as a double quote.
    return re.sub(r"([-'])(?=\1)", r"\1{}", escaped)


def _latex_character(c: str) -> str:
    """Return one character for LaTeX (see `escape_latex`)."""
    command: str | None = read_asset("latex.yaml").get(c)
    if command is not None:
        return command
    if c.isascii():
        return c if c.isprintable() else " "
    decomposed = unicodedata.normalize("NFD", c)
    if decomposed[0].isascii() and all(accent in ACCENTS for accent in decomposed[1:]):
        return c
    return f"U+{ord(c):04X}"
