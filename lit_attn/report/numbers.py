"""Numbers as a report writes them: with the digits that are the same on every processor.

Vector units and mathematical libraries of two processors differ in the last of the 16 digits of a
float64. Every number in a CSV file, a page, a caption or a label of a figure is therefore rounded
to DIGITS significant digits before it is formatted. Records of cells keep all digits.
"""

import math
import string
from typing import Any

DIGITS = 12
"""Largest number of significant digits in a written number."""


def round_number(value: float) -> float:
    """Return `value` with DIGITS significant digits; integers keep all of theirs."""
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value


def write_number(value: float, form: str = "") -> str:
    """Return `value` as text in the format `form`, after rounding to DIGITS significant digits.

    A mean of 0.125 that one processor computes as 0.12499999999999999 is 0.13 on both.
    """
    return format(round_number(value), form)


def find_magnitude(value: float) -> int:
    """Return the decimal exponent of the first significant digit: -2 for 0.05, 1 for 20."""
    return math.floor(math.log10(abs(round_number(value))))


def fill(template: str, /, **values: Any) -> str:
    """Return `template` with its placeholders replaced; numbers are written by `write_number`."""
    return _NumberFormatter().format(template, **values)


class _NumberFormatter(string.Formatter):
    """Formatter of templates that rounds numbers before it formats them."""

    def format_field(self, value: Any, format_spec: str) -> str:
        return write_number(value, format_spec)
