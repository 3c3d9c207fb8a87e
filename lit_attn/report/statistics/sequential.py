"""Levels of tests at looks at a study that still runs: alpha spending over its planned seeds.

A look after n of N planned seeds has the information fraction t = n / N. The two-sided spending
function of O'Brien-Fleming type, 4 (1 - Phi(z / sqrt(t))) with z the upper alpha / 4 quantile of
the normal distribution, is the error that all looks up to t may use (Lan and DeMets, "Discrete
sequential boundaries for clinical trials", Biometrika 70, 1983). The levels below assume a look
after every seed. Fewer looks make fewer errors, so no record of earlier looks is needed.
"""

import math
from functools import lru_cache

import numpy as np
from scipy import special

from lit_attn.report.numbers import round_number
from lit_attn.report.statistics.stats import Floats

MOST_LOOKS = 100
"""Number of planned seeds up to which levels are computed for a look after every seed; for more
seeds they are those of a study that is watched all the time, which are smaller."""

REACH, STEP = 6.0, 0.01
"""Range and step of the grid of the Brownian motion, in standard deviations of its last value."""

NEGLIGIBLE = 1e-6
"""Spent error below which a look hardly changes the paths that later looks see."""


def spent_alpha(fraction: float, alpha: float) -> float:
    """Return the error that all looks up to an information `fraction` (0 to 1) may use."""
    if fraction <= 0:
        return 0.0
    limit = -float(special.ndtri(alpha / 4)) / math.sqrt(min(fraction, 1.0))
    return 4 * float(special.ndtr(-limit))


def look_level(done: int, planned: int, alpha: float) -> float:
    """Return the largest p with a star after `done` of `planned` seeds.

    At the last seed it is what the other looks have left of `alpha`.
    """
    if done <= 0:
        return 0.0
    if planned <= MOST_LOOKS:
        return _list_levels(planned, alpha)[min(done, planned) - 1]
    return round_number(spent_alpha(done / planned, alpha) / 2)


@lru_cache(maxsize=100)
def _list_levels(planned: int, alpha: float) -> tuple[float, ...]:
    """Return the level of a look after each of `planned` seeds.

    The test statistics of the looks are values of a Brownian motion B at the fractions t. Its
    density on paths that have crossed no bound yet goes from look to look by a convolution
    (Armitage, McPherson and Rowe, "Repeated significance tests on accumulating data", 1969). The
    bound of a look leaves outside what the spending function grants to it.
    """
    values = np.arange(-REACH, REACH + STEP / 2, STEP)
    kernel = _normal_density(values, 1 / planned)
    density = kernel
    levels = []
    spent = 0.0
    for look in range(1, planned + 1):
        fraction = look / planned
        if look > 1:
            density = np.convolve(density, kernel, mode="same") * STEP
        granted = spent_alpha(fraction, alpha) - spent
        spent += granted
        if granted < NEGLIGIBLE:
            levels.append(round_number(granted))
            continue
        bound = _find_bound(values, density, granted)
        density = np.where(np.abs(values) < bound, density, 0.0)
        levels.append(round_number(2 * float(special.ndtr(-bound / math.sqrt(fraction)))))
    return tuple(levels)


def _normal_density(values: Floats, variance: float) -> Floats:
    density: Floats = np.exp(-(values**2) / (2 * variance)) / math.sqrt(2 * math.pi * variance)
    return density


def _find_bound(values: Floats, density: Floats, granted: float) -> float:
    """Return the bound outside of which a symmetric density has the probability `granted`."""
    middle = len(values) // 2
    # Half a step belongs to each side of a value of the grid.
    outside = 2 * STEP * (np.cumsum(density[::-1])[::-1] - density / 2)
    return float(np.interp(-granted, -outside[middle:], values[middle:]))
