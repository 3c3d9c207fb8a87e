"""Verdicts: comparisons of variants with the baseline, and the next action that can change one."""
