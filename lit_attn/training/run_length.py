"""How much of a cell is run: all of it, a step to try it, or a few to time it."""

from typing import NamedTuple


class Limits(NamedTuple):
    """Steps of training, and batches of each evaluated split."""

    steps: int
    evaluation_batches: int


SMOKE = Limits(1, 1)
ESTIMATE = Limits(15, 2)


class Extent(NamedTuple):
    """All of a cell's steps and evaluations, and how many times a limited one goes into a whole.

    `looked` are the seconds that this run has looked at diagnostics, `looking` those of all.
    """

    steps: int
    evaluations: int
    evaluation_share: float
    looked: float
    looking: float
