"""Tables as plain text that fit one screen of a terminal."""

import io
import shutil
import textwrap
from collections.abc import Sequence
from typing import NamedTuple

from rich.box import Box
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from lit_attn.report.figures.drawing import short_names
from lit_attn.report.numbers import find_magnitude

LONGEST = 120  # Most characters of a line of words, however wide the terminal is.
FEW_DIGITS = 4  # Zeros behind the point before which a number has a power of ten.
MOST_DIGITS = 16  # Digits of a 64-bit floating-point number.
FEWEST_LETTERS = 12  # Letters of a name that are drawn in any case.
USUAL_LETTERS = 24  # Letters of a name for which columns of a rank above 1 are left out.
FEWEST_LINES = 10  # Lines of a table that are drawn in any case, with its headings.
# A rule below the headings, and no other line; terminals of every encoding have this character.
RULE = Box("    \n    \n----\n    \n    \n    \n    \n    \n", ascii=True)


class Screen(NamedTuple):
    """Characters of a line of a terminal, and lines of an answer (0: any number)."""

    width: int
    height: int


FILE_SCREEN = Screen(80, 24)
"""Screen of table.txt, which fits every terminal and is the same everywhere."""

LARGEST_HEIGHT = 40  # Lines that a reader sees at once, however high the terminal is.


class Column(NamedTuple):
    """Heading and texts of a column of a table for a terminal.

    Columns with a larger `rank` are left out first if a line is too long, and those of rank 0 stay.
    """

    heading: str
    texts: list[str]
    rank: int = 0


class Drawing(NamedTuple):
    """A table as text, and the number of its rows that did not fit."""

    text: str
    hidden: int


def find_screen(show_all: bool = False) -> Screen:
    """Return the size of the terminal, or FILE_SCREEN without one; all lines if `show_all`.

    The variable COLUMNS is 0 in some containers and jobs of CI.
    """
    size = shutil.get_terminal_size(FILE_SCREEN)
    height = min(max(size.lines, FILE_SCREEN.height), LARGEST_HEIGHT)
    return Screen(size.columns, 0 if show_all else height)


def draw_table(columns: Sequence[Column], width: int = 0) -> str:
    """Return headings and rows in aligned columns; the first column has the names of the rows.

    Names are aligned on the left, all else on the right. If lines are longer than `width` (0: any
    width), columns are left out by their rank, and then names are shortened.
    """
    names, *others = columns
    letters = max([cell_len(names.heading), *map(cell_len, names.texts)])
    if width:
        others = _leave_out(others, letters, width)
        letters = max(width - _count_letters(others), FEWEST_LETTERS)
    drawn = RichTable(box=RULE, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    drawn.add_column(Text(names.heading), no_wrap=True)
    for column in others:
        drawn.add_column(Text(column.heading), justify="right", no_wrap=True)
    texts = [column.texts for column in others]
    for name, *row in zip(fit_names(names.texts, letters), *texts, strict=True):
        drawn.add_row(Text(name), *map(Text, row))
    file = io.StringIO()
    # Wider than any table, because a narrower console would cut the cells.
    console = Console(file=file, width=100_000, color_system=None, legacy_windows=False)
    console.print(drawn)
    lines = [line.rstrip() for line in file.getvalue().splitlines()]
    return "\n".join(lines)


def draw_rows(
    columns: Sequence[Column], order: Sequence[int], width: int, height: int = 0
) -> Drawing:
    """Return a table of at most `height` lines (0: any number), but of FEWEST_LINES in any case.

    `order` has the places of the rows, the most important one first. Rows stay in their order.
    """
    for count in range(min(len(order), height or len(order)), 0, -1):
        places = sorted(order[:count])
        chosen = [
            column._replace(texts=[column.texts[place] for place in places]) for column in columns
        ]
        text = draw_table(chosen, width)
        lines = text.count("\n") + 1
        if not height or lines <= max(height, FEWEST_LINES):
            break
        # Most rows have one line.
    return Drawing(text, len(order) - count)


def _leave_out(columns: list[Column], letters: int, width: int) -> list[Column]:
    """Return the columns that leave room for names of `letters` letters in a line of `width`.

    USUAL_LETTERS are enough for longer names. Columns of rank 1 stay beside FEWEST_LETTERS.
    """
    left = list(columns)
    while left:
        last = max(left, key=lambda column: column.rank)
        needed = min(letters, USUAL_LETTERS if last.rank > 1 else FEWEST_LETTERS)
        if not last.rank or width - _count_letters(left) >= needed:
            break
        left.remove(last)
    return left


def _count_letters(columns: Sequence[Column]) -> int:
    """Return the characters of some columns, with the blanks before each."""
    return sum(2 + max(map(cell_len, [heading, *texts])) for heading, texts, _ in columns)


def fit_names(names: list[str], letters: int) -> list[str]:
    """Return the names with at most `letters` letters a line, all different.

    Names of words have several lines. Others are shortened where they are equal.
    """
    single = [name for name in names if " " not in name]
    short = dict(zip(single, short_names(single, letters), strict=True))
    fitted = []
    for name in names:
        lines = textwrap.wrap(name, letters, subsequent_indent="  ", break_on_hyphens=False)
        fitted.append(short.get(name) or "\n".join(lines))
    return fitted


def find_form(sizes: Sequence[float], halves: Sequence[float]) -> str:
    """Return the format in which the smallest of `halves` has two digits, as ".4f" or ".3e".

    `sizes` are those of the means. Without halves a mean has four digits, and six decimals at most.
    No number has more digits than a 64-bit floating-point number.
    """
    first = find_magnitude(max(sizes)) if sizes else 0
    last = 1 - first
    if halves:
        last = find_magnitude(min(halves)) - 1
    elif sizes:
        last = find_magnitude(sizes[0]) - 3
    decimals = max(2, -last)
    if not halves:
        decimals = min(decimals, 6)
    if first < -FEW_DIGITS or first >= MOST_DIGITS:
        return f".{min(max(1, first - last), MOST_DIGITS - 1)}e"
    return f".{max(0, min(decimals, MOST_DIGITS - 1 - max(first, 0)))}f"


def wrap(text: str, width: int) -> str:
    """Return a text in lines of at most `width` characters; further lines are indented."""
    return textwrap.fill(text, min(width, LONGEST), subsequent_indent="  ", break_on_hyphens=False)
