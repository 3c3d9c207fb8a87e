"""The record of a floor, which data modules return and the report reads."""

from typing import NamedTuple

import numpy as np

FREQUENT_CLASS = "most frequent class"


class Floor(NamedTuple):
    """Values that a rule without attention reaches on a split, by metrics such as "accuracy".

    `rule` names the rule in a few words of a table's row, `conditions` what it was fitted on.
    """

    rule: str
    values: dict[str, float]
    conditions: str


def spread_places(count: int, most: int) -> list[int]:
    """Return at most `most` of the numbers below `count`, evenly spread."""
    places: list[int] = np.linspace(0, count - 1, min(count, most)).astype(int).tolist()
    return places
