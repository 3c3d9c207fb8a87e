"""The printed table: the summary's numbers as text, rounded and marked once for every format."""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import pandas as pd

from lit_attn.cells.records import Metric
from lit_attn.report.caption import Caption

NOTHING = "\N{EM DASH}"
MINUS = "\N{MINUS SIGN}"

Record = dict[str, Any]


@dataclass(frozen=True)
class Row:
    """A variant's cells: the name, then the value, then the rest.

    A bold value is the best mean, a starred one passed the corrected test; a daggered name has
    records that do not compare with the baseline's.
    """

    cells: list[str]
    bold: bool
    starred: bool
    daggered: bool


@dataclass(frozen=True)
class Table:
    """Headings, rows and caption, all of them plain text."""

    headings: list[str]
    rows: list[Row]
    caption: Caption


def make_table(summary: pd.DataFrame, metric: Metric, caption: Caption) -> Table:
    """The rows of `summary` as text; columns that would be empty in every row are left out."""
    rows: list[Record] = [{str(k): v for k, v in r.items()} for r in summary.to_dict("records")]
    digits = _digits(summary)
    flops, memory = _unit(summary["flops"]), _unit(summary["peak_memory"])
    columns = {
        "variant": [row["variant"] for row in rows],
        metric.label: [_plus_minus(row["mean"], row["sd"], digits) for row in rows],
        "n": [_count(row) for row in rows],
        "difference [95 %]": [_difference(row, digits) for row in rows],
        "p": [_p(row["p"]) for row in rows],
        "p Holm": [_p(row["p_holm"]) for row in rows],
        "seeds needed (t test)": [_needed(row) for row in rows],
        "published": [_as_printed(row["published"], row["published_sd"]) for row in rows],
        f"ours {MINUS} published": [
            _number(row["published_difference"], f"+.{digits}f") for row in rows
        ],
        "parameters": [_number(row["parameters"], ",d") for row in rows],
        f"{flops.prefix}FLOPs": [_number(row["flops"], ",.2f", flops.size) for row in rows],
        "ms / step": [_number(row["step_time"], ",.1f", 1e-3) for row in rows],
        "evaluation (s)": [_number(row["evaluation_time"], ",.2f") for row in rows],
        f"memory ({memory.prefix}B)": [
            _number(row["peak_memory"], memory.form, memory.size) for row in rows
        ],
    }
    always = ("variant", metric.label, "n")
    used = {k: cells for k, cells in columns.items() if k in always or set(cells) != {NOTHING}}
    return Table(
        list(used),
        [
            Row(list(cells), row["best"], row["significant"], row["mixed"])
            for cells, row in zip(zip(*used.values(), strict=True), rows, strict=True)
        ],
        caption,
    )


def _digits(summary: pd.DataFrame) -> int:
    """Decimals of the values: two, or as many as give the median spread two digits."""
    spreads = summary["sd"][summary["sd"] > 0]
    if not len(spreads):
        return 2
    return min(max(2, 1 - math.floor(math.log10(spreads.median()))), 6)


class Unit(NamedTuple):
    """A power of ten and how a number of it is written."""

    prefix: str
    size: float
    form: str


UNITS = (Unit("T", 1e12, ",.2f"), Unit("G", 1e9, ",.2f"), Unit("M", 1e6, ",.0f"))


def _unit(values: "pd.Series[Any]") -> Unit:
    """The largest unit that the largest value fills, else the smallest: one for a column."""
    largest = 0 if values.isna().all() else values.max()
    return next((unit for unit in UNITS if largest >= unit.size), UNITS[-1])


def _count(row: Record) -> str:
    if not row["failures"]:
        return str(row["n"])
    return f"{row['n']}/{row['planned']}, {row['failures']}"


def _difference(row: Record, digits: int) -> str:
    if pd.isna(row["difference"]):
        return NOTHING
    text = _number(row["difference"], f"+.{digits}f")
    if not pd.isna(row["low"]):
        low, high = (_number(row[end], f"+.{digits}f") for end in ("low", "high"))
        text += f" [{low}, {high}]"
    if row["pairs"] == row["n"]:
        return text
    return f"{text} ({row['pairs']} pair{'s' * (row['pairs'] != 1)})"


def _needed(row: Record) -> str:
    if pd.isna(row["seeds_needed"]):
        return NOTHING
    return str(row["seeds_needed"]) if row["seeds_needed"] <= 1000 else "> 1000"


def _plus_minus(mean: Any, sd: Any, digits: int) -> str:
    text = _number(mean, f".{digits}f")
    return text if pd.isna(mean) or pd.isna(sd) else f"{text} ± {_number(sd, f'.{digits}f')}"


def _as_printed(mean: Any, sd: Any) -> str:
    """A published value with the decimals that it came with, two at the least."""
    given = [repr(float(value)) for value in (mean, sd) if not pd.isna(value)]
    digits = max((len(text.partition(".")[2]) for text in given), default=0)
    return _plus_minus(mean, sd, max(2, digits))


def _p(value: Any) -> str:
    return "< 0.0001" if not pd.isna(value) and value < 1e-4 else _number(value, ".3g")


def _number(value: Any, form: str, unit: float = 1) -> str:
    if pd.isna(value):
        return NOTHING
    text = format(value if unit == 1 else value / unit, form)
    # A difference that rounds to nothing has no sign.
    if not any(digit in text for digit in "123456789"):
        text = text.lstrip("+-")
    return text.replace("-", MINUS)
