"""Independent runs: the permutation test, its interval, and verdicts about public runs."""

import math

import numpy as np
import pandas as pd
import pytest
from scipy.stats import permutation_test, ttest_ind

from lit_attn import judge
from lit_attn.report.statistics import independent
from lit_attn.report.statistics.significance import TESTS
from lit_attn.report.statistics.stats import Floats

# Final validation losses of KellerJordan/modded-nanogpt at commit f411b3d3, folder
# records/track_1_short/2026-05-07_XSAGatedLayers: master-s1480 and xsa-gated-s1410.
MASTER = [3.2794, 3.2803, 3.2794, 3.2797, 3.2797, 3.2798, 3.2808]
XSA = [3.2792, 3.2769, 3.2775, 3.2785, 3.2798, 3.2790, 3.2805, 3.2798, 3.2803, 3.2787, 3.2777]


def draw(generator: np.random.Generator, size: int, mean: float = 0.0, sd: float = 1.0) -> Floats:
    return generator.normal(mean, sd, size)


def correct_groups(baseline: Floats, groups: list[Floats]) -> list[float]:
    """Return the corrected p of groups with a common baseline."""
    return independent.correct_samples([(group, baseline) for group in groups])


def welch_statistic(first: Floats, second: Floats, axis: int) -> Floats:
    statistic: Floats = np.abs(ttest_ind(first, second, equal_var=False, axis=axis).statistic)
    return statistic


@pytest.mark.parametrize("sizes", [(2, 3), (4, 4), (5, 8)])
def test_the_test_of_two_groups_is_that_of_scipy(sizes: tuple[int, int]) -> None:
    generator = np.random.default_rng(sum(sizes))
    first = draw(generator, sizes[0])
    second = draw(generator, sizes[1], 1.5, 2.0)
    expected = permutation_test(
        (first, second), welch_statistic, n_resamples=np.inf, alternative="greater", vectorized=True
    )
    assert independent.group_p(second, first) == pytest.approx(expected.pvalue)
    interval = independent.welch_interval(second, first, 0.95)
    reference = ttest_ind(first, second, equal_var=False).confidence_interval(0.95)
    assert (interval.low, interval.high) == pytest.approx((reference.low, reference.high))


@pytest.mark.parametrize(
    ("factor", "shift"), [(2.0**-27, 0.0), (2.0**100, 0.0), (2.0**600, 0.0), (1.0, 1e5)]
)
def test_units_and_a_common_shift_change_no_answer(factor: float, shift: float) -> None:
    """The corrected test compared a statistic of unscaled values with those of scaled ones."""
    generator = np.random.default_rng(0)
    baseline, *groups = (draw(generator, 8, mean, 0.01) for mean in (1.0, 0.98, 0.97))
    changed, *others = (values * factor + shift for values in (baseline, *groups))
    assert correct_groups(changed, others) == correct_groups(baseline, groups)
    for group, other in zip(groups, others, strict=True):
        expected = independent.welch_interval(baseline, group, 0.95)
        interval = independent.welch_interval(changed, other, 0.95)
        assert np.array(interval) / factor == pytest.approx(np.array(expected), rel=1e-5)


def test_a_huge_value_of_one_run_changes_no_other_comparison() -> None:
    """A training that diverges without an infinity has such a value."""
    runs = {"a": MASTER, "good": [loss - 0.01 for loss in XSA], "bad": [*XSA, 1e100]}
    rows = []
    for variant, losses in runs.items():
        rows += [{"variant": variant, "loss": loss} for loss in losses]
    every = judge(pd.DataFrame(rows), "loss:min", pairs="none", baseline="a")
    without_huge = judge(pd.DataFrame(rows[:-1]), "loss:min", pairs="none", baseline="a")
    good, bad = every.variants
    alone, _ = without_huge.variants
    assert (good.verdict, bad.verdict) == ("better", "undecided")
    assert good.difference == alone.difference


def test_the_public_runs_of_xsa_have_one_answer_under_every_numbering() -> None:
    """Pairs of runs with equal numbers gave p from .016 to .36 by the order of the runs."""
    answers = set()
    generator = np.random.default_rng(0)
    for _ in range(10):
        rows = [("master", value) for value in generator.permutation(MASTER)]
        rows += [("xsa", value) for value in generator.permutation(XSA)]
        frame = pd.DataFrame(rows, columns=["variant", "val_loss"]).sample(frac=1, random_state=1)
        frame["seed"] = frame.groupby("variant").cumcount()
        judged = judge(frame, "val_loss:min", pairs="none", baseline="master")
        (variant,) = judged.variants
        assert variant.difference is not None
        answers.add((variant.verdict, round(variant.difference.mean, 8), round(variant.p or 0, 8)))
    # 31,824 divisions of 18 runs into 7 and 11, and Welch's interval of docs/methods.md.
    assert answers == {("better", -0.00097143, 0.03302539)}
    assert judged.test == "permutations of independent runs, studentised (31,824 all permutations)"
    (warning,) = judged.warnings
    assert "0.00118 and the baseline's is 0.000509" in warning
    assert (judged.baseline_values.n, variant.values.n) == (7, 11)
    assert variant.values.mean == pytest.approx(3.2789)


def test_rounding_of_equal_statistics_counts_against_the_variant() -> None:
    first = np.array([0.1, 0.2, 0.3]) + 3e5
    second = np.array([0.1, 0.2, 0.3]) + 3e5
    assert independent.group_p(first, second) == 1.0
    # Only the two divisions that separate the values are as extreme.
    separated = independent.group_p(np.array([1.0, 1.0, 1.0]), np.array([2.0, 2.0, 2.0]))
    assert separated == pytest.approx(2 / math.comb(6, 3))


def test_a_variant_is_corrected_for_the_others_and_never_below_its_own_test() -> None:
    generator = np.random.default_rng(3)
    baseline = draw(generator, 6)
    groups = [draw(generator, 5, shift) for shift in (3.0, 0.0, 0.5, 0.2)]
    corrected = correct_groups(baseline, groups)
    uncorrected = [independent.group_p(baseline, group) for group in groups]
    assert all(p >= single for p, single in zip(corrected, uncorrected, strict=True))
    assert corrected[0] == min(corrected) <= 0.05
    assert corrected[2] > uncorrected[2]
    assert correct_groups(baseline, groups[:1]) == uncorrected[:1]
    # The order of runs does not matter, and that of variants only for the drawn permutations.
    shuffled = [generator.permutation(group) for group in groups]
    assert correct_groups(baseline[::-1], shuffled) == corrected
    turned = correct_groups(baseline, groups[::-1])[::-1]
    assert turned == pytest.approx(corrected, abs=0.01)


def share_of_studies(
    mean: float, sd: float, variants: int, runs: tuple[int, int], studies: int
) -> tuple[float, float]:
    """Return the shares of studies with a star for the first variant, and for any other one.

    The first variant has this mean and sd, all others have those of the baseline.
    """
    generator = np.random.default_rng(7)
    true = false = 0
    for _ in range(studies):
        baseline = draw(generator, runs[0])
        groups = [draw(generator, runs[1], mean, sd)]
        groups += [draw(generator, runs[1]) for _ in range(variants - 1)]
        p_values = correct_groups(baseline, groups)
        true += p_values[0] <= 0.05
        false += any(p <= 0.05 for p in p_values[1:])
    return true / studies, false / studies


def test_false_stars_stay_below_the_level(monkeypatch: pytest.MonkeyPatch) -> None:
    """An uncorrected test would have a star among four null variants in 15 % of studies."""
    monkeypatch.setattr(independent, "DRAWS", 200)
    first, others = share_of_studies(0.0, 1.0, 4, (8, 5), 200)
    # Two standard errors of 200 studies are .03.
    assert first + others <= 0.05 + 0.03
    # A variant far away with a wide spread does not make the others significant.
    _, false = share_of_studies(20.0, 10.0, 4, (8, 5), 200)
    assert false <= 0.05 + 0.03


def test_effects_of_two_standard_deviations_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(independent, "DRAWS", 200)
    power, _ = share_of_studies(2.0, 1.0, 1, (5, 5), 200)
    assert power > 0.7
    several, _ = share_of_studies(2.0, 1.0, 4, (12, 6), 60)
    assert several > 0.8
    # The formula of JSON's `power` agrees.
    assert TESTS["none"].find_t_power(2.0, 5, 0.05) == pytest.approx(power, abs=0.12)


def test_failed_runs_are_the_worst_in_a_second_test() -> None:
    rows = [("base", float(value)) for value in (10, 11, 12, 13, 14, 15)]
    rows += [("fast", float(value)) for value in (1, 2, 3, 4, 5, 6)]
    frame = pd.DataFrame(rows, columns=["variant", "loss"])
    (clean,) = judge(frame, "loss:min", pairs="none", baseline="base").variants
    assert clean.verdict == "better"
    for value in range(6):
        frame.loc[len(frame)] = ["fast", math.nan if value % 2 else math.inf]
    (failed,) = judge(frame, "loss:min", pairs="none", baseline="base").variants
    assert (failed.verdict, failed.seeds.failed, failed.values.n) == ("undecided", 6, 6)


@pytest.mark.parametrize("runs", [(1, 5), (5, 1), (1, 1)])
def test_a_single_run_is_undecided_and_the_next_action_repeats_it(runs: tuple[int, int]) -> None:
    rows = [("base", 1.0 + 0.01 * place) for place in range(runs[0])]
    rows += [("idea", 0.5 + 0.01 * place) for place in range(runs[1])]
    judged = judge(pd.DataFrame(rows, columns=["variant", "loss"]), pairs="none", baseline="base")
    (variant,) = judged.variants
    assert (variant.verdict, variant.p, variant.difference) == ("undecided", None, None)
    expected = {"base": max(0, 4 - runs[0]), "idea": max(0, 4 - runs[1])}
    assert judged.next.runs == {name: count for name, count in expected.items() if count}


def test_the_next_action_says_how_many_runs_would_decide() -> None:
    generator = np.random.default_rng(5)
    rows = [("base", value) for value in draw(generator, 5)]
    rows += [("idea", value) for value in draw(generator, 5, -0.9)]
    frame = pd.DataFrame(rows, columns=["variant", "loss"])
    judged = judge(frame, "loss:min", pairs="none", baseline="base")
    (variant,) = judged.variants
    assert variant.verdict == "undecided"
    assert variant.pairs_for_verdict is not None
    assert judged.next.runs == dict.fromkeys(("base", "idea"), variant.pairs_for_verdict - 5)
    needed = variant.seeds_needed
    assert needed is not None
    assert needed.low >= TESTS["none"].find_fewest(0.05)


def test_many_variants_take_about_a_second() -> None:
    """A table of 20 variants must not take longer than one cell."""
    generator = np.random.default_rng(0)
    groups = [draw(generator, 4) for _ in range(20)]
    corrected = correct_groups(draw(generator, 40), groups)
    assert min(corrected) > 0.05
