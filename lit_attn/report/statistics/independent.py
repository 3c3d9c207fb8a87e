"""Tests and intervals for independent runs: groups of any size that share no seeds.

The statistic is Welch's t (`studentise`), whose permutation test is exact if variant and baseline
have the same distribution, and holds for large groups with equal means and unequal spreads
(Janssen, "Studentized permutation tests for non-i.i.d. hypotheses", 1997). That of scores, such as
those of the log-rank test, is the difference of their means (`standardise`).
"""

import itertools
import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from lit_attn.report.statistics.means import combine_means
from lit_attn.report.statistics.stats import (
    DRAWS,
    Floats,
    Interval,
    find_unit,
    least_half_width,
    student_quantile,
)

MOST_EXACT = 50_000
"""Largest number of divisions into two groups that a test counts one by one."""

SMALLEST_GROUP = 2
"""A single run has no spread, so it can be compared with nothing."""

BLOCK = 2_000_000  # Largest number of keys of a block of permutations.
SAME = 1e-6  # Relative distance of statistics that are equal up to rounding.


Sample = tuple[Floats, Floats]
"""Values of a group, and those of the baseline."""


class Permutations(NamedTuple):
    """Number of permutations of a test, and whether they are all that exist."""

    number: int
    is_exact: bool


class _Moments(NamedTuple):
    """Size, sums and sums of squares of a group in many permutations."""

    size: int
    sums: Floats
    squares: Floats


Statistic = Callable[[_Moments, _Moments], Floats]
"""Statistic of two groups of scaled values in many permutations."""


def studentise(first: _Moments, second: _Moments) -> Floats:
    """Return |Welch's t| of two groups."""
    error = np.zeros_like(first.sums)
    for group in (first, second):
        variance = (group.squares - group.sums**2 / group.size) / (group.size - 1)
        error += np.maximum(variance, 0.0) / group.size
    return _find_ratio(first, second, error)


def standardise(first: _Moments, second: _Moments) -> Floats:
    """Return |difference of the means| over its standard deviation in all permutations."""
    size = first.size + second.size
    sums = first.sums + second.sums
    variance = (first.squares + second.squares - sums**2 / size) / (size - 1)
    return _find_ratio(first, second, variance * (1 / first.size + 1 / second.size))


def _find_ratio(first: _Moments, second: _Moments, error: Floats) -> Floats:
    """Return |difference of the means| over the root of `error`."""
    difference = first.sums / first.size - second.sums / second.size
    # Groups without any spread have a large statistic, not an infinite one.
    return np.abs(difference) / np.sqrt(np.maximum(error, 1e-12))


def correct_samples(
    samples: Sequence[Sample], draws: int = DRAWS, statistic: Statistic = studentise
) -> list[float]:
    """Return the p of each group against the baseline, corrected for all groups.

    A sample is a group and the baseline, whose values can depend on the group, such as its ranks.
    p is that of the step-down max-T test (Westfall and Young, "Resampling-Based Multiple Testing",
    1993, algorithm 4.1), and never smaller than that of the group's own test. All groups need
    SMALLEST_GROUP values. The order of the values within a group does not matter.
    """
    samples = [(np.sort(group), np.sort(baseline)) for group, baseline in samples]
    uncorrected = [group_p(baseline, group, draws, statistic) for group, baseline in samples]
    if len(samples) < 2:
        return uncorrected
    joint = _step_down(samples, draws, statistic)
    return [max(first, second) for first, second in zip(uncorrected, joint, strict=True)]


def group_p(
    baseline: Floats, group: Floats, draws: int = DRAWS, statistic: Statistic = studentise
) -> float:
    """Return the two-sided p of the permutation test of two groups."""
    return _find_group_p(tuple(baseline.tolist()), tuple(group.tolist()), draws, statistic)


@lru_cache(maxsize=1000)
def _find_group_p(
    first: tuple[float, ...], second: tuple[float, ...], draws: int, statistic: Statistic
) -> float:
    """Return the p of `group_p`, which a comparison needs alone and before its correction."""
    baseline = np.array(first)
    group = np.array(second)
    values = _scale(np.concatenate([group, baseline]))
    size = len(group)
    observed = _observe(baseline, group, statistic)
    threshold = observed * (1 - SAME)
    permutations = count_permutations(len(baseline), size)
    if not permutations.is_exact:
        statistics = _draw_statistics([(group, baseline)], draws, statistic)
        return float((1 + (statistics >= threshold).sum()) / (1 + draws))
    chosen = np.array(list(itertools.combinations(range(len(values)), size)))
    sums = values[chosen].sum(axis=1)
    squares = (values[chosen] ** 2).sum(axis=1)
    rest = len(values) - size
    of_chosen = _Moments(size, sums, squares)
    of_rest = _Moments(rest, values.sum() - sums, (values**2).sum() - squares)
    return float((statistic(of_chosen, of_rest) >= threshold).mean())


def count_permutations(first: int, second: int) -> Permutations:
    """Return the permutations that the test of two groups of these sizes counts."""
    count = math.comb(first + second, second)
    return Permutations(count, True) if count <= MOST_EXACT else Permutations(DRAWS, False)


def welch_interval(
    baseline: Floats, group: Floats, confidence: float, resolution: float = 0.0
) -> Interval:
    """Return Welch's interval of the difference of two means.

    Its half is at least `least_half_width` of the smaller group, with `resolution` as the step.
    """
    # A power of two changes no digit, and no square overflows.
    unit = find_unit([*group.tolist(), *baseline.tolist()])
    parts = [(1.0, (group / unit).tolist()), (-1.0, (baseline / unit).tolist())]
    difference = combine_means(parts)
    half = 0.0
    if difference.variance > 0:
        quantile = student_quantile(difference.freedom, (1 + confidence) / 2)
        half = quantile * math.sqrt(difference.variance) * unit
    fewest = min(len(group), len(baseline))
    half = max(half, least_half_width(fewest, resolution, confidence))
    mean = difference.value * unit
    return Interval(mean, mean - half, mean + half)


def rank_runs(groups: Sequence[Sequence[float | None]], higher_is_better: bool) -> list[Floats]:
    """Return the ranks of the values of all groups, where None, a failed run, is the worst."""
    from scipy.stats import rankdata

    flat = [value for group in groups for value in group]
    sign = 1.0 if higher_is_better else -1.0
    ranks = rankdata([-math.inf if value is None else sign * value for value in flat])
    ends = np.cumsum([len(group) for group in groups])
    return np.split(ranks, ends[:-1])


def find_skewness(values: Floats) -> float:
    """Return the skewness of a group, 0 without any spread."""
    scaled = _scale(values)
    centred = scaled - scaled.mean()
    spread = math.sqrt(float((centred**2).mean()))
    return float((centred**3).mean()) / spread**3 if spread > 0 else 0.0


def _scale(values: Floats) -> Floats:
    """Return values around 0 with a range of 1, so that sums of squares lose no digits."""
    centred = values - np.median(values)
    width = float(np.ptp(values))
    return centred / width if width > 0 else centred


def _observe(baseline: Floats, group: Floats, statistic: Statistic) -> float:
    """Return the statistic of two groups, from scaled values as in their permutations."""
    scaled = _scale(np.concatenate([group, baseline]))
    moments = []
    for values in (scaled[: len(group)], scaled[len(group) :]):
        sums = np.array([values.sum()])
        moments.append(_Moments(len(values), sums, np.array([(values**2).sum()])))
    return float(statistic(*moments)[0])


def _step_down(samples: Sequence[Sample], draws: int, statistic: Statistic) -> list[float]:
    """Return the p of the step-down max-T test over all groups.

    The permutations of a group exchange only its values and the baseline's, so another group with a
    far mean or a wide spread changes nothing. A run of the baseline moves for two groups together
    with the probability with which both statistics then have the correlation that the common
    baseline causes.
    """
    observed = np.array([_observe(baseline, group, statistic) for group, baseline in samples])
    largest_first = np.argsort(-observed, kind="stable")
    statistics = _draw_statistics(samples, draws, statistic)
    # Maxima over a group and all groups with smaller statistics.
    ordered = statistics[:, largest_first[::-1]]
    maxima = np.maximum.accumulate(ordered, axis=1)[:, ::-1]
    exceeding = (maxima >= observed[largest_first] * (1 - SAME)).sum(axis=0)
    # From the most to the least significant group, p never decreases.
    stepped = np.maximum.accumulate((1 + exceeding) / (1 + draws))
    corrected = np.empty(len(samples))
    corrected[largest_first] = stepped
    result: list[float] = corrected.tolist()
    return result


def _draw_statistics(samples: Sequence[Sample], draws: int, statistic: Statistic) -> Floats:
    """Return the statistic of every group, (draws, groups), in `draws` seeded permutations."""
    generator = np.random.default_rng(0)
    runs = len(samples[0][1])  # Runs of the baseline.
    longest = runs + max(len(group) for group, _ in samples)
    block = max(1, BLOCK // longest)
    parts = []
    for start in range(0, draws, block):
        count = min(block, draws - start)
        shared = generator.random((count, runs))
        columns = []
        for group, baseline in samples:
            moments = _permute(baseline, group, shared, generator)
            columns.append(statistic(*moments))
        parts.append(np.stack(columns, axis=1))
    return np.concatenate(parts)


def _permute(
    baseline: Floats, group: Floats, shared: Floats, generator: np.random.Generator
) -> tuple[_Moments, _Moments]:
    """Return the moments of a group and of the other runs in one permutation for each row.

    The rows are those of `shared`, the baseline's keys. Every run has a random key, and the runs
    with the smallest keys are the group.
    """
    size = len(group)
    values = _scale(np.concatenate([group, baseline]))
    keys = generator.random((len(shared), len(values)))
    moves_together = generator.random(shared.shape) < size / len(baseline)
    keys[:, size:] = np.where(moves_together, shared, keys[:, size:])
    limits = np.partition(keys, size - 1, axis=1)[:, size - 1]
    is_chosen = (keys <= limits[:, None]).astype(float)
    sums = is_chosen @ values
    squares = is_chosen @ values**2
    first = _Moments(size, sums, squares)
    second = _Moments(len(baseline), values.sum() - sums, (values**2).sum() - squares)
    return first, second
