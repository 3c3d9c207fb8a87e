"""Comparison of texts that two processors have written.

Vector units and mathematical libraries differ in the last digits of a float64. A report rounds its
numbers to twelve digits (`lit_attn.report.numbers`), which leaves one unit of the twelfth digit
where a number lies between two roundings.
"""

import re

import pytest

NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e[+-]?\d+)?")

TWELFTH_DIGIT = 1.1e-11
"""Relative tolerance: one unit of the twelfth digit of a number that starts with 1."""

COORDINATE = 1.1e-3
"""Absolute tolerance: one unit of the third decimal of a coordinate in an SVG file."""


def assert_same_text(text: str, expected: str, absolute: float = 0.0) -> None:
    """Fail unless two texts are equal up to one unit of the twelfth digit of their numbers."""
    if text == expected:
        return
    assert NUMBER.split(text) == NUMBER.split(expected)
    numbers = [float(number) for number in NUMBER.findall(text)]
    wanted = [float(number) for number in NUMBER.findall(expected)]
    assert numbers == pytest.approx(wanted, rel=TWELFTH_DIGIT, abs=absolute)
