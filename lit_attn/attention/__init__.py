"""The attention layer: its choices (`spec`), fast form (`layer`) and formulas (`reference`)."""
