"""Benchmarks of mechanisms.

Every time is also a ratio within one run, and a mechanism that does not compute what its reference
computes gets no number.
"""
