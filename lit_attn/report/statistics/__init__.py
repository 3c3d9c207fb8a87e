"""Statistics: arrays in, numbers out. Nothing here reads a record."""

from typing import Literal

Pairs = Literal["seed", "none"]
"""Values of `pairs`; each is a test of significance (lit_attn.report.statistics.significance)."""

PAIRS: dict[Pairs, str] = {"seed": "the same seed is one pair", "none": "independent runs"}
"""Meaning of each value in --help and in errors."""
