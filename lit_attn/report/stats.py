"""Statistics for few seeds: what n paired runs can show, and no more.

Every function takes the per-seed differences to the baseline, (n,). The t interval is used at every
n: at n = 3 a bootstrap interval that claims 95 % covers 74 % (docs/statistics.md).
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

# Up to here all 2^n sign patterns are enumerated; beyond, this many are drawn.
EXACT_UP_TO = 20
DRAWS = 1_000_000


class Interval(NamedTuple):
    """A mean and its two-sided confidence interval."""

    mean: float
    low: float
    high: float


def paired_interval(differences: Sequence[float], confidence: float = 0.95) -> Interval | None:
    """Student's t interval of the mean difference; None with fewer than two pairs."""
    from scipy import stats

    d = np.asarray(differences, dtype=float)
    if len(d) < 2:
        return None
    half = stats.t.ppf((1 + confidence) / 2, len(d) - 1) * d.std(ddof=1) / np.sqrt(len(d))
    return Interval(float(d.mean()), float(d.mean() - half), float(d.mean() + half))


def sign_flip_p(differences: Sequence[float]) -> float | None:
    """Two-sided p of the sign-flip test on the mean difference; None without pairs.

    If the variant changes nothing, every difference is as likely to have the other sign. p is the
    share of the 2^n sign patterns whose |mean| is at least the observed one: exact, and never below
    `sign_flip_floor`. Beyond 20 pairs it is estimated from a million seeded patterns, the observed
    one included.
    """
    d = np.asarray(differences, dtype=float)
    if not len(d):
        return None
    observed = abs(d.sum())
    # Rounding must not decide whether a pattern ties with the observed one.
    threshold = observed * (1 - 1e-12)
    if len(d) <= EXACT_UP_TO:
        return float(np.mean(np.abs(_all_signed_sums(d)) >= threshold))
    generator = np.random.default_rng(0)
    sums = np.zeros(DRAWS)
    for value in d:
        sums += value * (2 * generator.integers(0, 2, DRAWS, dtype=np.int8) - 1)
    return float((1 + np.sum(np.abs(sums) >= threshold)) / (1 + DRAWS))


def sign_flip_floor(n: int) -> float:
    """The smallest p that n pairs can reach: both patterns of equal signs, 2 / 2^n."""
    return min(1.0, 2.0 / 2.0**n)


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's step-down adjustment: controls the chance of any false positive in the family."""
    order = sorted(range(len(p_values)), key=lambda i: p_values[i])
    adjusted = [0.0] * len(p_values)
    running = 0.0
    for rank, index in enumerate(order):
        running = max(running, (len(p_values) - rank) * p_values[index])
        adjusted[index] = min(1.0, running)
    return adjusted


def seeds_needed(
    differences: Sequence[float], power: float = 0.8, alpha: float = 0.05, most: int = 1000
) -> int | None:
    """Pairs a two-sided paired t test needs for `power`, were the observed effect the true one.

    None where it cannot be said (fewer than two pairs, no difference at all) or is beyond `most`.
    """
    from scipy import stats

    d = np.asarray(differences, dtype=float)
    if len(d) < 2 or not d.mean():
        return None
    deviation = d.std(ddof=1)
    if deviation == 0:
        return 2
    n = np.arange(2, most + 1)
    shift = abs(d.mean()) / deviation * np.sqrt(n)
    critical = stats.t.ppf(1 - alpha / 2, n - 1)
    reached = stats.nct.sf(critical, n - 1, shift) + stats.nct.cdf(-critical, n - 1, shift) >= power
    return int(n[reached.argmax()]) if reached.any() else None


def _all_signed_sums(d: NDArray[np.float64]) -> NDArray[np.float64]:
    """Sums of d under all 2^n sign patterns."""
    sums = np.zeros(1)
    for value in d:
        sums = np.concatenate([sums + value, sums - value])
    return sums
