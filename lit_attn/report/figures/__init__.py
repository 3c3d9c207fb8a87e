"""Figures, and the tables of numbers that they draw."""
