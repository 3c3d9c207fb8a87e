"""Time and memory of mechanisms."""

# Suffix of a preset's name: windows in some layers.
WINDOWS = "/windows"
