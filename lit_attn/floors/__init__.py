"""Floors: what rules without attention reach on the data of a study."""
