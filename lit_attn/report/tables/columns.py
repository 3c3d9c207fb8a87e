"""Columns of the result table (assets/columns.yaml) and the functions that print their cells."""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import pandas as pd

from lit_attn.report.numbers import find_magnitude, write_number
from lit_attn.report.records.study_record import BUSY_RATIO
from lit_attn.report.records.timing import TIME_MARK
from lit_attn.report.tables.formats import Cell, read_asset
from lit_attn.report.verdicts.comparison import POWERS
from lit_attn.schema.errors import plural

NOTHING = "\N{EM DASH}"
MINUS = "\N{MINUS SIGN}"
STAR, DAGGER = "*", "†"
NOT_REACHED = "not reached"
"""Text of a median of times that over half of the runs do not have."""
BUSY_TEXT = "busy machine"
"""Text of a time in the tables of papers and claims."""
BUSY_MARK = "§"
"""Mark of a time that is not printed, because the times of the seeds differ too much."""

Record = dict[str, Any]  # One variant's numbers by CSV field.
MOST_DIGITS = 10
"""Digits before the point from which on a number has a power of ten, as 2.30e+54."""
UNITS = {"T": 1e12, "G": 1e9, "M": 1e6}  # Factor by SI prefix.


class Scale(NamedTuple):
    """Decimals of the metric, and SI prefixes of FLOPs and memory: the same in every row."""

    digits: int
    flops: str
    memory: str


class Column(NamedTuple):
    """One column of a study's table.

    `heading`, `note` (the sentences that define the column in the caption) and `brief` (its
    sentence in the brief caption; None: the first one of `note`) are templates of `str.format`.
    `tests` replaces some of them in the tables of other tests than that of pairs, by their value
    of `pairs`. `fields` are its fields in table.csv with their pandas types.
    """

    key: str
    fields: Mapping[str, str]
    heading: str = ""
    note: str = ""
    brief: str | None = None
    tests: Mapping[str, Mapping[str, str]] = {}

    def describe(self, pairs: str) -> "Column":
        """Return the column of a table of the test with this value of `pairs`."""
        replaced: dict[str, Any] = dict(self.tests.get(pairs, {}))
        return self._replace(**replaced)


def make_scale(summary: pd.DataFrame) -> Scale:
    """Choose decimals, and the largest units that the largest values reach."""
    digits = choose_digits(summary["sd"], summary["mean"])
    return Scale(digits, _choose_unit(summary["flops"]), _choose_unit(summary["peak_memory"]))


def _choose_unit(values: "pd.Series[float]") -> str:
    """Return the largest unit that the largest of `values` reaches."""
    largest = max(values.dropna(), default=0)
    for unit, factor in UNITS.items():
        if largest >= factor:
            return unit
    return "M"


def choose_digits(deviations: "pd.Series[float]", means: "pd.Series[float]") -> int:
    """Return decimals for two digits of the median deviation, or for three of the median mean."""
    for sizes in (deviations, means.abs() / 10):
        is_positive = sizes > 0
        if is_positive.any():
            digits = 1 - find_magnitude(sizes[is_positive].median())
            return min(max(2, digits), 6)
    return 2


TIME_FAULTS = {
    "step_time": "step_time_fault",
    "target_seconds": "step_time_fault",
    "evaluation_time": "evaluation_time_fault",
}
"""Field with the reason why a time cannot be compared, by column."""
TIMES = ("step_time", "evaluation_time")
"""Columns of measured times, which are not printed if the times of the seeds differ too much."""


def make_cells(column: Column, records: list[Record], scale: Scale) -> list[Cell]:
    """Print a column. The name of an incomparable variant has a dagger.

    The best value is bold if the verdict about its variant is better. A time that cannot be
    compared with the baseline's has TIME_MARK, and one that is not printed BUSY_MARK.
    """
    texts = [PRINTERS[column.key](record, scale) for record in records]
    # Thousands of variants share most of their texts.
    shared = {text: Cell(text) for text in texts}
    cells = [shared[text] for text in texts]
    for row, record in enumerate(records):
        cell = cells[row]
        fault_field = TIME_FAULTS.get(column.key)
        fault = record[fault_field] if fault_field else ""
        if column.key == "value":
            mark = STAR if record["significant"] else ""
            is_bold = record["best"] and record["decision"] == "better"
            cells[row] = cell._replace(is_bold=is_bold, mark=mark)
        elif column.key == "variant" and record["mixed"]:
            cells[row] = cell._replace(mark=DAGGER)
        elif column.key in TIMES and _is_busy(record, column.key):
            cells[row] = cell._replace(mark=BUSY_MARK)
        elif fault and cell.text != NOTHING:
            cells[row] = cell._replace(mark=TIME_MARK)
    return cells


def _value(record: Record, scale: Scale) -> str:
    """Print mean and standard deviation, or the median of times until an event."""
    if record["test"].has_means:
        return format_spread(record["mean"], record["sd"], scale.digits)
    return format_median(record["median"], record["n"])


def _reached(record: Record, _: Scale) -> str:
    """Print in how many seeds the event of a time until it has come."""
    if pd.isna(record["reached"]):
        return NOTHING
    return f"{record['reached']} of {record['n']}"


def _count(record: Record, _: Scale) -> str:
    """Print the number of seeds, and why the others have no value."""
    if not record["missing"]:
        return str(record["n"])
    return f"{record['n']}/{record['planned']}, {record['missing']}"


def _difference(record: Record, scale: Scale) -> str:
    form = f".{scale.digits}f"
    text = format_difference(record["difference"], record["low"], record["high"], form)
    if record["pairs"] == record["n"] or pd.isna(record["difference"]):
        return text
    return f"{text} ({plural(record['pairs'], 'pair')})"


def _test_error(record: Record, scale: Scale) -> str:
    """Print the standard errors of the mean and of the difference that are known."""
    errors = (record["test_error"], record["test_error_difference"])
    texts = [format_number(e, f".{scale.digits}f") for e in errors if not pd.isna(e)]
    return " / ".join(texts) or NOTHING


def _needed(record: Record, _: Scale) -> str:
    low, high = record["seeds_low"], record["seeds_high"]
    # No number of seeds lifts the baseline above its floor.
    if pd.isna(low) or record["decision"] != "undecided" or record["is_below_floor"]:
        return NOTHING
    # The verdict needs a star, which fewer seeds or runs cannot have.
    low = max(low, record["test"].find_fewest(record["level"]))
    # Independent runs have no upper end above 1,000.
    high = 1001 if pd.isna(high) else max(low, high)
    if low == high:
        return str(low)
    # The tests count no further.
    return f"{low} to {high}" if high <= 1000 else f"{low} to > 1000"


def _power(record: Record, _: Scale) -> str:
    """Print the probabilities of a star that were simulated, by number of pairs."""
    powers = [record[field] for field in POWERS if not pd.isna(record[field])]
    return ", ".join(write_number(power, ".2f") for power in powers) or NOTHING


def _margin(record: Record, scale: Scale) -> str:
    """Print the smallest margin with which the variant would be equivalent to the baseline."""
    # With a verdict the study has a margin of its own.
    if pd.isna(record["margin"]) or not pd.isna(record["verdict"]):
        return NOTHING
    return f"± {format_number(record['margin'], f'.{scale.digits}f')}"


def _time(record: Record, name: str, form: str, unit: float = 1) -> str:
    """Print a time, unless the seeds' times differ so much that they measure the machine's load."""
    if _is_busy(record, name):
        return NOTHING
    return format_number(record[name], form, unit)


def _is_busy(record: Record, name: str) -> bool:
    """Return True if the seeds' times differ so much that they measure the machine's load."""
    ratio = record[f"{name}_ratio"]
    return not pd.isna(ratio) and ratio > BUSY_RATIO


def _memory(record: Record, scale: Scale) -> str:
    form = ",.0f" if scale.memory == "M" else ",.2f"
    return format_number(record["peak_memory"], form, UNITS[scale.memory])


def _published(record: Record, _: Scale) -> str:
    """Print a published value with the decimals of the paper, at least two."""
    mean, spread = record["published"], record["published_sd"]
    digits = 2
    for value in (mean, spread):
        if not pd.isna(value):
            decimals = repr(float(value)).partition(".")[2]
            digits = max(digits, len(decimals))
    return format_spread(mean, spread, digits)


def format_difference(difference: Any, low: Any, high: Any, form: str) -> str:
    """Return a difference with its interval, as "+0.31 [+0.12, +0.50]" in the form ".2f"."""
    text = format_number(difference, f"+{form}")
    if pd.isna(low):
        return text
    return f"{text} {_format_interval(low, high, form)}"


def _format_interval(low: Any, high: Any, form: str) -> str:
    """Return the ends of an interval, as "[+0.12, +0.50]" in the form ".2f"."""
    if pd.isna(low):
        return NOTHING
    return f"[{format_number(low, f'+{form}')}, {format_number(high, f'+{form}')}]"


def format_spread(mean: Any, spread: Any, digits: int) -> str:
    """Return a mean with its standard deviation, as "72.01 ± 0.20"."""
    text = format_number(mean, f".{digits}f")
    if pd.isna(mean) or pd.isna(spread):
        return text
    return f"{text} ± {format_number(spread, f'.{digits}f')}"


def format_median(median: Any, n: int) -> str:
    """Return the median of `n` times until an event, which can be out of reach."""
    if pd.isna(median):
        return NOT_REACHED if n else NOTHING
    return format_number(median, "g")


def format_seeds(seeds: list[int]) -> str:
    """Return a list of seeds as "seed 0", "seeds 0, 5" or "seeds 0 to 9"."""
    if len(seeds) > 2 and seeds == list(range(seeds[0], seeds[-1] + 1)):
        return f"seeds {seeds[0]} to {seeds[-1]}"
    noun = "seeds" if len(seeds) > 1 else "seed"
    return f"{noun} {', '.join(str(seed) for seed in seeds)}"


def format_p(value: Any) -> str:
    """Return a p value with three decimals."""
    if not pd.isna(value) and value < 0.001:
        return "< 0.001"
    return format_number(value, ".3f")


def is_beyond_columns(number: Any, form: str) -> bool:
    """Return True for a number that would have more than MOST_DIGITS digits before its point."""
    return form.endswith("f") and math.isfinite(number) and abs(number) >= 10.0**MOST_DIGITS


def format_number(value: Any, form: str, unit: float = 1) -> str:
    """Return a number in multiples of `unit`, with a typographic minus; a dash for no number."""
    if pd.isna(value):
        return NOTHING
    number = value if unit == 1 else value / unit
    if is_beyond_columns(number, form):
        form = f"{'+' * form.startswith('+')}.2e"
    text = write_number(number, form)
    # A difference that rounds to zero has no sign.
    if not any(digit in text for digit in "123456789"):
        text = text.lstrip("+-")
    return text.replace("-", MINUS)


def _seconds(seconds: float | None) -> str:
    """Return whole seconds, or two digits of less than ten."""
    is_short = seconds is not None and seconds < 10
    return format_number(seconds, ".2g" if is_short else ",.0f")


PRINTERS: dict[str, Callable[[Record, Scale], str]] = {
    "variant": lambda r, _: str(r["variant"]),
    "value": _value,
    "reached": _reached,
    "n": _count,
    "difference": _difference,
    "test_error": _test_error,
    "both": lambda r, s: _format_interval(r["both_low"], r["both_high"], f".{s.digits}f"),
    "target_steps": lambda r, _: format_number(r["target_steps"], ",d"),
    "target_seconds": lambda r, _: _seconds(r["target_seconds"]),
    "steps_run": lambda r, _: format_number(r["steps_run"], ",.0f"),
    "stopped": lambda r, _: format_number(r["stopped"], "d"),
    "p": lambda r, _: format_p(r["p_adjusted"]),
    "failure_p": lambda r, _: format_p(r["failure_p"]),
    "seeds_needed": _needed,
    "power": _power,
    "verdict": lambda r, _: r["decision"] or NOTHING,
    "margin": _margin,
    "best_test_epoch": lambda r, s: format_spread(
        r["best_test_epoch"], r["best_test_epoch_sd"], s.digits
    ),
    "published": _published,
    "published_difference": lambda r, s: format_number(r["published_difference"], f"+.{s.digits}f"),
    "parameters": lambda r, _: format_number(r["parameters"], ",d"),
    "ffn_width": lambda r, _: format_number(r["ffn_width"], "d"),
    "flops": lambda r, s: format_number(r["flops"], ",.2f", UNITS[s.flops]),
    "cache_bytes": lambda r, _: format_number(r["cache_bytes"], ",d"),
    "step_time": lambda r, _: _time(r, "step_time", ",.1f", 1e-3),
    "waiting": lambda r, _: format_number(r["waiting"], ".0f", 0.01),
    "evaluation_time": lambda r, _: _time(r, "evaluation_time", ",.2f"),
    "peak_memory": _memory,
}
"""Function that prints a variant's cell, by column. Other columns are in the CSV file only."""

COLUMNS = [Column(**entry) for entry in read_asset("columns.yaml")]

COLUMN_KEYS = tuple(column.key for column in COLUMNS if column.heading)
"""Keys of the printed columns in their order, which a study can choose."""
