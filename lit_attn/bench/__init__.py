"""Benchmarks of mechanisms; a mechanism that disagrees with its reference gets no number."""

# Suffix of a preset's name: windows in some layers.
WINDOWS = "/windows"
