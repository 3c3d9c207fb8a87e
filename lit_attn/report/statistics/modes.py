"""Values that fall in two groups, such as the accuracies of seeds that learn a task or do not.

The mean of such values lies where no value is, and their standard deviation says how many seeds are
in each group. So the groups are found by the one thing that two modes have and a tail has not: an
empty stretch between them that is much wider than both groups together.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

GAPS = {1: 0.8, 2: 0.65}
LEAST_GAP = 0.5
"""Share of the range of all values that an empty stretch takes up from which on there are groups.

GAPS has it by the number of values in the smaller group: a long tail has one such value more often
than three. docs/simulations.md says how often values with one mode have such a stretch.
"""

FEWEST = 10
"""Fewest values that can show two groups."""


class Group(NamedTuple):
    """Smallest and largest value of a group."""

    low: float
    high: float


class Groups(NamedTuple):
    """The two groups of all values, and the number of values of each variant in the higher one."""

    lower: Group
    higher: Group
    counts: dict[str, int]


def find_groups(values: Mapping[str, Sequence[float]]) -> Groups | None:
    """Return the groups of the values of all variants, or None if there is one group.

    At least one variant has values in both groups: otherwise its mean says in which one it is.
    """
    pooled = np.sort(np.concatenate([np.asarray(group, dtype=float) for group in values.values()]))
    if len(pooled) < FEWEST or pooled[0] == pooled[-1]:
        return None
    # No difference of values in this unit overflows.
    unit = float(np.abs(pooled).max())
    gaps = np.diff(pooled / unit)
    place = int(gaps.argmax())
    smaller = min(place + 1, len(gaps) - place)
    if gaps[place] < GAPS.get(smaller, LEAST_GAP) * gaps.sum():
        return None
    lower = Group(float(pooled[0]), float(pooled[place]))
    higher = Group(float(pooled[place + 1]), float(pooled[-1]))
    counts = {}
    is_split = False
    for name, group in values.items():
        counts[name] = sum(value >= higher.low for value in group)
        is_split |= 0 < counts[name] < len(group)
    return Groups(lower, higher, counts) if is_split else None
