"""Columns that explain odd runs: settings in which equal seeds or two groups of values differ."""

import math
from collections.abc import Mapping, Sequence

from lit_attn.report.foreign.costs import COUNTS, find_cost
from lit_attn.report.foreign.run_table import RunTable
from lit_attn.report.foreign.states import COLUMNS
from lit_attn.report.statistics.modes import find_groups

MOST_VALUES = 6
"""Most values of a column that a hint names."""


def list_settings(table: RunTable, used: Sequence[str]) -> dict[str, list[str]]:
    """Return the columns that can be settings of runs, with the text of each row.

    A setting has at most one value for two rows. `used` are columns with another meaning.
    """
    metrics = set(table.metrics or ())
    settings = {}
    for column in table.columns:
        cost = find_cost(column)
        is_time = cost is not None and cost.measurement not in COUNTS
        if column in {*used, *metrics, "Name"} or column.lower() in COLUMNS or is_time:
            continue
        texts = [str(row.get(column, "")).strip() for row in table.rows]
        if 2 <= len(set(texts)) <= max(2, len(texts) // 2):
            settings[column] = texts
    return settings


def describe_twins(table: RunTable, used: Sequence[str], first: int, second: int) -> str:
    """Return the settings in which two rows differ, with a condition, or "" without any."""
    parts = []
    condition = ""
    for column, texts in list_settings(table, used).items():
        if texts[first] != texts[second]:
            parts.append(f"'{column}' ({texts[first]}, {texts[second]})")
            condition = condition or f"{column}={texts[first]}"
    if not parts:
        return ""
    return f"they differ in {' and '.join(parts)}, so choose one with --where {condition}"


def describe_groups(
    table: RunTable, used: Sequence[str], names: Sequence[str], values: Sequence[float | None]
) -> list[str]:
    """Return a sentence if a setting explains why the values of the runs fall in two groups."""
    known: dict[str, list[float]] = {}
    numbers = [math.nan if value is None else value for value in values]
    for name, number in zip(names, numbers, strict=True):
        if math.isfinite(number):
            known.setdefault(name, []).append(number)
    groups = find_groups(known) if known else None
    if groups is None:
        return []
    for column, texts in list_settings(table, used).items():
        parts: Mapping[bool, dict[str, None]] = {False: {}, True: {}}
        for text, number in zip(texts, numbers, strict=True):
            if math.isfinite(number):
                parts[number >= groups.higher.low][text] = None
        if parts[False].keys().isdisjoint(parts[True]):
            lower, higher = (", ".join(list(part)[:MOST_VALUES]) for part in parts.values())
            chosen = next(iter(parts[False]))
            return [
                f"The values fall in two groups because of the column '{column}': the lower group"
                f" has {lower}, the higher one {higher}. Judge one with --where {column}={chosen}."
            ]
    return []
