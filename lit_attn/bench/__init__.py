"""Benchmarks of mechanisms; a mechanism that disagrees with its reference gets no number."""
