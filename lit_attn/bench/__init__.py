"""Benchmarks of mechanisms; a mechanism that disagrees with its reference gets no number."""

# Suffixes of a preset's name: half as many heads of the same width, and windows in some layers.
HALF_HEADS, WINDOWS = "/half-heads", "/windows"
