"""Benchmarks of mechanisms; nothing is measured if one disagrees with its reference."""

# Suffix of a preset's name: windows in some layers.
WINDOWS = "/windows"
