"""Futility: the probability that a variant still gets a verdict with the planned seeds.

The rule ends a variant whose probability is below FUTILITY. It never gives a star, and it need not
be obeyed (a non-binding rule), so it cannot make false stars more frequent as long as the
correction for several comparisons counts variants that have ended (`fill_ended`).
"""

import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from lit_attn.report.statistics import stats
from lit_attn.report.statistics.stats import Floats

FUTILITY = 0.05
"""Probability of a verdict below which a variant ends."""

MOST_SIMULATED = 100
"""Largest number of pairs whose sign-flip test is simulated; beyond, a t test takes its place."""


@lru_cache(maxsize=10_000)
def predict_verdict(
    differences: tuple[float, ...],
    planned: int,
    comparisons: int,
    level: float,
    margin: float | None = None,
) -> float:
    """Return the probability that a variant has a verdict after `planned` pairs.

    This is the conditional power, given the `differences` of the first pairs, averaged over the
    effects and spreads that these differences leave possible (predictive power; Spiegelhalter,
    Freedman and Blackburn, "Monitoring clinical trials: conditional or predictive power?",
    Controlled Clinical Trials 7, 1986). Differences are normal, with the prior 1 / variance.
    Without a `margin` the verdict is a star of the joint test (`stats.share_of_stars`). With one it
    is better, worse or equivalent by the simultaneous interval. Returns 1 with fewer than two
    pairs, and without variation: nothing can be predicted then.
    """
    done = len(differences)
    measured = np.array(differences)
    if done < 2 or measured.std() <= stats.TIE * np.abs(measured).max():
        return 1.0
    completed = _complete(measured, planned, stats.count_studies(comparisons))
    if margin is None and planned <= MOST_SIMULATED:
        return stats.share_of_stars(completed, comparisons, level)

    mean = np.abs(completed.mean(axis=1))
    quantile = stats.student_quantile(planned - 1, 1 - level / comparisons / 2)
    half = quantile * completed.std(axis=1, ddof=1) / math.sqrt(planned)
    is_decided = (mean > half) & stats.can_have_star(planned, level)
    if margin is not None:
        is_decided |= mean + half < margin
    return float(is_decided.mean())


def _complete(measured: Floats, planned: int, studies: int) -> Floats:
    """Return `studies` continuations (S, planned) of the measured differences (n,)."""
    done = len(measured)
    scores, spreads, further = _draw_standard(done, planned, studies)
    deviation = measured.std(ddof=1) * spreads
    mean = measured.mean() + scores * deviation / math.sqrt(done)
    future = mean[:, None] + deviation[:, None] * further
    return np.hstack([np.broadcast_to(measured, (studies, done)), future])


@lru_cache(maxsize=100)
def _draw_standard(done: int, planned: int, studies: int) -> tuple[Floats, Floats, Floats]:
    """Return seeded draws: of the mean (S,), of the relative deviation (S,), of further pairs."""
    generator = np.random.default_rng(0)
    scores = generator.normal(size=studies)
    spreads = np.sqrt((done - 1) / generator.chisquare(done - 1, size=studies))
    further = generator.normal(size=(studies, planned - done))
    return scores, spreads, further


def find_end(
    differences: Sequence[float | None],
    planned: int,
    comparisons: int,
    level: float,
    margin: float | None = None,
) -> tuple[int, float] | None:
    """Return after how many seeds a variant ends, and the probability of a verdict then.

    `differences` are those of the first seeds in their planned order, None for a seed that failed
    in the variant or in the baseline. Returns None for a variant that does not end. The answer
    depends on the first seeds alone, so it is the same whichever cells have ended besides.
    """
    pairs: list[float] = []
    remaining = planned
    for done, difference in enumerate(differences[: planned - 1], 1):
        if difference is None:
            remaining -= 1
            continue
        pairs.append(difference)
        if len(pairs) >= remaining:
            return None
        power = predict_verdict(tuple(pairs), remaining, comparisons, level, margin)
        if power < FUTILITY:
            return done, power
    return None


def fill_ended(differences: Floats, is_ended: NDArray[np.bool_]) -> Floats:
    """Return differences (variants, n) in which variants that have ended count with all seeds.

    The joint test corrects for the largest of all statistics. A variant with fewer seeds has
    smaller ones, so the variants that a rule has kept, which are the promising ones, would be
    corrected for fewer comparisons than the plan has. Each missing difference of an ended variant
    is therefore one of its measured differences, in turn, without their mean. NaN of other variants
    becomes 0.
    """
    filled = differences.copy()
    for row in np.flatnonzero(is_ended):
        is_missing = np.isnan(filled[row])
        measured = filled[row][~is_missing]
        if len(measured) > 1:
            filled[row, is_missing] = np.resize(measured - measured.mean(), is_missing.sum())
    return np.nan_to_num(filled)
