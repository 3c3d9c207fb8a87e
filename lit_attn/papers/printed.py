"""Texts of our values in the style of a paper: its decimals, its units, its overheads."""

import re
import statistics
from collections.abc import Mapping

from lit_attn.papers import layout
from lit_attn.report.numbers import find_magnitude, write_number
from lit_attn.report.tables.columns import format_number


def format_values(
    column: layout.Column,
    published: list[str],
    values: Mapping[int, float],
    base: Mapping[int, float],
) -> str:
    """Return mean ± standard deviation with the decimals of the column's published cells.

    `base` has the values of the row with which an overhead or a difference compares.
    """
    if not values:
        return ""
    mean = statistics.fmean(values.values())
    digits = choose_digits(column, published, mean)
    unit = find_unit(published)
    # The values of a file are those of several rows or columns, which have no mean.
    shown = values.values() if column.file else [mean]
    texts = ["/".join(format_number(value, f".{digits}f") + unit for value in shown)]
    if len(set(values.values())) > 1 and not column.file:
        spread = statistics.stdev(values.values())
        texts.append(f"± {write_number(spread, f'.{digits}f')}")
    start = statistics.fmean(base.values()) if base else None
    if column.overhead and start:
        overhead = 100 * (mean / start - 1)
        texts.append(f"({format_number(overhead, '.1f')}%)")
    elif column.overhead:
        texts.append("(-)")
    if column.difference and start is not None:
        texts.append(f"/{format_number(mean - start, f'+.{digits}f')}")
    return " ".join(texts)


def choose_digits(column: layout.Column, published: list[str], mean: float) -> int:
    """Return the decimals of a column: its own, those of its published cells, or two."""
    digits = 2
    if column.digits is not None:
        digits = column.digits
    elif any(layout.find_numbers(text) for text in published):
        digits = max(count_decimals(text) for text in published)
    if column.value == "parameters" or 0 < abs(mean) < 1:
        # Small models have fewer parameters and shorter times than the paper: two digits remain.
        digits = max(digits, 1 - find_magnitude(mean))
    return digits


def find_unit(published: list[str]) -> str:
    """Return the unit behind the numbers of all published cells that have one, or nothing."""
    units = set()
    for text in published:
        match = re.match(r"[\d.]+([KMBG%])", text)
        if match:
            units.add(match[1])
    return units.pop() if len(units) == 1 else ""


def count_decimals(published: str) -> int:
    """Return the decimals of the first number with a decimal point."""
    match = re.search(r"\d+\.(\d+)", published)
    return len(match[1]) if match else 0
