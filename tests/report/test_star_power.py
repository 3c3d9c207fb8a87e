"""The power of the star, checked against simulations of the complete test and closed forms."""

import numpy as np
import pytest
from helpers.significance import sign_flip_p
from scipy import stats as scipy_stats

from lit_attn.report.statistics import stats
from lit_attn.report.statistics.significance import OWN_TEST


@pytest.mark.parametrize(
    ("n", "comparisons", "effect"),
    [(6, 14, 2.5), (10, 14, 1.2), (20, 3, 0.7)],
)
def test_the_power_of_a_star_equals_a_simulation_of_the_complete_test(
    n: int, comparisons: int, effect: float
) -> None:
    """The tolerance is 2.5 standard errors of two simulations, and 0.01 for fewer patterns."""
    generator = np.random.default_rng(n)
    values = generator.normal(size=(500, comparisons + 1, n))
    values[:, 1] += np.sqrt(2) * effect
    p = [stats.joint_sign_flip(v[1:] - v[0])[0] for v in values]
    expected = np.mean(np.array(p) <= 0.05)
    assert 0.2 < expected < 0.9
    assert stats.star_power(effect, n, comparisons, 0.05) == pytest.approx(expected, abs=0.075)


@pytest.mark.slow
@pytest.mark.parametrize(("n", "comparisons", "effect"), [(9, 5, 1.5), (20, 14, 0.8)])
def test_the_power_of_a_star_equals_a_simulation_of_holms_test(
    n: int, comparisons: int, effect: float
) -> None:
    differences = np.random.default_rng(n).normal(size=(500, comparisons, n))
    differences[:, 0] += effect
    p = [stats.holm([sign_flip_p(d.tolist()) for d in study])[0] for study in differences]
    expected = np.mean(np.array(p) <= 0.05)
    assert 0.2 < expected < 0.9
    power = stats.star_power(effect, n, 1, 0.05 / comparisons)
    assert power == pytest.approx(expected, abs=0.075)


def test_the_power_of_one_comparison_is_near_that_of_the_t_test() -> None:
    """The t test has power 0.80 in each case; 199 pairs are simulated as 100."""
    assert stats.star_power(1.0, 10, 1, 0.05) == pytest.approx(0.80, abs=0.05)
    for effect, n in ((0.5, 34), (0.2, 199), (0.3, 90)):
        assert stats.star_power(effect, n, 1, 0.05) == pytest.approx(0.80, abs=0.05)
        assert stats.star_power(-effect, n, 1, 0.05) == pytest.approx(0.80, abs=0.05)


def test_six_equal_signs_are_the_only_star_of_six_pairs() -> None:
    """Without other comparisons the power has a closed form."""
    share = scipy_stats.norm.cdf(1.5)
    expected = share**6 + (1 - share) ** 6
    assert stats.star_power(1.5, 6, 1, 0.05) == pytest.approx(expected, abs=0.04)


def test_the_power_is_zero_where_no_star_is_possible() -> None:
    """2 / 2^n is above the level: five pairs, or eight with Holm's correction of ten tests."""
    assert [stats.star_power(50.0, n, 3, 0.05) for n in range(1, 6)] == [0.0] * 5
    assert [stats.star_power(50.0, n, 1, 0.05 / 10) for n in range(1, 9)] == [0.0] * 8
    assert stats.star_power(50.0, 6, 3, 0.05) > 0.9
    assert stats.star_power(50.0, 9, 1, 0.05 / 10) > 0.9
    # The level of a second look halves the largest p of a star.
    assert stats.star_power(50.0, 6, 3, 0.025) == 0


def test_the_power_falls_with_comparisons_and_rises_with_pairs_and_effect() -> None:
    by_comparisons = [stats.star_power(1.0, 12, count, 0.05) for count in (1, 3, 15, 60)]
    assert sorted(by_comparisons, reverse=True) == by_comparisons
    assert by_comparisons[0] > by_comparisons[-1] + 0.2
    by_pairs = [stats.star_power(0.6, n, 5, 0.05) for n in (6, 12, 24, 48)]
    assert sorted(by_pairs) == by_pairs
    assert by_pairs[-1] > by_pairs[0] + 0.5
    by_effect = [stats.star_power(effect, 12, 5, 0.05) for effect in (0.0, 0.5, 1.0, 2.0)]
    assert sorted(by_effect) == by_effect
    assert by_effect[0] < 0.05 < 0.95 < by_effect[-1]


@pytest.mark.slow
def test_the_power_at_the_measured_effect_is_optimistic() -> None:
    """Nine comparisons, six seeds, a true effect of one sd."""
    differences = np.random.default_rng(0).normal(1.0, 1.0, (1000, 6))
    shown = [d for d in differences if (OWN_TEST.find_needed([d]) or (0, None))[1]]
    powers = [stats.star_power(d.mean() / d.std(ddof=1), 6, 9, 0.05) for d in shown]
    assert stats.star_power(1.0, 6, 9, 0.05) == pytest.approx(0.09, abs=0.02)
    low, middle, high = np.percentile(powers, [10, 50, 90])
    assert (low, middle, high) == pytest.approx((0.13, 0.24, 0.60), abs=0.05)
