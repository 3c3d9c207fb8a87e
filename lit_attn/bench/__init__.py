"""Benchmarks: every figure is a ratio within one run, refused where the numbers are not right."""
