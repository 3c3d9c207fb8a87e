"""Numbers in the cells of a table, and the values of the metric with the checks of their units."""

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from lit_attn.judging.run_table import RunTable
from lit_attn.judging.states import State
from lit_attn.schema.errors import ConfigError, plural

NOT_FINITE = {"nan", "inf", "-inf", "+inf", "infinity", "-infinity", "+infinity"}

SMALLEST, LARGEST = 1e-300, 1e300
"""Sizes between which sums and squares of differences have floating-point values."""

PERCENT = (50.0, 200.0)
"""Ratios of the typical values of two variants that can be percentages and shares."""

SHARES_OF_MIN = ("err", "wer", "cer", "miss", "fail")
"""Parts of the names of shares that are better if they are smaller; a loss is no share."""


def clean(value: Any) -> Any:
    """Return a text without blanks around it, and any other value as it is."""
    return value.strip() if isinstance(value, str) else value


def read_number(value: Any) -> float | str | None:
    """Return a number, None for an empty value, or the text that is no number.

    The words for values that are not finite are numbers, in any form that programs write.
    """
    value = clean(value)
    if value is None or value == "":
        return None
    if isinstance(value, str):
        text = value.removesuffix("%").strip()
        if "_" in text:
            # Python's numbers can have underscores, those of other programs cannot.
            return value
        try:
            return float(text)
        except ValueError:
            return value
    try:
        return float(value)
    except (TypeError, ValueError):
        return str(value)
    except OverflowError:
        # An integer of JSON may have any number of digits; a text of as many is infinite too.
        return math.inf if value > 0 else -math.inf


def read_values(
    table: RunTable, metric: str, states: list[State], notes: list[str]
) -> list[float | None]:
    """Return the value of each run: NaN if it has failed, None if it has not ended."""
    values: list[float | None] = []
    percent = []
    empty = 0
    not_finite = 0
    texts = 0
    for row, place, state in zip(table.rows, table.places, states, strict=True):
        if state != "done":
            values.append(math.nan if state == "failed" else None)
            continue
        written = clean(row.get(metric))
        number = read_number(written)
        if isinstance(number, str):
            raise ConfigError(f"{place}: {metric}: '{number}' is not a number")
        if number is not None and math.isfinite(number):
            _check_digits(f"{place}: {metric}", written, number)
            percent.append(isinstance(written, str) and written.endswith("%"))
        if isinstance(written, str) and written:
            texts += table.metrics is not None and written.lower() not in NOT_FINITE
        if number is None:
            empty += 1
            number = math.nan
        elif not math.isfinite(number):
            not_finite += 1
            number = math.nan
        values.append(number)
    if any(percent) and not all(percent):
        raise ConfigError(
            f"{table.source}: {metric}: has numbers with and without a percent sign; use one form"
        )
    if percent and all(percent):
        notes.append(f"All values of '{metric}' have a percent sign; differences are in points.")
    if empty:
        notes.append(f"Failed: {plural(empty, 'run')} without a value of '{metric}'.")
    if not_finite:
        notes.append(f"Failed: {plural(not_finite, 'run')} with a value that is not finite.")
    if texts:
        notes.append(f"'{metric}' is a text in {plural(texts, 'run')}, read as a number.")
    return values


def _check_digits(where: str, written: Any, number: float) -> None:
    """Raise ConfigError for a value whose digits or size floating-point numbers do not have."""
    if number and not SMALLEST <= abs(number) <= LARGEST:
        raise ConfigError(
            f"{where}: {written} is beyond the sizes that can be compared ({SMALLEST:g} to"
            f" {LARGEST:g}); multiply the column by a power of ten"
        )
    text = str(written).lstrip("+-")
    if text.isdecimal() and int(text) != int(abs(number)):
        raise ConfigError(
            f"{where}: {written} has more digits than a 64-bit floating-point number; subtract the"
            " same number from the whole column, which changes no difference"
        )


def check_units(
    where: str, values: Mapping[str, Sequence[float]], goal: Literal["max", "min"]
) -> None:
    """Raise ConfigError if some variants have shares and others have percentages.

    `values` are the finite values by variant, without percent signs. A loss is no share.
    """
    metric = where.rpartition(": ")[2].lower()
    if goal == "min" and not any(part in metric for part in SHARES_OF_MIN):
        return
    shares = {}
    percentages = {}
    for variant, group in values.items():
        sizes = [abs(value) for value in group]
        if not sizes or not any(sizes):
            continue
        if max(sizes) <= 1:
            shares[variant] = statistics.median(sizes)
        elif min(sizes) > 1 and max(sizes) <= 100:
            percentages[variant] = statistics.median(sizes)
    for share, low in shares.items():
        for percentage, high in percentages.items():
            if low and PERCENT[0] <= high / low <= PERCENT[1]:
                raise ConfigError(
                    f"{where}: '{share}' has shares (such as {low:g}) and '{percentage}' has"
                    f" percentages (such as {high:g}); write all of them in one unit, or a % sign"
                    " behind every number if they are in one unit already"
                )
