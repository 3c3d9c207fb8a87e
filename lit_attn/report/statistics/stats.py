"""Statistics for few seeds: intervals, exact tests and corrections for several comparisons.

A difference is a variant's value minus the baseline's with the same seed; `differences` are those
of one variant, (n,). docs/simulations.md has the simulated coverage and power of the methods.
"""

import itertools
import math
import statistics
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import special

from lit_attn.report.numbers import round_number

Floats = NDArray[np.float64]

ALPHA = 0.05  # Level of a test before its correction over variants.
EXACT_UP_TO = 16  # Largest number of pairs for which a sign-flip test counts all sign patterns.
DRAWS = 20_000
"""Number of random sign patterns for more pairs; it keeps the standard error at 0.05 at 0.0015."""

MOST_KEPT = 100  # Largest number of pairs whose sign patterns stay in memory.
FEW = 5  # Largest number of values whose interval is as wide as a step of the metric.
TIE = 1e-4  # Relative distance of sums of differences that are equal up to rounding (float32).


class Interval(NamedTuple):
    """A mean and its two-sided confidence interval."""

    mean: float
    low: float
    high: float


def paired_interval(
    differences: Sequence[float], confidence: float = 0.95, resolution: float = 0.0
) -> Interval | None:
    """Return Student's t interval of the mean difference, or None with fewer than two pairs.

    Its half is at least `least_half_width`; `resolution` is the step of the differences.
    """
    count = len(differences)
    if count < 2:
        return None
    # A division by a power of two changes no digit, and no square of its result overflows.
    unit = find_unit(differences)
    scaled_mean, variance = find_moments([difference / unit for difference in differences])
    mean = scaled_mean * unit
    half = student_quantile(count - 1, (1 + confidence) / 2) * math.sqrt(variance / count) * unit
    half = max(half, least_half_width(count, resolution, confidence))
    return Interval(mean, mean - half, mean + half)


def describe_pairs(
    differences: Sequence[float], resolution: float = 0.0
) -> tuple[float, float | None, float | None]:
    """Return the mean of the differences of all seeds and the ends of its interval."""
    interval = paired_interval(differences, resolution=resolution)
    if interval is None:
        return statistics.fmean(differences), None, None
    return interval


def find_moments(values: Sequence[float]) -> tuple[float, float]:
    """Return mean and sample variance of at least two values, the same on every processor."""
    mean = math.fsum(values) / len(values)
    return mean, math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1)


def least_half_width(count: int, resolution: float, confidence: float) -> float:
    """Return the smallest half width of an interval of the mean of `count` rounded values.

    Equal values do not show that there is no variation. For two to FEW values the interval is at
    least `resolution` (a step of the values) wide, for two of them twice as wide. With more equal
    values, at most a share 1 - ((1 - confidence) / 2)^(1 / count) of all values lies one step away
    (Clopper and Pearson's limit), which moves the mean by this share of the step.
    """
    if count <= FEW:
        return resolution * max(0.5, 1 / (count - 1))
    largest_share: float = 1 - ((1 - confidence) / 2) ** (1 / count)
    return resolution * min(0.5, largest_share)


def find_unit(values: Iterable[float]) -> float:
    """Return the largest power of two that is at most the largest size, or 1 without a size."""
    largest = max((abs(value) for value in values), default=0.0)
    if not 0 < largest < math.inf:
        return 1.0
    _, exponent = math.frexp(largest)
    return math.ldexp(1.0, exponent - 1)


@lru_cache(maxsize=1000)
def student_quantile(freedom: float, share: float) -> float:
    """Return the quantile of Student's t, with as many digits as are the same everywhere."""
    return round_number(float(special.stdtrit(freedom, share)))


def crossed_interval(sums: Floats, weights: Floats) -> tuple[float, float | None, float | None]:
    """Return the standard error over test samples, and a 95 % interval over seeds and samples.

    `sums` (n, U) has the sum of the metric over the targets of each of U samples, `weights` (U,)
    the number of targets; a seed's value is the ratio of both totals. The standard error holds the
    seeds fixed. The interval, which needs two seeds and two samples, has the variance of crossed
    random effects, seeds + samples - interaction, and Satterthwaite's degrees of freedom. It is
    never narrower than Student's interval over the seeds alone.
    """
    n, count = sums.shape
    mean = float(sums.sum() / n / weights.sum())
    # Linearised ratio: each seed's mean of these values is its value minus the overall mean.
    values = count * (sums - mean * weights) / weights.sum()
    unit = find_unit(values.ravel().tolist())
    values /= unit
    seed_means = values.mean(axis=1)
    sample_means = values.mean(axis=0)
    seed_variance = float((seed_means**2).sum()) / max(1, n - 1) / n
    sample_variance = float((sample_means**2).sum()) / max(1, count - 1) / count
    standard_error = math.sqrt(sample_variance) * unit
    if min(n, count) < 2:
        return standard_error, None, None

    residuals = values - seed_means[:, None] - sample_means
    interaction = float((residuals**2).sum()) / ((n - 1) * (count - 1) * n * count)
    crossed_variance = seed_variance + sample_variance - interaction
    variance = max(crossed_variance, seed_variance, sample_variance)
    satterthwaite = seed_variance**2 / (n - 1) + sample_variance**2 / (count - 1)
    freedom = variance**2 / satterthwaite if satterthwaite else 1.0

    crossed_half = float(special.stdtrit(freedom, 0.975)) * math.sqrt(variance)
    student_half = float(special.stdtrit(n - 1, 0.975)) * math.sqrt(seed_variance)
    half = max(crossed_half, student_half) * unit
    return standard_error, mean - half, mean + half


def find_resolution(values: Iterable[float]) -> float:
    """Return the largest step of which all differences between `values` are multiples.

    For accuracies on 360 images it is a multiple of 100/360 percent. It is 0 for fewer than two
    distinct values, and if no step is far above the rounding errors.
    """
    distinct = np.unique(np.fromiter(values, dtype=float))
    if len(distinct) < 2:
        return 0.0
    # A division by a power of two changes no digit, and no difference in this unit overflows.
    unit = find_unit(distinct)
    distinct = distinct / unit
    gaps = distinct[1:] - distinct[0]
    # The values are often stored in float32, whose relative error is 6e-8. A huge value of another
    # run makes the differences of the others no less exact.
    tolerances = 1e-6 * np.maximum(np.abs(distinct[1:]), abs(distinct[0]))
    # A step is a whole part of the largest gap, and far above the tolerance.
    most_parts = math.floor(gaps[-1] / (20 * tolerances.max()))
    steps = gaps[-1] / np.arange(1, most_parts + 1)
    for gap, tolerance in zip(gaps, tolerances, strict=True):
        nearest_multiple = np.round(gap / steps) * steps
        steps = steps[np.abs(gap - nearest_multiple) <= tolerance]
    return float(steps.max(initial=0.0)) * unit


def joint_sign_flip(differences: Floats, draws: int = DRAWS) -> list[float]:
    """Return the p of each variant, adjusted for all of them: a step-down max-T sign-flip test.

    `differences` is (variants, n) with the same seeds in every row. A sign pattern flips a seed's
    differences in all variants together, which keeps their correlation. The statistic is the
    studentised mean; |sum| / sqrt(sum of squares), used here, orders the patterns in the same way.
    p is the share of the 2^n patterns whose statistic is at least the observed one, so it is never
    below 2 / 2^n; statistics that are equal up to rounding count against the variant.
    All patterns are counted up to 16 pairs; beyond, p is estimated from `draws` seeded patterns.
    Source: Westfall and Young, "Resampling-Based Multiple Testing", 1993, algorithm 4.1.
    """
    count, n = differences.shape
    if not count or not n:
        return [1.0] * count
    scaled = _scale(differences)
    observed = np.abs(scaled.sum(axis=1))
    order = np.argsort(observed, kind="stable")
    ordered = scaled[order]
    thresholds = (observed - TIE * np.abs(scaled).sum(axis=1))[order, None]
    exceeding = np.zeros(count, dtype=np.int64)
    patterns = 0
    for signs in _sign_blocks(n, draws, count):
        patterns += len(signs)
        statistics = np.abs(ordered @ signs.T)
        # `np.maximum.accumulate` takes twenty times as long (2026-11-29).
        for row in range(1, count):
            np.maximum(statistics[row], statistics[row - 1], out=statistics[row])
        exceeding += np.count_nonzero(statistics >= thresholds, axis=1)
    # Random patterns lack the observed one.
    lacking = int(n > EXACT_UP_TO)
    p_values = (exceeding + lacking) / (patterns + lacking)
    # From the most to the least significant variant, p never decreases.
    stepped = np.maximum.accumulate(p_values[::-1])[::-1]
    return np.minimum(stepped[np.argsort(order)], 1.0).tolist()


def rank_with_failures(
    values: Sequence[float | None], baseline: Sequence[float | None], higher_is_better: bool
) -> list[float]:
    """Return the signed ranks of the pairs' differences, with a failed seed worse than any value.

    None is a failed seed. A positive rank favours the variant, two failed seeds have rank 0.
    """
    from scipy.stats import rankdata

    ours = np.array(values, dtype=float)
    theirs = np.array(baseline, dtype=float)
    has_failed = np.isnan(ours)
    has_baseline_failed = np.isnan(theirs)
    cases = [has_failed & has_baseline_failed, has_failed, has_baseline_failed]
    differences = ours - theirs if higher_is_better else theirs - ours
    gains = np.select(cases, [0.0, -np.inf, np.inf], differences)
    sizes = np.abs(gains)
    finite = sizes[np.isfinite(sizes)]
    # Rounding makes equal differences unequal, so sizes are compared on a grid of 1e-5.
    if len(finite) and finite.max() > 0:
        sizes = np.round(sizes / finite.max(), 5)
    ranks = rankdata(sizes) - np.sum(sizes == 0)
    return np.where(sizes == 0, 0.0, np.sign(gains) * ranks).tolist()


def holm(p_values: Sequence[float]) -> list[float]:
    """Return the p values after Holm's step-down correction (1979) for several comparisons."""
    return [p for (p,) in holm_over_studies([[p] for p in p_values])]


def holm_over_studies(studies: Sequence[Sequence[float]]) -> list[list[float]]:
    """Correct p values that are already adjusted within each study for the number of studies.

    A p value is multiplied by the number of studies that still have a comparison with a p at least
    as large, and never falls below a smaller one's. This controls any false positive in any study.
    """
    largest = sorted(max(study) for study in studies if study)
    adjusted = {}
    running = 0.0
    for p in sorted(set(itertools.chain(*studies))):
        remaining_studies = len(largest) - bisect_left(largest, p)
        running = max(running, p * remaining_studies)
        adjusted[p] = min(1.0, running)
    return [[adjusted[p] for p in study] for study in studies]


def friedman_nemenyi(ranks: Floats, alpha: float) -> tuple[float, float]:
    """Return Friedman's p and Nemenyi's critical difference of mean ranks.

    `ranks` is (tasks, variants). Source: Demšar, "Statistical comparisons of classifiers over
    multiple data sets", 2006.
    """
    from scipy.stats import friedmanchisquare, studentized_range

    tasks, count = ranks.shape
    p = float(friedmanchisquare(*ranks.T).pvalue)
    quantile = studentized_range.ppf(1 - alpha, count, math.inf) / math.sqrt(2)
    return p, float(quantile * math.sqrt(count * (count + 1) / (6 * tasks)))


def t_power(effect: float, sizes: Sequence[Any], level: float) -> Any:
    """Return the power of a two-sided t test of one group, or of two, for a standardised effect.

    `sizes` are the numbers of values of each group, or arrays of such numbers.
    """
    freedom = sum(sizes) - len(sizes)
    # Beyond this shift scipy's series does not converge, and the power is 1.
    shift = np.minimum(abs(effect) / np.sqrt(sum(1 / size for size in sizes)), 100.0)
    return 1 - special.nctdtr(freedom, shift, special.stdtrit(freedom, 1 - level / 2))


def star_power(effect: float, n: int, comparisons: int, level: float) -> float:
    """Return the probability that the joint test of n pairs gives a variant p <= `level`.

    `effect` is the mean / sd of the variant's true differences; the other `comparisons` - 1
    variants have none. 1,000 studies with normal values of equal variance are simulated, or 250
    with more than 1,000 comparisons. One comparison and level / m give the power of Holm's test of
    m comparisons. More than 100 pairs are simulated as 100 pairs with an effect that is larger by
    sqrt(n / 100).
    """
    signs, noise, others = _simulate_noise(min(n, 100), comparisons, level)
    # A difference of two values with variance 1 has the standard deviation sqrt(2).
    differences = noise + effect * math.sqrt(2 * max(1.0, n / 100))
    scaled = _scale(differences)
    largest = np.maximum(others, np.abs(scaled @ signs.T))
    thresholds = np.abs(scaled.sum(axis=1)) - TIE * np.abs(scaled).sum(axis=1)
    p_values = (largest >= thresholds[:, None]).mean(axis=1)
    return float((p_values <= level).mean())


@lru_cache(maxsize=3)
def _simulate_noise(n: int, comparisons: int, level: float) -> tuple[Floats, Floats, Floats]:
    """Return sign patterns (P, n), a variant's noise (S, n), and maxima of the others (S, P).

    The maxima are the largest statistics of all other variants in S studies with P patterns.
    """
    generator = np.random.default_rng(0)
    # The cache would keep all of the patterns, of which few are used.
    signs = _signs.__wrapped__(n)
    # The half pattern makes up for rounding p to a multiple of 1 / count.
    count = min(4000, round(5.5 / level))
    if len(signs) > count:
        signs = generator.choice(signs, count, replace=False)
    # Each study draws values for every comparison.
    studies = 1000 if comparisons <= 1000 else 250
    baseline, variant = generator.normal(size=(2, studies, n))
    others = np.zeros((len(baseline), len(signs)))
    # One array for all variants: a new one for each takes four times as long (2026-11-24).
    sums = np.empty_like(others)
    for _ in range(comparisons - 1):
        scaled = _scale(generator.normal(size=baseline.shape) - baseline)
        np.abs(np.matmul(scaled, signs.T, out=sums), out=sums)
        np.maximum(others, sums, out=others)
    return signs, variant - baseline, others


def _scale(differences: Floats) -> Floats:
    """Return the rows divided by their root sums of squares; a row of zeros is unchanged."""
    # A power of two changes no digit, and no square overflows (`find_unit`).
    sizes = np.abs(differences).max(axis=1, keepdims=True, initial=0.0)
    _, exponents = np.frexp(sizes)
    scaled = differences / np.ldexp(1.0, exponents - 1)
    norms = np.sqrt((scaled**2).sum(axis=1, keepdims=True))
    return scaled / np.where(norms > 0, norms, 1.0)


def _sign_blocks(n: int, draws: int, count: int) -> Iterator[Floats]:
    """Yield the sign patterns of `_signs` in blocks.

    Thousands of pairs or of variants (`count`) then take little memory.
    """
    if n <= EXACT_UP_TO or (n <= MOST_KEPT and draws == DRAWS):
        signs = _signs(n)
        block = max(1, 200_000 // count)
        for start in range(0, len(signs), block):
            yield signs[start : start + block]
        return
    generator = np.random.default_rng(0)
    block = max(1, 2_000_000 // max(n, count))
    for start in range(0, draws, block):
        yield generator.choice([-1.0, 1.0], size=(min(block, draws - start), n))


@lru_cache(maxsize=8)
def _signs(n: int, draws: int = DRAWS) -> Floats:
    """Return sign patterns (P, n), without mirror images, or `draws` random ones for many pairs."""
    if n > EXACT_UP_TO:
        return np.random.default_rng(0).choice([-1.0, 1.0], size=(draws, n))
    # Bit i of a pattern's number is the sign of seed i; the last seed keeps its sign.
    numbers = np.arange(2 ** (n - 1))[:, None]
    is_flipped = numbers >> np.arange(n) & 1
    return np.where(is_flipped, -1.0, 1.0)
