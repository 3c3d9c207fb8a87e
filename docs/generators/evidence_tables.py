"""The committed evidence behind the pages of results: its tables, and p corrected over studies.

A template of write_results.py can name the functions that `placeholder` decorates.
"""

import csv
from collections.abc import Callable
from functools import cache
from pathlib import Path

from lit_attn.cells.decisions import Seals
from lit_attn.config.study import read_studies
from lit_attn.report.statistics.significance import TESTS
from lit_attn.report.statistics.stats import holm_over_studies
from lit_attn.report.verdicts.comparison import ALPHA

ROOT = Path(__file__).parents[2]
EVIDENCE = ROOT / "reports" / "evidence"
SHIPPED = [
    ROOT / "ablations.yaml",
    ROOT / "experiments" / "probes" / "studies.yaml",
    ROOT / "experiments" / "shakespeare" / "studies.yaml",
]
"""Files of studies that a CPU can train; p is corrected over the studies of each file."""

WORDS: tuple[str, ...] = ("no", "one", "two", "three", "four", "five", "six")
WORDS += ("seven", "eight", "nine", "ten", "eleven", "twelve", "thirteen")
MINUS = "\N{MINUS SIGN}"
STAR = r" \*"

Row = dict[str, str]
PLACEHOLDERS: dict[str, Callable[..., str]] = {}


def placeholder(function: Callable[..., str]) -> Callable[..., str]:
    """Let the template use a function by its name."""
    PLACEHOLDERS[function.__name__] = function
    return function


@cache
def read_table(path: str) -> list[Row]:
    """Return the rows of a CSV file of the evidence."""
    with (EVIDENCE / path).open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def find_row(path: str, **values: str) -> Row:
    """Return the only row of a file with these values."""
    (row,) = [row for row in read_table(path) if values.items() <= row.items()]
    return row


@cache
def correct_over_studies() -> dict[tuple[str, str], float]:
    """Return p by study and variant, corrected over the sealed studies of the same file (Holm).

    A study with too few seeds for a star is no test and is not counted.
    """
    families: dict[Path, dict[str, list[Row]]] = {path: {} for path in SHIPPED}
    for study, source in read_studies(ROOT / "ablations.yaml").items():
        seals = Seals.read(EVIDENCE / study / "seals.json")
        if seals is None or source.path not in SHIPPED:
            continue
        test = TESTS[seals.entries[-1].metric.pairs]
        if len(seals.seeds) >= test.find_fewest(ALPHA):
            rows = read_table(f"{study}/table.csv")
            families[source.path][study] = [row for row in rows if row["p_adjusted"]]
    corrected: dict[tuple[str, str], float] = {}
    for compared in families.values():
        corrected |= correct_family(compared)
    return corrected


def correct_family(compared: dict[str, list[Row]]) -> dict[tuple[str, str], float]:
    """Return p by study and variant, corrected over `compared`, the rows of each study."""
    # Several looks at the results of a study leave a smaller level than ALPHA.
    p_values = [
        [float(row["p_adjusted"]) * ALPHA / float(row.get("level", ALPHA)) for row in rows]
        for rows in compared.values()
    ]
    corrected = holm_over_studies(p_values)
    return {
        (study, row["variant"]): p
        for (study, rows), adjusted in zip(compared.items(), corrected, strict=True)
        for row, p in zip(rows, adjusted, strict=True)
    }


def has_star(study: str, variant: str) -> bool:
    """Return True for a star of the study's table whose p stays small over studies."""
    row = find_row(f"{study}/table.csv", variant=variant)
    return row["significant"] == "True" and correct_over_studies()[study, variant] <= ALPHA


def format_number(value: float, decimals: int, sign: str = "") -> str:
    """Return a number with the minus sign of the tables."""
    return f"{value:{sign}.{decimals}f}".replace("-", MINUS)


def format_difference(row: Row, decimals: int) -> str:
    """Return a difference with its interval."""
    difference, low, high = (
        format_number(float(row[key]), decimals, "+") for key in ("difference", "low", "high")
    )
    return f"{difference} [{low}, {high}]"
