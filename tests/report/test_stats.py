"""The statistics, checked against brute force, scipy and simulations with fixed seeds."""

import itertools
import math
from collections.abc import Callable

import numpy as np
import pytest
from helpers.significance import sign_flip_p
from numpy.typing import NDArray
from scipy import stats as scipy_stats

from lit_attn.report.statistics import independent, stats

Draw = Callable[[np.random.Generator, tuple[int, ...]], NDArray[np.float64]]

DISTRIBUTIONS: dict[str, Draw] = {
    "normal": lambda generator, shape: generator.normal(size=shape),
    "exponential": lambda generator, shape: generator.exponential(size=shape) - 1,
    "lognormal": lambda generator, shape: generator.lognormal(size=shape) - np.exp(0.5),
    "t3": lambda generator, shape: generator.standard_t(3, size=shape) / np.sqrt(3),
}
"""Distributions with mean 0: symmetric, skewed, very skewed, heavy-tailed."""


def draw_collapses(
    generator: np.random.Generator, shape: tuple[int, ...], share: float
) -> NDArray[np.float64]:
    """Draw normal values with mean 0, a share of which collapses by ten standard deviations."""
    collapsed = generator.uniform(size=shape) < share
    return generator.normal(size=shape) - 10 * (collapsed - share)


def t_coverage(differences: NDArray[np.float64]) -> float:
    """Return the share of rows whose t interval covers a true mean of 0."""
    n = differences.shape[1]
    half = scipy_stats.t.ppf(0.975, n - 1) * differences.std(axis=1, ddof=1) / np.sqrt(n)
    return float((np.abs(differences.mean(axis=1)) <= half).mean())


@pytest.mark.parametrize("n", [3, 5, 10])
@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_the_interval_covers_95_to_98_percent_of_symmetric_differences(name: str, n: int) -> None:
    """Variant and baseline have the same distribution except for its mean."""
    generator = np.random.default_rng(n)
    values = DISTRIBUTIONS[name](generator, (2, 20_000, n))
    assert 0.94 <= t_coverage(values[0] - values[1]) <= 0.98


@pytest.mark.parametrize("n", [3, 5, 10])
@pytest.mark.parametrize(
    ("name", "low", "high"), [("exponential", 0.87, 0.91), ("lognormal", 0.81, 0.85)]
)
def test_the_interval_covers_less_when_differences_are_skewed(
    name: str, low: float, high: float, n: int
) -> None:
    """The caption states this range. Only the variant's distribution is skewed."""
    differences = DISTRIBUTIONS[name](np.random.default_rng(n), (20_000, n))
    assert low <= t_coverage(differences) <= high


@pytest.mark.parametrize(
    ("share", "n", "covered"), [(0.1, 3, 0.87), (0.1, 10, 0.72), (0.2, 5, 0.70), (0.2, 10, 0.89)]
)
def test_the_interval_covers_less_when_seeds_of_one_variant_collapse(
    share: float, n: int, covered: float
) -> None:
    """The caption says "down to 70 %". If the baseline collapses as often, it covers 96 to 98 %."""
    values = draw_collapses(np.random.default_rng(n), (2, 20_000, n), share)
    assert t_coverage(values[0]) == pytest.approx(covered, abs=0.015)
    assert 0.95 <= t_coverage(values[0] - values[1]) <= 0.985


def test_the_interval_equals_that_of_scipy() -> None:
    values = [0.3, 0.1, 0.5, -0.2]
    for confidence in (0.95, 0.995):
        expected = scipy_stats.ttest_1samp(values, 0).confidence_interval(confidence)
        assert stats.paired_interval(values, confidence)[1:] == pytest.approx(expected)
    assert stats.paired_interval([0.4]) is None


def test_the_interval_is_at_least_as_wide_as_the_metrics_step() -> None:
    assert stats.paired_interval([1.0] * 3, resolution=0.2) == pytest.approx((1.0, 0.9, 1.1))
    assert stats.paired_interval([1.0] * 2, resolution=0.2) == pytest.approx((1.0, 0.8, 1.2))
    assert stats.paired_interval([1.0] * 8, resolution=0.2) == pytest.approx(
        (1.0, 0.926, 1.074), abs=1e-3
    )
    wide = stats.paired_interval([0.0, 1.0, 2.0])
    assert stats.paired_interval([0.0, 1.0, 2.0], resolution=0.2) == wide


def test_many_rounded_values_have_the_interval_of_student() -> None:
    """500 ratings from 1 to 5 were 12 times as wide, so no margin below half a step could hold."""
    ratings = np.random.default_rng(0).integers(1, 6, (2, 500)).astype(float)
    differences = (ratings[0] - ratings[1]).tolist()
    expected = stats.paired_interval(differences)
    assert stats.paired_interval(differences, resolution=1.0) == expected
    welch = independent.welch_interval(ratings[0], ratings[1], 0.95)
    assert independent.welch_interval(ratings[0], ratings[1], 0.95, resolution=1.0) == welch


@pytest.mark.parametrize("n", [2, 5])
def test_intervals_of_rounded_values_cover_93_to_97_percent(n: int) -> None:
    """Values are rounded to steps of one standard deviation; without a floor n = 2 covers 80 %."""
    generator = np.random.default_rng(n)
    values = np.round(generator.normal([[[0.37]], [[0.0]]], 1, (2, 4000, n)))
    intervals = [
        stats.paired_interval(differences.tolist(), resolution=1.0)
        for differences in values[0] - values[1]
    ]
    covered = np.mean([interval.low <= 0.37 <= interval.high for interval in intervals])
    assert 0.93 <= covered <= 0.97


def test_the_resolution_of_accuracies_is_one_image() -> None:
    correct = np.array([341, 353, 342, 345, 352])
    accuracies = 100 * (correct / 360).astype(np.float32).astype(float)
    assert stats.find_resolution(accuracies) == pytest.approx(100 / 360, rel=1e-3)
    # Steps of two and three images have a common step of one.
    assert stats.find_resolution(100 * np.array([340, 342, 345]) / 360) == pytest.approx(100 / 360)
    few = [78.61111164, 83.88888836, 90.2777791, 25.55555701]
    assert stats.find_resolution(few) == pytest.approx(100 / 360, rel=1e-6)
    assert stats.find_resolution([1.0, 1.0]) == 0
    assert stats.find_resolution([]) == 0


def test_a_huge_value_leaves_the_resolution_of_the_others() -> None:
    """Differences of the others were taken for rounding errors, and the step for the huge gap."""
    assert stats.find_resolution([20.5, 20.7, 21.1, 20.9, 1e9]) < 1e-3
    accuracies = [78.61111164, 83.88888836, 90.2777791, 25.55555701]
    assert stats.find_resolution([*accuracies, 0.0]) == pytest.approx(100 / 360, rel=1e-6)


def test_the_resolution_of_a_continuous_metric_is_negligible() -> None:
    losses = np.random.default_rng(0).normal(2.7, 0.02, 30)
    assert stats.find_resolution(losses) < 1e-3


@pytest.mark.parametrize("center", [3e7, -1e12, 1e200])
def test_a_spread_of_rounding_errors_has_no_resolution(center: float) -> None:
    for seed in range(20):
        values = center * (1 + 1e-7 * np.random.default_rng(seed).normal(size=6))
        assert stats.find_resolution(values) == 0


@pytest.mark.parametrize("factor", [2.0**-900, 2.0**900])
def test_statistics_of_differences_scale_with_a_power_of_two(factor: float) -> None:
    for seed in range(5):
        differences = np.random.default_rng(seed).normal(0.5, 1, 6)
        scaled = (factor * differences).tolist()
        expected = stats.paired_interval(differences.tolist())
        assert expected is not None
        interval = tuple(factor * end for end in expected)
        assert stats.paired_interval(scaled) == interval
        assert sign_flip_p(scaled) == sign_flip_p(differences.tolist())


def all_signs(n: int) -> NDArray[np.int64]:
    return np.array(list(itertools.product([1, -1], repeat=n)))


@pytest.mark.parametrize("n", [1, 2, 3, 5, 8, 12])
def test_sign_flip_p_equals_brute_force(n: int) -> None:
    for d in np.random.default_rng(n).normal(0.5, 1, (20, n)):
        sums = np.abs(all_signs(n) @ d)
        threshold = abs(d.sum()) - stats.TIE * np.abs(d).sum()
        assert sign_flip_p(d.tolist()) == np.mean(sums >= threshold)
        assert sign_flip_p(d.tolist()) - np.mean(sums > abs(d.sum()) - 1e-12) < 0.002
        assert sign_flip_p(d.tolist()) >= min(1.0, 2 / 2**n)


def test_sign_flip_counts_ties_of_float32_values() -> None:
    """Accuracies on 360 images, as float32 records them: differences are whole images."""
    images, correct = np.array([0, 1, 2, 3, -1]), np.array([341, 342, 354, 335, 342])
    logged = ((correct + images) / 360).astype(np.float32).astype(float)
    d = 100 * logged - 100 * (correct / 360).astype(np.float32).astype(float)
    assert np.mean(np.abs(all_signs(5) @ images) >= 5) == 0.375
    assert np.mean(np.abs(all_signs(5) @ d) >= abs(d.sum()) * (1 - 1e-12)) == 0.25
    assert sign_flip_p(d.tolist()) == 0.375
    assert stats.joint_sign_flip(d[None]) == [0.375]


def test_sign_flip_reaches_its_floor() -> None:
    assert sign_flip_p([0.1] * 5) == 2 / 2**5 == 0.0625
    assert sign_flip_p([0.1, 0.2, 0.3]) == 0.25
    assert sign_flip_p([0.0, 0.0]) == 1
    assert sign_flip_p([1.0, -1.0]) == 1


@pytest.mark.parametrize("n", [19, 40])
def test_sign_flip_p_is_near_the_t_test_with_many_pairs(n: int) -> None:
    d = np.random.default_rng(n).normal(0.3, 1, n)
    expected = scipy_stats.ttest_1samp(d, 0).pvalue
    assert sign_flip_p(d.tolist()) == pytest.approx(expected, abs=0.01)
    assert sign_flip_p(d.tolist()) == sign_flip_p(d.tolist())


def brute_force_max_t(d: NDArray[np.float64]) -> list[float]:
    """Westfall and Young's step-down max-T, with the studentised mean and all 2^n patterns."""

    def t(differences: NDArray[np.float64]) -> NDArray[np.float64]:
        n = differences.shape[-1]
        return np.abs(differences.mean(-1)) / (differences.std(-1, ddof=1) / np.sqrt(n))

    observed = t(d)
    flipped = np.array([t(d * signs) for signs in all_signs(d.shape[1])])
    order = np.argsort(-observed)
    adjusted = np.zeros(len(d))
    running = 0.0
    for step, variant in enumerate(order):
        largest = flipped[:, order[step:]].max(axis=1)
        running = max(running, np.mean(largest >= observed[variant] * (1 - 1e-9)))
        adjusted[variant] = running
    return adjusted.tolist()


@pytest.mark.parametrize(("variants", "n"), [(1, 5), (3, 6), (5, 9)])
def test_joint_sign_flip_equals_brute_force(variants: int, n: int) -> None:
    d = np.random.default_rng(n).normal([[0.8]] * variants, 1, (variants, n))
    assert stats.joint_sign_flip(d) == pytest.approx(brute_force_max_t(d), abs=0.005)


def test_joint_sign_flip_with_many_pairs_is_near_the_exact_value(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    d = np.random.default_rng(4).normal([[0.6], [0.2], [0.0]], 1, (3, 12))
    exact = stats.joint_sign_flip(d)
    monkeypatch.setattr(stats, "EXACT_UP_TO", 10)
    assert stats.joint_sign_flip(d) == pytest.approx(exact, abs=0.01)


def test_a_p_from_random_patterns_is_never_zero() -> None:
    """The observed pattern counts, also if none of the random ones reaches it."""
    assert sign_flip_p([1.0 + 0.01 * seed for seed in range(30)]) == 1 / (stats.DRAWS + 1)


def test_joint_sign_flip_without_differences() -> None:
    assert stats.joint_sign_flip(np.zeros((2, 4))) == [1.0, 1.0]
    assert stats.joint_sign_flip(np.zeros((0, 4))) == []


POWERS = {
    6: {"normal": 0.18, "exponential": 0.37, "lognormal": 0.61, "t3": 0.38},
    10: {"normal": 0.75, "exponential": 0.84, "lognormal": 0.90, "t3": 0.94},
}
"""Power that docs/simulations.md prints for an effect of two standard deviations of the values."""


@pytest.mark.parametrize("n", POWERS)
@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_the_joint_test_has_the_power_that_the_page_prints(name: str, n: int) -> None:
    """Ten comparisons, of which one has an effect; the other nine rarely have a star."""
    values = DISTRIBUTIONS[name](np.random.default_rng(n), (500, 11, n))
    differences = values[:, 1:] - values[:, :1]
    differences[:, 0] += 2 * values.std()
    has_star = np.array([stats.joint_sign_flip(d) for d in differences]) <= 0.05
    assert has_star[:, 0].mean() == pytest.approx(POWERS[n][name], abs=0.07)
    assert has_star[:, 1:].any(axis=1).mean() <= 0.07


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


def test_failed_seeds_rank_below_any_value() -> None:
    values = [3.0, None, 5.0, None, 4.0]
    baseline = [1.0, 2.0, None, None, 4.0]
    assert stats.rank_with_failures(values, baseline, True) == [1.0, -2.5, 2.5, 0.0, 0.0]
    assert stats.rank_with_failures(values, baseline, False) == [-1.0, -2.5, 2.5, 0.0, 0.0]


def test_ranks_equal_scipys_signed_ranks() -> None:
    d = np.random.default_rng(1).normal(0.5, 1, 9)
    ranks = stats.rank_with_failures(d.tolist(), [0.0] * 9, True)
    assert (
        sum(rank for rank in ranks if rank > 0)
        == scipy_stats.wilcoxon(d, alternative="greater").statistic
    )
    exact = scipy_stats.wilcoxon(d, method="exact").pvalue
    assert sign_flip_p(ranks) == pytest.approx(exact)


def test_failed_seeds_do_not_flatter_a_variant() -> None:
    """The worst seeds of a null variant fail, so the mean alone would earn false stars."""
    generator = np.random.default_rng(7)
    naive, stars = 0, 0
    runs, n = 500, 12
    for _ in range(runs):
        variant, baseline = generator.normal(size=(2, n))
        failed = variant < scipy_stats.norm.ppf(0.2)
        d = (variant - baseline)[~failed]
        p = sign_flip_p(d.tolist())
        ranks = stats.rank_with_failures(
            [None if f else v for v, f in zip(variant, failed, strict=True)],
            baseline.tolist(),
            True,
        )
        first = p <= 0.05 and d.mean() > 0
        naive += first
        stars += first and sign_flip_p(ranks) <= 0.05 and sum(ranks) > 0
    assert stars / runs <= 0.035
    assert naive / runs > stars / runs


def test_random_failures_keep_the_error() -> None:
    """Seeds of variant and baseline fail at random; both tests must pass for a star."""
    generator = np.random.default_rng(8)
    stars, runs, n = 0, 500, 10
    for _ in range(runs):
        pair = generator.exponential(size=(2, n))
        failed = generator.uniform(size=(2, n)) < 0.3
        d = (pair[0] - pair[1])[~failed.any(axis=0)]
        values = [
            [None if f else v for v, f in zip(*row, strict=True)]
            for row in zip(pair, failed, strict=True)
        ]
        ranks = stats.rank_with_failures(values[0], values[1], True)
        stars += sign_flip_p(d.tolist()) <= 0.05 and sign_flip_p(ranks) <= 0.05
    assert stars / runs <= 0.06


def crossed_sums(
    generator: np.random.Generator, n: int, units: int, scales: tuple[float, float, float]
) -> tuple[stats.Floats, stats.Floats]:
    """Return sums (n, U) of a metric whose true mean is 0, and the numbers of targets (U,)."""
    seed, sample, both = scales
    weights = generator.integers(1, 20, units).astype(float)
    values = seed * generator.normal(size=(n, 1)) + sample * generator.normal(size=units)
    return weights * (values + both * generator.normal(size=(n, units))), weights


@pytest.mark.parametrize(
    ("n", "scales"),
    [(10, (0.3, 3, 1)), (3, (0, 3, 3)), (5, (0.3, 0, 1)), (3, (0.05, 5, 1))],
    ids=["all", "ab", "seed", "test"],
)
def test_an_interval_over_seeds_and_samples_covers_the_truth(
    n: int, scales: tuple[float, float, float]
) -> None:
    """An interval over seeds alone misses the truth when the samples differ more than the seeds."""
    generator = np.random.default_rng([n, 7])
    covered = narrow = 0
    for _ in range(400):
        sums, weights = crossed_sums(generator, n, 100, scales)
        _, low, high = stats.crossed_interval(sums, weights)
        covered += low <= 0 <= high
        of_seeds = stats.paired_interval((sums.sum(1) / weights.sum()).tolist())
        narrow += of_seeds.low <= 0 <= of_seeds.high
    assert 0.92 <= covered / 400 <= 0.995
    if scales == (0.05, 5, 1):
        assert narrow / 400 < 0.6


def test_an_interval_over_seeds_and_samples_is_never_narrower_than_over_seeds() -> None:
    """Two seeds with nearly equal means: large test errors have many degrees of freedom."""
    generator = np.random.default_rng(1)
    for _ in range(20):
        sums, weights = crossed_sums(generator, 2, 100, (0.1, 1, 1))
        _, low, high = stats.crossed_interval(sums, weights)
        of_seeds = stats.paired_interval((sums.sum(1) / weights.sum()).tolist())
        assert low <= of_seeds.low + 1e-9
        assert high >= of_seeds.high - 1e-9


def test_the_variance_over_seeds_and_samples_leaves_their_interaction_out_once() -> None:
    """The sum of both variances contains the variance of the residuals twice."""
    generator = np.random.default_rng(3)
    n, count = 8, 8
    rows = generator.normal(size=(n, 1)) + generator.normal(size=(1, count))
    rows = rows + generator.normal(size=(n, count))
    mean = rows.mean()
    of_seeds = ((rows.mean(1) - mean) ** 2).sum() / (n - 1) / n
    of_samples = ((rows.mean(0) - mean) ** 2).sum() / (count - 1) / count
    residuals = rows - rows.mean(1, keepdims=True) - rows.mean(0, keepdims=True) + mean
    variance = of_seeds + of_samples - (residuals**2).sum() / ((n - 1) * (count - 1) * n * count)
    assert variance > 1.1 * max(of_seeds, of_samples)
    freedom = variance**2 / (of_seeds**2 / (n - 1) + of_samples**2 / (count - 1))
    half = scipy_stats.t.ppf(0.975, freedom) * math.sqrt(variance)
    _, low, high = stats.crossed_interval(rows, np.ones(count))
    assert (low, high) == pytest.approx((mean - half, mean + half))


def test_the_test_error_is_that_of_a_bootstrap_over_samples() -> None:
    generator = np.random.default_rng(3)
    sums, weights = crossed_sums(generator, 4, 200, (0.3, 2, 1))
    drawn = generator.multinomial(200, np.full(200, 1 / 200), size=4000)
    means = (drawn @ sums.T / (drawn @ weights)[:, None]).mean(1)
    assert stats.crossed_interval(sums, weights)[0] == pytest.approx(means.std(), rel=0.05)


def test_one_seed_or_one_sample_has_no_joint_interval() -> None:
    ones = np.ones(5)
    assert stats.crossed_interval(np.ones((1, 5)), ones)[1:] == (None, None)
    assert stats.crossed_interval(np.ones((3, 1)), np.ones(1))[1:] == (None, None)
    assert stats.crossed_interval(np.array([[1.0, 3.0]]), np.ones(2))[0] == pytest.approx(1)
    assert stats.crossed_interval(np.full((3, 5), 2.0), ones) == (0, 2, 2)
