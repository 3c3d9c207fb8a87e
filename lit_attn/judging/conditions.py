"""Conditions of --where: which runs of a table count."""

import operator
import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

from lit_attn.judging.run_table import RunTable
from lit_attn.judging.values import read_number
from lit_attn.schema.errors import ConfigError, plural, require

PATTERN = re.compile(r"\s*(?P<column>.+?)\s*(?P<sign>!=|<=|>=|=|<|>)\s*(?P<value>.*?)\s*")
"""Text of a condition; the first sign divides it."""

COMPARISONS: dict[str, Callable[[float, float], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
"""Comparison of numbers by sign. The other signs compare texts."""


class Condition(NamedTuple):
    """Condition about the values of a column, such as `size=S` or `steps>1000`."""

    column: str
    sign: str
    value: str

    def __str__(self) -> str:
        return f"{self.column}{self.sign}{self.value}"


def parse_condition(text: str) -> Condition:
    """Return the condition in a text. Raises ConfigError for a text without one."""
    match = PATTERN.fullmatch(text)
    if match is None:
        raise ConfigError(f"--where: '{text}' is not COLUMN=VALUE, with =, !=, <, <=, > or >=")
    condition = Condition(match["column"], match["sign"], match["value"])
    if condition.sign in COMPARISONS and not isinstance(read_number(condition.value), float):
        raise ConfigError(f"--where {condition}: '{condition.value}' is not a number")
    return condition


def select_rows(table: RunTable, where: Sequence[str]) -> RunTable:
    """Return the table with the rows for which all conditions hold."""
    selected = table
    for text in where:
        condition = parse_condition(text)
        require(f"{table.source}: has no column", condition.column, table.columns)
        kept = _list_kept(selected, condition)
        rows = [selected.rows[place] for place in kept]
        places = [selected.places[place] for place in kept]
        baseline = "" if table.rows[0] not in rows else table.baseline
        selected = RunTable(
            **{**vars(selected), "rows": rows, "places": places, "baseline": baseline}
        )
    return selected


def _list_kept(table: RunTable, condition: Condition) -> list[int]:
    """Return the places of the rows for which a condition holds. Raises ConfigError without one."""
    written = [row.get(condition.column) for row in table.rows]
    if condition.sign in COMPARISONS:
        return _compare_numbers(table, condition, written)
    texts = ["" if value is None else str(value).strip() for value in written]
    if condition.sign == "=":
        where = f"{table.source}: {condition.column}: no run has the value"
        require(where, condition.value, dict.fromkeys(texts))
        return [place for place, text in enumerate(texts) if text == condition.value]
    kept = [place for place, text in enumerate(texts) if text != condition.value]
    if not kept:
        raise ConfigError(f"{table.source}: --where {condition}: no run is left")
    return kept


def _compare_numbers(table: RunTable, condition: Condition, written: Sequence[object]) -> list[int]:
    """Return the places of the numbers for which a comparison holds; other values are noted."""
    compare = COMPARISONS[condition.sign]
    limit = read_number(condition.value)
    kept = []
    without = 0
    for place, value in enumerate(written):
        number = read_number(value)
        if not isinstance(number, float):
            without += 1
        elif isinstance(limit, float) and compare(number, limit):
            kept.append(place)
    if not kept:
        raise ConfigError(f"{table.source}: --where {condition}: no run is left")
    if without:
        table.notes.append(
            f"--where {condition} leaves out {plural(without, 'run')} without a number in"
            f" '{condition.column}'."
        )
    return kept
