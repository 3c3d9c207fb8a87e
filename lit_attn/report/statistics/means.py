"""Sums of means of independent groups, with Student's intervals and tests (Welch 1947)."""

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from scipy import special

from lit_attn.report.statistics.stats import find_moments, student_quantile


class Mean(NamedTuple):
    """A mean, its variance, and the degrees of freedom of the variance.

    `is_residual` is True if the variance is that of the residuals of the baseline's law.
    """

    value: float
    variance: float
    freedom: float
    is_residual: bool = False


def combine_means(parts: Iterable[tuple[float, Sequence[float]]]) -> Mean:
    """Return the sum of factor times mean over independent groups of at least two values."""
    means = []
    for factor, values in parts:
        mean, variance = find_moments(values)
        means.append(Mean(factor * mean, factor**2 * variance / len(values), len(values) - 1))
    return add_means(means)


def find_p(mean: Mean) -> float | None:
    """Return the two-sided p of the t test that a mean is 0, None without a known variance."""
    if mean.freedom <= 0 or mean.variance <= 0:
        return None
    t = abs(mean.value) / math.sqrt(mean.variance)
    return float(2 * special.stdtr(mean.freedom, -t))


def add_means(means: Sequence[Mean]) -> Mean:
    """Return the sum of independent means, with degrees of freedom by Welch and Satterthwaite."""
    value = math.fsum(mean.value for mean in means)
    variance = math.fsum(mean.variance for mean in means)
    residual = [mean for mean in means if mean.is_residual]
    parts = [(mean.variance, mean.freedom) for mean in means if not mean.is_residual]
    if residual:
        # Their variances are multiples of one estimate.
        parts.append((math.fsum(mean.variance for mean in residual), residual[0].freedom))
    divisor = math.fsum(part**2 / freedom for part, freedom in parts if freedom > 0)
    is_known = all(freedom > 0 for _, freedom in parts)
    return Mean(value, variance, variance**2 / divisor if is_known and divisor > 0 else 0.0)


def find_ends(mean: Mean, confidence: float) -> tuple[float | None, float | None]:
    """Return the ends of Student's interval of a mean, None if its variance is unknown."""
    if mean.freedom <= 0:
        return None, None
    half = student_quantile(mean.freedom, (1 + confidence) / 2) * math.sqrt(mean.variance)
    return mean.value - half, mean.value + half
