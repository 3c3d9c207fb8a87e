"""Networks around the attention layer, and their numbers of parameters and FLOPs."""

MEMBERS = ("vit", "language", "translation", "columns")
"""Modules that register members of the families when they are imported."""
