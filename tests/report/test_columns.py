"""Columns of the result table: their definitions, and the numbers that they print."""

import pytest

from lit_attn.report.statistics.significance import OWN_TEST
from lit_attn.report.tables.columns import COLUMN_KEYS, NOTHING, PRINTERS, Scale, format_number


def test_every_printed_column_has_a_printer() -> None:
    assert set(COLUMN_KEYS) == set(PRINTERS)


@pytest.mark.parametrize(
    ("decision", "low", "high", "text"),
    [
        # A star needs 6 pairs at the level 0.05, whatever a t test needs.
        ("undecided", 3, 28, "6 to 28"),
        ("undecided", 3, 4, "6"),
        ("undecided", 40, 1001, "40 to > 1000"),
        ("better", 3, 28, NOTHING),
        ("equivalent", 3, 28, NOTHING),
    ],
)
def test_the_seeds_needed_fit_the_verdict(decision: str, low: int, high: int, text: str) -> None:
    record = {"decision": decision, "seeds_low": low, "seeds_high": high, "level": 0.05}
    record |= {"test": OWN_TEST, "is_below_floor": False}
    assert PRINTERS["seeds_needed"](record, Scale(2, "M", "M")) == text


@pytest.mark.parametrize(
    ("value", "form", "text"),
    [
        (1234567890.5, ".2f", "1234567890.50"),
        (1e10, ".2f", "1.00e+10"),
        (-2.3e230, "+.4f", "\N{MINUS SIGN}2.30e+230"),
        (12_345_678_901_234, ",d", "12,345,678,901,234"),
    ],
)
def test_a_large_number_has_a_power_of_ten(value: float, form: str, text: str) -> None:
    assert format_number(value, form) == text
