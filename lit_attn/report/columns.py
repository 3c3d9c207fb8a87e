"""Columns of the result table, declared once for Markdown, LaTeX, HTML and CSV."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pandas as pd

from lit_attn.report.formats import Cell

NOTHING = "\N{EM DASH}"
MINUS = "\N{MINUS SIGN}"
STAR, DAGGER = "*", "†"
BUSY = 1.2
"""Ratio of the longest to the shortest time over seeds from which on a time is not printed."""

Record = dict[str, Any]
"""One variant's numbers by CSV field."""


class Unit(NamedTuple):
    """SI prefix, its factor, and the format of a number in this unit."""

    prefix: str
    size: float
    form: str


UNITS = (Unit("T", 1e12, ",.2f"), Unit("G", 1e9, ",.2f"), Unit("M", 1e6, ",.0f"))


@dataclass(frozen=True)
class Scale:
    """Decimals of the metric, and units of FLOPs and memory: the same in every row of a table."""

    digits: int
    flops: Unit
    memory: Unit


@dataclass(frozen=True)
class Column:
    """One column of a study's table.

    `heading` and `note` (the sentences that define the column in the caption) are templates of
    `str.format`. `text` prints the cell of one variant. `fields` are the CSV fields behind the
    column with their pandas types. Without `text` the column is in the CSV file only.
    """

    key: str
    heading: str = ""
    note: str = ""
    text: Callable[[Record, Scale], str] | None = None
    fields: Mapping[str, str] = field(default_factory=dict)


def make_scale(summary: pd.DataFrame) -> Scale:
    """Choose the decimals and units of a table: the median spread keeps two significant digits."""
    spreads = summary["sd"][summary["sd"] > 0]
    digits = 2
    if len(spreads):
        digits = min(max(2, 1 - math.floor(math.log10(spreads.median()))), 6)
    return Scale(digits, _choose_unit(summary["flops"]), _choose_unit(summary["peak_memory"]))


def make_cells(column: Column, records: list[Record], scale: Scale) -> list[Cell]:
    """Print a column. The value has the mark of the best variant, the name that of mixed rows."""
    assert column.text is not None
    cells = [Cell(column.text(record, scale)) for record in records]
    if column.key == "value":
        return [
            cell._replace(is_bold=record["best"], mark=STAR if record["significant"] else "")
            for cell, record in zip(cells, records, strict=True)
        ]
    if column.key == "variant":
        return [
            cell._replace(mark=DAGGER if record["mixed"] else "")
            for cell, record in zip(cells, records, strict=True)
        ]
    return cells


def to_frame(records: list[Record]) -> pd.DataFrame:
    """Return the records as a frame with the CSV fields of all columns and their types."""
    types = {name: kind for column in COLUMNS for name, kind in column.fields.items()}
    return pd.DataFrame(records, columns=list(types)).astype(types)


def _choose_unit(values: "pd.Series[Any]") -> Unit:
    """Return the largest unit that the largest value reaches, or the smallest unit."""
    largest = 0 if values.isna().all() else values.max()
    return next((unit for unit in UNITS if largest >= unit.size), UNITS[-1])


def _value(record: Record, scale: Scale) -> str:
    return _plus_minus(record["mean"], record["sd"], scale.digits)


def _count(record: Record, _: Scale) -> str:
    if not record["missing"]:
        return str(record["n"])
    return f"{record['n']}/{record['planned']}, {record['missing']}"


def _difference(record: Record, scale: Scale) -> str:
    if pd.isna(record["difference"]):
        return NOTHING
    text = _number(record["difference"], f"+.{scale.digits}f")
    if not pd.isna(record["low"]):
        low, high = (_number(record[end], f"+.{scale.digits}f") for end in ("low", "high"))
        text += f" [{low}, {high}]"
    if record["pairs"] == record["n"]:
        return text
    return f"{text} ({record['pairs']} pair{'s' * (record['pairs'] != 1)})"


def _needed(record: Record, _: Scale) -> str:
    low, high = record["seeds_low"], record["seeds_high"]
    if pd.isna(low):
        return NOTHING
    return str(low) if low == high else f"{low} to {high}" if high <= 1000 else f"{low} to > 1000"


def _margin(record: Record, scale: Scale) -> str:
    # With a verdict the study has a margin of its own.
    if not pd.isna(record["verdict"]) or pd.isna(record["margin"]):
        return NOTHING
    return f"± {_number(record['margin'], f'.{scale.digits}f')}"


def _time(record: Record, name: str, form: str, unit: float = 1) -> str:
    """Print a time, unless the seeds' times differ so much that they measure the machine's load."""
    ratio = record[f"{name}_ratio"]
    if not pd.isna(ratio) and ratio > BUSY:
        return "busy machine"
    return _number(record[name], form, unit)


def _published(record: Record, _: Scale) -> str:
    """Print a published value with the decimals of the paper, at least two."""
    mean, spread = record["published"], record["published_sd"]
    printed = [repr(float(value)) for value in (mean, spread) if not pd.isna(value)]
    digits = max((len(text.partition(".")[2]) for text in printed), default=0)
    return _plus_minus(mean, spread, max(2, digits))


def _plus_minus(mean: Any, spread: Any, digits: int) -> str:
    text = _number(mean, f".{digits}f")
    if pd.isna(mean) or pd.isna(spread):
        return text
    return f"{text} ± {_number(spread, f'.{digits}f')}"


def _p_value(value: Any) -> str:
    return "< 0.001" if not pd.isna(value) and value < 0.001 else _number(value, ".3f")


def _number(value: Any, form: str, unit: float = 1) -> str:
    if pd.isna(value):
        return NOTHING
    text = format(value if unit == 1 else value / unit, form)
    # A difference that rounds to zero has no sign.
    if not any(digit in text for digit in "123456789"):
        text = text.lstrip("+-")
    return text.replace("-", MINUS)


COLUMNS = (
    Column("variant", "variant", "", lambda r, _: str(r["variant"]), {"variant": "object"}),
    Column(
        "value",
        "{label}",
        "{label} is {metric} {epoch}: mean ± sample standard deviation over the n seeds that "
        "finished. {direction} is better; the best mean of the variants with all planned seeds is "
        "bold.",
        _value,
        {"mean": "Float64", "sd": "Float64", "best": "bool"},
    ),
    Column(
        "n",
        "n",
        "n counts the seeds with a result (planned seeds: {seeds}).",
        _count,
        {"n": "Int64", "planned": "Int64", "missing": "object", "failed": "Int64"},
    ),
    Column(
        "difference",
        "difference [95 %]",
        "The difference is the mean of the per-seed differences to {baseline}, with its 95 % "
        "paired t interval{resolution}. The interval describes the variation between seeds, not "
        "between test samples; it covers 95 to 98 % of true differences if the differences are "
        "symmetric and 82 to 90 % if they are strongly skewed.",
        _difference,
        {
            "pairs": "Int64",
            "ties": "Int64",
            "difference": "Float64",
            "low": "Float64",
            "high": "Float64",
        },
    ),
    Column(
        "p",
        "p",
        "{test} A star marks p ≤ {alpha}, better or worse{star}.",
        lambda r, _: _p_value(r["p_adjusted"]),
        {
            "p": "Float64",
            "p_adjusted": "Float64",
            "p_ranked": "Float64",
            "significant": "bool",
        },
    ),
    Column(
        "failure_p",
        "p (failures)",
        "p (failures) is Fisher's exact test of the number of failed seeds against the baseline's, "
        "corrected by Holm's method.",
        lambda r, _: _p_value(r["failure_p"]),
        {"failure_p": "Float64"},
    ),
    Column(
        "seeds_needed",
        "seeds needed",
        "Seeds needed is the number of seeds with which an uncorrected paired t test at 0.05 has "
        "80 % power, for the largest and the smallest effect in the 95 % interval of the "
        "standardised effect; it is given where the interval of the difference excludes 0.",
        _needed,
        {"seeds_low": "Int64", "seeds_high": "Int64"},
    ),
    Column(
        "verdict",
        "verdict",
        "Verdicts follow from simultaneous 95 % intervals (Bonferroni): equivalent if the interval "
        "lies within ± {margin} of the baseline, otherwise better or worse if it excludes 0, and "
        "undecided if it does neither.",
        lambda r, _: NOTHING if pd.isna(r["verdict"]) else str(r["verdict"]),
        {"verdict": "object", "joint_low": "Float64", "joint_high": "Float64"},
    ),
    Column(
        "margin",
        "equivalent within",
        "Equivalent within ± m: m is the smallest margin for which two one-sided tests would call "
        "the variant equivalent to the baseline, from simultaneous 95 % intervals (Bonferroni).",
        _margin,
        {"margin": "Float64"},
    ),
    Column(
        "published",
        "published",
        "Published values and their ± are copied from {source}.",
        _published,
        {"published": "Float64", "published_sd": "Float64"},
    ),
    Column(
        "published_difference",
        f"ours {MINUS} published",
        "",
        lambda r, s: _number(r["published_difference"], f"+.{s.digits}f"),
        {"published_difference": "Float64"},
    ),
    Column(
        "parameters",
        "parameters",
        "Parameters are all trainable scalars.",
        lambda r, _: _number(r["parameters"], ",d"),
        {"parameters": "Int64"},
    ),
    Column(
        "ffn_width",
        "FFN width",
        "FFN width is the hidden width of the feed-forward network, after matching if parameters "
        "are matched.",
        lambda r, _: _number(r["ffn_width"], "d"),
        {"ffn_width": "Int64"},
    ),
    Column(
        "flops",
        "{flops}FLOPs",
        "FLOPs count the forward pass of one sample (a multiply-add is 2): matrix products, "
        "including attention's, and convolutions; softmax, norms, epilogues and other element-wise "
        "work are not counted.",
        lambda r, s: _number(r["flops"], ",.2f", s.flops.size),
        {"flops": "Int64"},
    ),
    Column(
        "step_time",
        "ms / step",
        "Time per step is the median over the training steps of a run, then over seeds{busy}.",
        lambda r, _: _time(r, "step_time", ",.1f", 1e-3),
        {"step_time": "Float64", "step_time_ratio": "Float64"},
    ),
    Column(
        "evaluation_time",
        "evaluation (s)",
        "Evaluation is the median time of one evaluation of all splits, including reading "
        "the data, then over seeds{busy}.",
        lambda r, _: _time(r, "evaluation_time", ",.2f"),
        {"evaluation_time": "Float64", "evaluation_time_ratio": "Float64"},
    ),
    Column(
        "peak_memory",
        "memory ({memory}B)",
        "Memory is {peaks}, as the median over seeds.",
        lambda r, s: _number(r["peak_memory"], s.memory.form, s.memory.size),
        {"peak_memory": "Int64"},
    ),
    Column("mixed", fields={"mixed": "bool"}),
)
