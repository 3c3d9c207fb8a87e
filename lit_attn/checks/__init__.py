"""Comparisons of attention layers with their formulas."""
