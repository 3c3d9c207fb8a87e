"""Columns that explain odd runs: settings in which equal seeds or runs of one variant differ."""

import math
from collections.abc import Sequence

from scipy import special

from lit_attn.judging.costs import COUNTS, find_cost
from lit_attn.judging.run_table import RunTable
from lit_attn.judging.states import STATE_COLUMNS

MOST_VALUES = 6
"""Most values of a column that a hint names."""

LEAST_SHARE = 0.5
"""Share of the variance within variants from which on a hint names the column that explains it."""

CHANCE = 0.001
"""Probability of such a share by chance (F test), below which a hint names the column."""


def list_settings(table: RunTable, used: Sequence[str]) -> dict[str, list[str]]:
    """Return the columns that can be settings of runs, with the text of each row.

    A setting has at most one value for two rows. `used` are columns with another meaning.
    """
    metrics = set(table.metrics or ())
    settings = {}
    for column in table.columns:
        cost = find_cost(column)
        is_time = cost is not None and cost.measurement not in COUNTS
        if column in {*used, *metrics, "Name"} or column.lower() in STATE_COLUMNS or is_time:
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


def describe_mixtures(
    table: RunTable, used: Sequence[str], names: Sequence[str], values: Sequence[float | None]
) -> list[str]:
    """Return a sentence about the setting that explains most of the variance within variants."""
    known = []
    numbers = []
    for place, value in enumerate(values):
        if value is not None and math.isfinite(value):
            known.append(place)
            numbers.append(value)
    distances = _subtract_means([names[place] for place in known], numbers)
    total = _sum_squares(distances)
    best_share = LEAST_SHARE
    sentences = []
    for column, texts in list_settings(table, used).items():
        levels = [texts[place] for place in known]
        between = len(set(levels)) - 1
        within = len(known) - between - 1
        if between < 1 or within < 1:
            continue
        rest = _sum_squares(_subtract_means(levels, distances))
        share = 1 - rest / total if total else 0.0
        # Any column explains a part by chance, the larger the more values it has.
        ratio = math.inf if not rest else (total - rest) * within / (between * rest)
        if share > best_share and special.fdtrc(between, within, ratio) < CHANCE:
            best_share = share
            different = list(dict.fromkeys(levels))
            shown = ", ".join(different[:MOST_VALUES])
            if len(different) > MOST_VALUES:
                shown += ", ..."
            sentences = [
                f"Runs of a variant differ because of the column '{column}' ({shown}), which"
                f" explains {100 * share:.0f} % of their variance. Judge one with --where"
                f" {column}={different[0]}."
            ]
    return sentences


def _sum_squares(values: Sequence[float]) -> float:
    """Return the sum of squares; a product of large numbers is infinite, and a power an error."""
    return sum(value * value for value in values)


def _subtract_means(names: Sequence[str], values: Sequence[float]) -> list[float]:
    """Return the values without the mean of those with the same name."""
    groups: dict[str, list[float]] = {}
    for name, value in zip(names, values, strict=True):
        groups.setdefault(name, []).append(value)
    means = {name: math.fsum(group) / len(group) for name, group in groups.items()}
    return [value - means[name] for name, value in zip(names, values, strict=True)]
