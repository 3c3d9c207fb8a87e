"""Tests of corrections, and of the numbers of seeds that a star or a decision needs."""

import math

import numpy as np
import pytest
from scipy import stats as scipy_stats

from lit_attn.report.statistics import stats


@pytest.mark.parametrize("comparisons", [1, 2, 7, 40])
def test_pairs_for_a_star_are_the_fewest_for_holms_test(comparisons: int) -> None:
    pairs = stats.pairs_for_a_star(comparisons)
    other_p_values = [1.0] * (comparisons - 1)
    assert stats.holm([2 / 2**pairs, *other_p_values])[0] <= 0.05
    assert stats.holm([2 / 2 ** (pairs - 1), *other_p_values])[0] > 0.05


def test_holm_equals_a_computation_by_hand() -> None:
    assert stats.holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert stats.holm([0.5, 0.9]) == [1.0, 1.0]
    assert stats.holm([0.2]) == [0.2]
    assert stats.holm([]) == []
    # Once one comparison fails, all that follow fail (Holm 1979).
    assert stats.holm([0.01, 0.015, 0.9, 0.02]) == pytest.approx([0.04, 0.045, 0.9, 0.045])


def test_holm_keeps_the_order_and_controls_the_error() -> None:
    generator = np.random.default_rng(5)
    p = generator.uniform(size=(4000, 10))
    adjusted = np.array([stats.holm(row.tolist()) for row in p])
    assert (adjusted >= p).all()
    for raw, new in zip(p[:50], adjusted, strict=False):
        assert (np.diff(new[np.argsort(raw)]) >= 0).all()
    assert (adjusted <= 0.05).any(axis=1).mean() == pytest.approx(0.05, abs=0.01)


def test_the_correction_over_studies_equals_a_computation_by_hand() -> None:
    adjusted = stats.holm_over_studies([[0.01, 0.2], [0.02], []])
    # Both studies have a comparison left at 0.01 and 0.02; only the first one has at 0.2.
    assert adjusted == [pytest.approx([0.02, 0.2]), pytest.approx([0.04]), []]


@pytest.mark.parametrize("effect", [0.0, 3.0])
def test_the_correction_over_studies_controls_the_error(effect: float) -> None:
    """Three studies have four comparisons each; the first of each study may have an effect."""
    generator = np.random.default_rng(9)
    errors, runs = 0, 500
    for _ in range(runs):
        studies = []
        for _ in range(3):
            values = generator.normal(size=(5, 9))
            values[1] += effect
            studies.append(stats.joint_sign_flip(values[1:] - values[0]))
        adjusted = stats.holm_over_studies(studies)
        errors += any(min(p[1:] if effect else p) <= 0.05 for p in adjusted)
    assert errors / runs <= 0.07


@pytest.mark.parametrize("comparisons", [1, 10])
def test_pairs_for_a_decision_are_the_fewest_of_a_simultaneous_interval(comparisons: int) -> None:
    differences = [0.1, 0.9, 0.5, -0.4, 0.6]
    for count in range(2, 200):
        quantile = scipy_stats.t.ppf(1 - 0.05 / comparisons / 2, count - 1)
        half = quantile * np.std(differences, ddof=1) / math.sqrt(count)
        if np.mean(differences) > half:
            break
    decided = stats.pairs_for_decision(differences, 0.05, comparisons, 0.01, (2, 200))
    assert decided == count


@pytest.mark.parametrize(("effect", "expected"), [(0.3, 90), (0.5, 34), (1.0, 10), (1.5, 6)])
def test_pairs_for_power_equal_the_published_sample_sizes(effect: float, expected: int) -> None:
    """Paired t test, two-sided 0.05, power 0.80: the sample sizes that G*Power prints."""
    assert stats.pairs_for_power(effect) == expected


def test_pairs_for_power_reach_the_power() -> None:
    runs = np.random.default_rng(6).normal(1.0, 1.0, (20_000, 10))
    power = (scipy_stats.ttest_1samp(runs, 0, axis=1).pvalue < 0.05).mean()
    assert power == pytest.approx(0.80, abs=0.02)


def test_more_than_a_thousand_pairs_for_power_are_not_counted() -> None:
    assert stats.pairs_for_power(0.0887) <= 1000
    assert stats.pairs_for_power(0.0885) == stats.pairs_for_power(0.01) == 1001


@pytest.mark.slow
def test_the_range_of_seeds_needed_covers_the_true_number() -> None:
    """The true effect is one standard deviation, for which ten pairs reach the power."""
    generator = np.random.default_rng(10)
    ranges = [stats.seeds_needed(d.tolist()) for d in generator.normal(1.5, 1.5, (1000, 8))]
    reported = [limits for limits in ranges if limits is not None]
    # Without a range the interval of the effect contains 0, which is a miss of 0.02 at most.
    missed = sum(not low <= 10 <= high for low, high in reported)
    assert 0.005 <= missed / len(ranges) <= 0.05


def test_seeds_needed_are_none_where_the_interval_contains_zero() -> None:
    generator = np.random.default_rng(11)
    for d in generator.normal(0.3, 1, (200, 5)):
        interval = stats.paired_interval(d.tolist())
        has_range = stats.seeds_needed(d.tolist()) is not None
        assert has_range == (interval.low > 0 or interval.high < 0)


def test_seeds_needed_are_none_without_a_spread() -> None:
    assert stats.seeds_needed([0.1]) is None
    assert stats.seeds_needed([0.1, -0.1]) is None
    assert stats.seeds_needed([0.2, 0.2]) is None
    # Rounding errors leave a small spread.
    assert stats.seeds_needed([0.3, 0.1 + 0.2, 0.3]) is None
    low, high = stats.seeds_needed([100.0, 100.0, 100.2])
    assert (low, high) == (2, 2)
