"""Statistics: arrays in, numbers out. Nothing here reads a record."""

from typing import Literal

from lit_attn.cells.records import StudyPairs

Pairs = Literal[StudyPairs, "none"]
"""Values of `pairs`; each is a test of significance (lit_attn.report.statistics.significance)."""

PAIRS: dict[Pairs, str] = {"seed": "the same seed is one pair", "none": "independent runs"}
"""Values of --pairs and their meaning in --help and in errors.

A table of other runs does not say which of them ended before an event, so it has no log-rank test.
"""
