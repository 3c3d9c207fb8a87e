"""The statistics against brute force, scipy and simulation."""

import itertools

import numpy as np
import pytest
from scipy import stats as scipy_stats

from lit_attn.report import stats


@pytest.mark.parametrize("n", [3, 5, 10])
def test_the_paired_interval_covers_95_percent(n: int) -> None:
    """20,000 studies of n pairs each; the true mean difference lies inside 95 +- 1 % of them."""
    differences = np.random.default_rng(n).normal(0.3, 1.0, (20_000, n))
    half = scipy_stats.t.ppf(0.975, n - 1) * differences.std(axis=1, ddof=1) / np.sqrt(n)
    covered = np.abs(differences.mean(axis=1) - 0.3) <= half
    assert covered.mean() == pytest.approx(0.95, abs=0.01)
    for row, expected in zip(differences[:200], half, strict=False):
        interval = stats.paired_interval(row.tolist())
        assert interval.high - interval.mean == pytest.approx(expected)
        assert interval.mean - interval.low == pytest.approx(expected)


def test_a_bootstrap_interval_would_not() -> None:
    """Why there is none: at n = 3 a percentile bootstrap's 95 % covers about three quarters."""
    generator = np.random.default_rng(0)
    samples = generator.normal(0, 1, (2000, 3))
    means = samples[:, generator.integers(0, 3, (400, 3))].mean(axis=2)
    low, high = np.percentile(means, [2.5, 97.5], axis=1)
    assert ((low <= 0) & (high >= 0)).mean() < 0.8


def test_paired_interval_is_scipys() -> None:
    values = [0.3, 0.1, 0.5, -0.2]
    expected = scipy_stats.ttest_1samp(values, 0).confidence_interval(0.95)
    assert stats.paired_interval(values)[1:] == pytest.approx(expected)
    assert stats.paired_interval([0.4]) is None
    assert stats.paired_interval([0.4, 0.4]) == (0.4, 0.4, 0.4)


@pytest.mark.parametrize("n", [1, 2, 3, 5, 8, 12])
def test_sign_flip_is_brute_force(n: int) -> None:
    signs = np.array(list(itertools.product([1, -1], repeat=n)))
    for d in np.random.default_rng(n).normal(0.5, 1, (20, n)):
        sums = np.abs(signs @ d)
        near = abs(d.sum()) - stats.TIE * np.abs(d).sum()
        assert stats.sign_flip_p(d.tolist()) == np.mean(sums >= near)
        assert stats.sign_flip_p(d.tolist()) - np.mean(sums > abs(d.sum()) - 1e-12) < 0.002
        assert stats.sign_flip_p(d.tolist()) >= stats.sign_flip_floor(n)


def test_sign_flip_ties_survive_float32() -> None:
    """Accuracies on 360 images, as float32 logs them: differences are whole images."""
    images, correct = np.array([0, 1, 2, 3, -1]), np.array([341, 342, 354, 335, 342])
    logged = ((correct + images) / 360).astype(np.float32).astype(float)
    d = 100 * logged - 100 * (correct / 360).astype(np.float32).astype(float)
    signs = np.array(list(itertools.product([1, -1], repeat=5)))
    assert np.mean(np.abs(signs @ images) >= 5) == 0.375
    assert np.mean(np.abs(signs @ d) >= abs(d.sum()) * (1 - 1e-12)) == 0.25
    assert stats.sign_flip_p(d.tolist()) == 0.375


def test_sign_flip_reaches_its_floor_and_counts_ties() -> None:
    assert stats.sign_flip_p([0.1] * 5) == stats.sign_flip_floor(5) == 0.0625
    assert stats.sign_flip_p([0.1, 0.2, 0.3]) == 0.25
    assert stats.sign_flip_p([0.0, 0.0]) == 1
    assert stats.sign_flip_p([1.0, -1.0]) == 1
    assert stats.sign_flip_p([]) is None


def test_sign_flip_is_scipys_permutation_test() -> None:
    d = np.random.default_rng(3).normal(0.4, 1, 9)
    expected = scipy_stats.permutation_test(
        (d,), np.mean, permutation_type="samples", n_resamples=np.inf
    ).pvalue
    assert stats.sign_flip_p(d.tolist()) == pytest.approx(expected)


@pytest.mark.parametrize("n", [19, 40])
def test_sign_flip_nears_the_t_test_with_many_pairs(n: int) -> None:
    d = np.random.default_rng(n).normal(0.3, 1, n)
    expected = scipy_stats.ttest_1samp(d, 0).pvalue
    assert stats.sign_flip_p(d.tolist()) == pytest.approx(expected, abs=0.01)


def test_very_many_pairs_are_estimated_near_the_exact_value(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    d = np.random.default_rng(4).normal(0.35, 1, 18).tolist()
    exact = stats.sign_flip_p(d)
    monkeypatch.setattr(stats, "EXACT_UP_TO", 10)
    monkeypatch.setattr(stats, "DRAWS", 100_000)
    assert 0.02 < exact < 0.5
    assert stats.sign_flip_p(d) == pytest.approx(exact, abs=0.005)
    assert stats.sign_flip_p(d) == stats.sign_flip_p(d)


@pytest.mark.parametrize("comparisons", [1, 2, 7, 40])
def test_pairs_for_a_star_are_the_fewest(comparisons: int) -> None:
    pairs = stats.pairs_for_a_star(comparisons)
    others = [1.0] * (comparisons - 1)
    assert stats.holm([stats.sign_flip_floor(pairs), *others])[0] <= 0.05
    assert stats.holm([stats.sign_flip_floor(pairs - 1), *others])[0] > 0.05


def test_holm_by_hand() -> None:
    assert stats.holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert stats.holm([0.5, 0.9]) == [1.0, 1.0]
    assert stats.holm([0.2]) == [0.2]
    assert stats.holm([]) == []
    # Holm 1979: once one fails, all that follow do.
    assert stats.holm([0.01, 0.015, 0.9, 0.02]) == pytest.approx([0.04, 0.045, 0.9, 0.045])


def test_holm_keeps_the_order_and_controls_the_family() -> None:
    generator = np.random.default_rng(5)
    p = generator.uniform(size=(4000, 10))
    adjusted = np.array([stats.holm(row.tolist()) for row in p])
    assert (adjusted >= p).all()
    for raw, new in zip(p[:50], adjusted, strict=False):
        assert (np.diff(new[np.argsort(raw)]) >= 0).all()
    assert (adjusted <= 0.05).any(axis=1).mean() == pytest.approx(0.05, abs=0.01)


def test_seeds_needed_gives_the_power_it_says() -> None:
    """Differences with d = 1: ten pairs reach 80 %, checked by simulation."""
    unit = np.array([-1.0, 0.0, 1.0])
    shifted = (unit + 1.0).tolist()
    assert stats.seeds_needed(shifted) == 10
    runs = np.random.default_rng(6).normal(1.0, 1.0, (20_000, 10))
    assert (scipy_stats.ttest_1samp(runs, 0, axis=1).pvalue < 0.05).mean() == pytest.approx(
        0.80, abs=0.02
    )


@pytest.mark.parametrize(("effect", "expected"), [(0.3, 90), (0.5, 34), (1.5, 6), (2.0, 5)])
def test_seeds_needed_are_the_textbooks(effect: float, expected: int) -> None:
    """Paired t test, two-sided 0.05, power 0.80: the sample sizes that G*Power prints."""
    assert stats.seeds_needed([effect - 1, effect, effect + 1]) == expected


def test_seeds_needed_go_on_beyond_the_table_of_powers() -> None:
    """Where the noncentral t's thousand pairs end, the normal distribution goes on."""
    found = [stats.seeds_needed([e - 1, e, e + 1]) for e in (0.0887, 0.0885, 0.01)]
    assert found == sorted(found)
    assert found[0] <= 1000 < found[1] <= 1005
    assert found[2] == pytest.approx(78_489, abs=2)


def test_seeds_needed_where_nothing_can_be_said() -> None:
    assert stats.seeds_needed([0.1]) is None
    assert stats.seeds_needed([0.1, -0.1]) is None
    assert stats.seeds_needed([0.2, 0.2]) is None
    # Equal and opposite but for rounding.
    assert stats.seeds_needed([0.3, 0.1 + 0.2, 0.3]) is None
    assert stats.seeds_needed([0.3, -0.1 - 0.2]) is None
    assert stats.seeds_needed([100.0, 100.0, 100.2]) == 2
