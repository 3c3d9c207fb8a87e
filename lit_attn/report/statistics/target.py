"""Tests of one group of runs against a fixed target, also while more runs are made.

The e-value compares Student's t of the runs under effects above the target with t under a mean at
the target. Its effects, in standard deviations, have the density of a normal distribution around 1
with the standard deviation 1 / 2, above 0. If the mean is at the target or on its wrong side, the
e-value after any number of runs ever reaches 1 / level with a probability of at most `level`
(Ville's inequality), so runs can be judged after each of them. Source: Wang and Ramdas,
"Anytime-valid t-tests and confidence sequences for Gaussian means with unknown variance", 2025.
"""

import math
from collections.abc import Sequence

import numpy as np
from scipy import special

from lit_attn.report.statistics.stats import Floats, find_moments, find_unit

EFFECTS: Floats = np.linspace(0.05, 3, 40)
"""Effects of the alternative in standard deviations."""

CENTRE, WIDTH = 1.0, 0.5
"""Mean and standard deviation of the density of the effects.

With a level of .01 and an effect of one standard deviation 15.2 runs are needed on average, and 13
runs give the plain t test a power of .8.
"""

SIZES = 1500
"""Number of values of the root of the sum of squares over which an e-value is summed."""

MOST_RUNS = 1000
"""Largest number of runs that is suggested."""


def find_t(gains: Sequence[float]) -> float | None:
    """Return Student's t of the mean of `gains`, None with fewer than two or without a spread."""
    count = len(gains)
    if count < 2:
        return None
    unit = find_unit(gains)
    scaled = [gain / unit for gain in gains]
    mean, variance = find_moments(scaled)
    # Rounding errors can leave a small spread where there is none.
    if math.sqrt(variance) <= 1e-9 * max(abs(gain) for gain in scaled):
        return None
    return mean / math.sqrt(variance / count)


def student_p(t: float, count: int) -> float:
    """Return the one-sided p of the t test of `count` runs."""
    return float(special.stdtr(count - 1, -t))


def e_value(t: float, count: int) -> float:
    """Return the e-value of `count` runs with Student's t, at most 1e300."""
    logarithms = -(((EFFECTS - CENTRE) / WIDTH) ** 2) / 2
    logarithms -= special.logsumexp(logarithms)
    # The share of the sum of squares that the mean explains, with its sign.
    share = t / math.sqrt(t * t + count - 1)
    # The root of the sum of squares, in standard deviations, has a chi distribution.
    largest = math.sqrt(count) * (1 + EFFECTS[-1]) + 10
    roots = np.linspace(largest / SIZES, largest, SIZES)
    density = (count - 1) * np.log(roots) - roots**2 / 2
    density -= special.logsumexp(density)
    shifts = math.sqrt(count) * EFFECTS[:, None] * roots * share
    ratios = special.logsumexp(density + shifts, axis=1) - count * EFFECTS**2 / 2
    return math.exp(min(float(special.logsumexp(ratios + logarithms)), 690.0))


def runs_needed(t: float, count: int, level: float) -> int | None:
    """Return the runs after which the e-value reaches 1 / level if mean and spread stay.

    Returns None if MOST_RUNS do not suffice.
    """
    effect = t / math.sqrt(count)

    def is_enough(runs: int) -> bool:
        return e_value(effect * math.sqrt(runs), runs) >= 1 / level

    if effect <= 0 or not is_enough(MOST_RUNS):
        return None
    low, high = count, MOST_RUNS
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if is_enough(middle) else (middle, high)
    return high
