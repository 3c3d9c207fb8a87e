"""Tests of significance: what holds for each of them, and that a further one is a class alone."""

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import ClassVar, get_args

import numpy as np
import pytest
from helpers import fake_study
from scipy import stats as scipy_stats
from scipy.optimize import brentq

from lit_attn.cells.records import StudyPairs
from lit_attn.judging.stream import count_runs
from lit_attn.report.statistics import PAIRS, Pairs, designs, stats
from lit_attn.report.statistics.significance import OWN_TEST, TESTS, PairedSeeds
from lit_attn.report.statistics.significance_base import Rule, Sample, SignificanceTest
from lit_attn.report.statistics.stats import DRAWS, Floats
from lit_attn.report.tables.results import make_results_table
from lit_attn.report.tables.summary import make_variant_frame
from lit_attn.report.verdicts.comparison import compare_variants
from lit_attn.report.verdicts.judge import judge_study

EVERY_TEST = pytest.mark.parametrize("test", TESTS.values(), ids=TESTS)


def draw(test: SignificanceTest, count: int, effect: float, seed: int = 0) -> Sample:
    """Return a sample of normal values; the effect is in standard deviations of a run."""
    generator = np.random.default_rng(seed)
    values, baseline = (dict(enumerate(generator.normal(size=count))) for _ in range(2))
    return test.make_sample({seed: value + effect for seed, value in values.items()}, baseline)


def test_every_test_is_an_option() -> None:
    """A study has one seed of every variant, so its runs are no independent ones."""
    assert set(TESTS) == {*get_args(StudyPairs), "none"} == set(get_args(Pairs))


@EVERY_TEST
def test_a_test_has_the_name_and_the_meaning_of_its_option(test: SignificanceTest) -> None:
    assert TESTS[test.pairs] is test
    # A table of other runs does not say which of them are censored.
    assert (test.pairs in PAIRS) == test.has_means
    assert len(test.make_sample({0: 1.0}, {0: 2.0})) == len(test.list_sizes(1))
    assert test.words.keys() == OWN_TEST.words.keys()


@pytest.mark.parametrize(
    ("pairs", "chosen"),
    [("seed", ([7, 5, 6], [1, 9, 10])), ("none", ([5, 6, 7, 8], [1, 2, 9, 10]))],
)
def test_a_comparison_uses_pairs_of_one_seed_or_all_runs_in_the_order_of_time(
    pairs: str, chosen: tuple[list[int], list[int]]
) -> None:
    """Places are those of runs in the order of time; a pair ends with the later one of both."""
    runs = {5: 30, 6: 40, 7: 10, 8: 50}
    baseline = {1: 10, 2: 20, 9: 30, 10: 40}
    assert TESTS[pairs].choose_places(runs, baseline) == chosen


@pytest.mark.parametrize(("pairs", "fewest"), [("seed", [6, 8, 11]), ("none", [4, 5, 7])])
def test_no_fewer_runs_than_the_fewest_can_have_a_star(pairs: str, fewest: list[int]) -> None:
    test = TESTS[pairs]
    levels = (0.05, 0.0125, 0.001)
    assert [test.find_fewest(level) for level in levels] == fewest
    for count, level in zip(fewest, levels, strict=True):
        p, too_large = (test.find_p(draw(test, size, 50.0)) for size in (count, count - 1))
        assert p == pytest.approx(test.find_smallest_p(count))
        assert p <= level < too_large


@pytest.mark.parametrize(
    ("pairs", "effect", "expected"),
    [("seed", 0.3, 90), ("seed", 0.5, 34), ("seed", 1.5, 6), ("none", 0.5, 64), ("none", 0.8, 26)],
)
def test_the_runs_for_power_are_the_published_sample_sizes(
    pairs: str, effect: float, expected: int
) -> None:
    """Two-sided t tests at 0.05 with power 0.80: the sample sizes that G*Power prints."""
    assert TESTS[pairs].count_for_power(effect) == expected


def test_more_than_a_thousand_pairs_for_power_are_not_counted() -> None:
    assert OWN_TEST.count_for_power(0.0887) <= 1000
    assert OWN_TEST.count_for_power(0.0885) == OWN_TEST.count_for_power(0.01) == 1001


@EVERY_TEST
def test_the_needed_runs_are_those_of_the_95_percent_interval_of_the_effect(
    test: SignificanceTest,
) -> None:
    sample = draw(test, 8, 2.5)
    if test.is_paired:
        t, _ = scipy_stats.ttest_1samp(sample[0], 0)
    else:
        t, _ = scipy_stats.ttest_ind(*sample)
    freedom = sum(len(values) - 1 for values in sample)
    error = math.sqrt(len(sample) / 8)
    ends = []
    # Both ends leave 2.5 % of the studies on the far side of the observed t.
    for share in (0.025, 0.975):
        shift = brentq(
            lambda shift, p=share: scipy_stats.nct.cdf(abs(t), freedom, shift) - p, 0.01, 30
        )
        ends.append(test.count_for_power(shift * error))
    assert list(test.find_needed(sample) or ()) == ends
    assert ends[0] < ends[1] < 1000


@EVERY_TEST
def test_the_needed_runs_have_no_end_if_there_may_be_no_effect(test: SignificanceTest) -> None:
    for seed in range(50):
        sample = draw(test, 5, 0.5, seed)
        low, high = test.find_needed(sample) or (0, 0)
        assert low >= 2
        p = scipy_stats.ttest_1samp(sample[0], 0).pvalue
        if not test.is_paired:
            p = scipy_stats.ttest_ind(*sample).pvalue
        assert (high is None) == (p >= 0.05)


@EVERY_TEST
def test_nothing_is_needed_without_a_spread(test: SignificanceTest) -> None:
    # Rounding errors leave a small spread.
    for values in ([0.1], [0.2, 0.2], [0.3, 0.1 + 0.2, 0.3]):
        assert test.find_needed([np.array(values)] * len(test.list_sizes(1))) is None


@pytest.mark.slow
def test_the_range_of_seeds_needed_covers_the_true_number() -> None:
    """The true effect is one standard deviation, for which ten pairs reach the power."""
    generator = np.random.default_rng(10)
    ranges = [OWN_TEST.find_needed([d]) for d in generator.normal(1.5, 1.5, (1000, 8))]
    # Without an end the interval of the effect contains 0, which is a miss of 0.02 at most.
    missed = sum(high is not None and not low <= 10 <= high for low, high in ranges)
    assert 0.005 <= missed / len(ranges) <= 0.05


@pytest.mark.parametrize("comparisons", [1, 10])
@EVERY_TEST
def test_a_forecast_is_the_smallest_sample_whose_interval_excludes_0(
    test: SignificanceTest, comparisons: int
) -> None:
    sample = draw(test, 5, 0.9, seed=3)
    variance = sum(np.var(values, ddof=1) for values in sample)
    difference = abs(sample[0].mean() - sum(values.mean() for values in sample[1:]))
    for count in range(6, 400):
        freedom = len(sample) * (count - 1)
        quantile = scipy_stats.t.ppf(1 - 0.05 / comparisons / 2, freedom)
        if difference > quantile * math.sqrt(variance / count):
            break
    rule = Rule(0.05, 0.05, 200, comparisons, None)
    assert test.find_forecast(sample, rule) == count
    # Another unit changes nothing, and no planned seeds leave the level of the next look.
    assert test.find_forecast([2.0**-900 * values for values in sample], rule) == count
    if test.is_paired:
        later = test.find_forecast(sample, rule._replace(planned=5, next_level=0.001))
        assert later is not None
        assert later > count


def test_a_smaller_margin_needs_more_pairs_and_a_large_effect_the_fewest_of_a_star() -> None:
    differences = np.array([1.0, -0.8, 0.9, 1.4, -0.1])
    rule = Rule(0.05, 0.05, 1000, 1, None)
    assert OWN_TEST.find_forecast([differences + 1], rule) == 6
    centred = [differences - 0.48]
    wide, narrow = (OWN_TEST.find_forecast(centred, rule._replace(margin=m)) for m in (1.0, 0.5))
    assert wide is not None
    assert narrow is not None
    assert narrow > wide


class Signs(PairedSeeds):
    """The sign test of the differences, which ignores their sizes."""

    name = "signs of paired differences"
    words: ClassVar[Mapping[str, str]] = {
        **PairedSeeds.words,
        "test": "sign test",
        "brief_test": "sign test",
    }

    def correct_rows(self, rows: Floats, draws: int = DRAWS) -> list[float]:
        """Return the p of the joint test of all rows."""
        return stats.joint_sign_flip(np.sign(rows), draws)

    def find_power(self, effect: float, sizes: list[int], comparisons: int, level: float) -> float:
        """Return the power of one comparison with Bonferroni's correction."""
        (size,) = sizes
        share = scipy_stats.norm.cdf(effect)
        counts = np.arange(size + 1)
        p = np.minimum(1, 2 * scipy_stats.binom.cdf(np.minimum(counts, size - counts), size, 0.5))
        chances = scipy_stats.binom.pmf(counts, size, share)
        return float(chances[p <= level / comparisons].sum())


def test_a_further_test_is_a_class_alone(tmp_path: Path) -> None:
    """Table, captions, verdicts, designs and streams ask the object, and nothing else."""
    test = Signs()
    study = replace(fake_study.read(tmp_path, seeds=9), test=test)
    comparisons = compare_variants(study)
    record = comparisons.records["belief"]
    wins = int((test.make_sample(study.values("belief"), study.values("standard"))[0] > 0).sum())
    assert record["p"] == pytest.approx(scipy_stats.binomtest(wins, 9).pvalue)
    assert record["p_adjusted"] >= record["p"]
    table = make_results_table(study, make_variant_frame(study, comparisons), comparisons)
    assert "p is the two-sided sign test of the hypothesis" in " ".join(table.notes)
    assert "p is a sign test, corrected for 2 comparisons" in " ".join(table.summary)
    assert judge_study(study).test == "signs of paired differences, step-down max-T"
    strong = comparisons.records["belief2"]
    assert strong["power_n"] == test.find_power(strong["effect"], [9], 2, 0.05)
    assert designs.find_power(2, 9, test) == test.find_power(2 / math.sqrt(2), [9], 2, 0.05)
    assert count_runs(0.05, test) == count_runs(0.05, OWN_TEST)


@pytest.mark.parametrize("test", [test for test in TESTS.values() if test.has_means])
def test_an_interim_look_names_no_margin_of_equivalence(
    tmp_path: Path, test: SignificanceTest
) -> None:
    """The interval of a look is wider than that of the complete study."""
    studies = [fake_study.read(tmp_path / "all", seeds=8)]
    studies.append(fake_study.read(tmp_path / "open", seeds=8, skip=(("belief2", 7),)))
    complete, running = (
        compare_variants(replace(study, test=test), with_power=False) for study in studies
    )
    assert complete.records["belief2"]["margin"] > 0
    assert running.records["belief2"]["margin"] is None
    assert running.records["belief"]["margin"] > 0
