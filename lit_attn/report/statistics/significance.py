"""The tests of significance. A further test is a further class here, with a value of `Pairs`.

`StudyRecord.test` is the test of a study; tables, verdicts, next actions, streams, claims and dry
runs ask it. lit_attn.report.statistics.significance_base has the questions.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from lit_attn.report.numbers import write_number
from lit_attn.report.statistics import Pairs, independent, stats, times
from lit_attn.report.statistics.means import combine_means, find_ends, find_p
from lit_attn.report.statistics.shares import difference_interval
from lit_attn.report.statistics.significance_base import (
    MOST_RUNS,
    EffectEstimate,
    Levels,
    Outcomes,
    Places,
    Rule,
    Sample,
    SignificanceTest,
    Step,
    Values,
)
from lit_attn.report.statistics.stats import DRAWS, Floats, Interval
from lit_attn.schema.errors import plural

POWER_STUDIES = 4000
"""Simulated studies of the power of a log-rank test."""


class PairedSeeds(SignificanceTest):
    """The sign-flip test of the differences between runs with the same seed."""

    pairs: ClassVar[Pairs] = "seed"
    name = "sign flips of paired differences"
    is_paired = True
    has_seeds = True
    fewest_values = 1
    least_spread = 1e-4
    least_skewness = 1.0
    words: ClassVar[Mapping[str, str]] = {
        "unit": "seed",
        "cell": "cell",
        "done": "of {planned} seeds",
        "fewest": "seeds",
        "test": "sign-flip test",
        "brief_test": "sign-flip test",
        "statistic": "",
        "rank_test": "test of signed ranks",
        "difference": "the mean of the per-seed differences to {baseline}",
        "brief_difference": "the mean over pairs of equal seeds",
        "interval": "its 95 % paired t interval",
        "brief_interval": "its 95 % t interval over seeds",
        "coverage": "In simulations its coverage is 95 to 98 % if the distributions of variant and"
        " baseline differ in their means only, 82 to 90 % if only one of them is strongly skewed,"
        " and down to 70 % if only one of them collapses in 10 to 20 % of its seeds.",
        "spreads": "If the true values are so, a star can mean another spread instead of another"
        " mean (docs/statistics.md, Screening).",
    }
    share_words: ClassVar[Mapping[str, str]] = {
        "interval": "its 95 % exact interval",
        "brief_interval": "its 95 % exact interval over seeds",
        "coverage": "It joins the exact intervals (Clopper and Pearson 1934) of the share of seeds"
        " that only the variant wins and of the share that only {baseline} wins, each with half of"
        " the error, so its coverage is at least 95 %.",
        "shares": "Every value is 0 or {high}, so a mean is a share of the seeds, and the sign-flip"
        " test is McNemar's exact test, corrected for all comparisons.",
    }

    missing = "Seeds without a result are listed beside n and enter no mean."

    def choose_places(self, runs: Places, baseline: Places) -> tuple[list[int], list[int]]:
        """Return pairs of places with one seed, in the order in which the later one ended."""
        partners = {seed: place for place, seed in baseline.items()}
        pairs = [(place, partners[seed]) for place, seed in runs.items() if seed in partners]
        pairs.sort(key=max)
        return [place for place, _ in pairs], [partner for _, partner in pairs]

    def make_sample(self, values: Values, baseline: Values) -> Sample:
        """Return the differences of the seeds with both values."""
        return [np.array(list(self._pair(values, baseline).values()), dtype=float)]

    def list_differences(self, values: Values, baseline: Values) -> list[float]:
        """Return the differences of the seeds with both values."""
        differences: list[float] = self.make_sample(values, baseline)[0].tolist()
        return differences

    def count_pairs(self, count: int) -> int | None:
        """Return `count`."""
        return count

    def count_ties(self, sample: Sample, tie: float) -> int:
        """Return the number of differences up to `tie`."""
        return int((np.abs(sample[0]) <= tie).sum())

    def _pair(self, values: Values, baseline: Values) -> dict[int, float]:
        """Return the differences to the baseline by seed."""
        return {seed: value - baseline[seed] for seed, value in values.items() if seed in baseline}

    def find_p(self, sample: Sample, draws: int = DRAWS) -> float:
        """Return the p of the sign flips of one variant."""
        return self.correct_rows(np.stack(sample), draws)[0]

    def correct_rows(self, rows: Floats, draws: int = DRAWS) -> list[float]:
        """Return the p of the joint sign flips of all rows."""
        return stats.joint_sign_flip(rows, draws)

    def list_rows(self, groups: Mapping[Levels, Values]) -> dict[Levels, list[float]]:
        """Return the values of each group for the seeds that all of them share."""
        shared_seeds = sorted(set.intersection(*map(set, groups.values()))) if groups else []
        if not shared_seeds:
            return {}
        return {levels: [group[seed] for seed in shared_seeds] for levels, group in groups.items()}

    def estimate_effects(
        self, groups: Mapping[Levels, Values], contrasts: Sequence[Floats], step: float
    ) -> list[EffectEstimate]:
        """Return means over seeds with paired t intervals, and the p of the joint sign flips."""
        means = np.array([contrast.mean(axis=0) for contrast in contrasts])
        p_values = self.correct_rows(means)
        estimates = []
        for contrast, by_seed, p in zip(contrasts, means.tolist(), p_values, strict=True):
            # A mean over combinations has a smaller step than the metric.
            mean, low, high = stats.describe_pairs(by_seed, step / len(contrast))
            estimates.append(EffectEstimate(mean, low, high, p, by_seed))
        return estimates

    def correct(self, outcomes: Outcomes) -> dict[str, float]:
        """Return the corrected p of every variant with a pair."""
        baseline = outcomes.values[outcomes.baseline]
        paired = {name: self._pair(outcomes.values[name], baseline) for name in outcomes.others}
        return self._correct(paired, outcomes.draws)

    def _correct(self, paired: Mapping[str, Values], draws: int) -> dict[str, float]:
        """Return the corrected p of the variants with differences.

        A sign pattern flips a seed in all variants that have it. A seed that a variant lacks adds
        nothing to its statistic, whichever sign it has, so the test stays exact, and a variant with
        all seeds keeps its own number of patterns.
        """
        compared = {name: by_seed for name, by_seed in paired.items() if by_seed}
        seeds = sorted(set().union(*compared.values()))
        rows = np.zeros((len(compared), len(seeds)))
        for row, by_seed in zip(rows, compared.values(), strict=True):
            row[:] = [by_seed.get(seed, 0.0) for seed in seeds]
        return dict(zip(compared, self.correct_rows(rows, draws), strict=True))

    def compare_failures(self, outcomes: Outcomes) -> dict[str, float]:
        """Return Fisher's p of each variant's failures against the baseline's, by Holm."""
        from scipy.stats import fisher_exact

        # Seeds that failed and that finished.
        counts = {}
        for name, values in outcomes.values.items():
            counts[name] = (len(outcomes.failed[name]), len(values))
        baseline = counts[outcomes.baseline]
        if not any(baseline):
            return {}
        names = [name for name in outcomes.others if any(counts[name])]
        p_values = [float(fisher_exact([counts[name], baseline]).pvalue) for name in names]
        return dict(zip(names, stats.holm(p_values), strict=True))

    def rank(self, outcomes: Outcomes) -> dict[str, tuple[float, float]]:
        """Return corrected p and rank sum of the signed ranks of every variant with a pair."""
        baseline = outcomes.values[outcomes.baseline]
        ended = baseline.keys() | set(outcomes.failed[outcomes.baseline])
        ranks: dict[str, dict[int, float]] = {}
        for name in outcomes.others:
            values = outcomes.values[name]
            seeds = sorted((values.keys() | set(outcomes.failed[name])) & ended)
            if seeds:
                # None is a failed seed.
                ours = [values.get(seed) for seed in seeds]
                theirs = [baseline.get(seed) for seed in seeds]
                signed = stats.rank_with_failures(ours, theirs, outcomes.higher_is_better)
                ranks[name] = dict(zip(seeds, signed, strict=True))
        corrected = self._correct(ranks, outcomes.draws)
        return {name: (p, sum(ranks[name].values())) for name, p in corrected.items()}

    def find_interval(self, sample: Sample, confidence: float, step: Step) -> Interval | None:
        """Return Student's t interval of the mean difference, or an exact one of shares."""
        differences = sample[0].tolist()
        if step.share is not None:
            return difference_interval(differences, confidence, step.share)
        return stats.paired_interval(differences, confidence, step.size)

    def find_smallest_p(self, count: int) -> float:
        """Return the share of the two patterns of which all signs are equal."""
        return 2.0 ** (1 - count)

    def share_level(self, level: float, comparisons: int) -> float:
        """Return `level`: all variants share the sign patterns, so each can have the smallest p."""
        return level

    def scale_effect(self, deviations: float) -> float:
        """Return the effect for differences, with sqrt(2) times the standard deviation of a run."""
        return deviations / math.sqrt(2)

    def list_sizes(self, count: Any) -> list[Any]:
        """Return the size of the only array."""
        return [count]

    def find_power(self, effect: float, sizes: list[int], comparisons: int, level: float) -> float:
        """Return the simulated power of the joint test."""
        return stats.star_power(effect, sizes[0], comparisons, level)

    def _describe_limits(self, counts: Sequence[int]) -> str:
        """Return the smallest p that the largest sample can have."""
        pairs = max(counts, default=0)
        smallest = write_number(min(1.0, self.find_smallest_p(pairs)), ".3g")
        limits = f"it cannot fall below {smallest} with {plural(pairs, 'pair')}"
        if len(set(counts)) < 2:
            return limits
        return (
            "a seed that a variant lacks adds nothing to its statistic, and p is larger for fewer"
            f" pairs; {limits}"
        )


class IndependentRuns(SignificanceTest):
    """The permutation test of two groups of runs that share no seeds, with Welch's t."""

    pairs: ClassVar[Pairs] = "none"
    name = "permutations of independent runs, studentised"
    is_paired = False
    has_seeds = False
    fewest_values = independent.SMALLEST_GROUP
    least_spread = 1e-9
    least_skewness = 0.0
    statistic = staticmethod(independent.studentise)
    words: ClassVar[Mapping[str, str]] = {
        "unit": "run",
        "cell": "run",
        "done": "runs",
        "fewest": "runs of each in equal groups",
        "test": "permutation test",
        "brief_test": "permutation test of independent runs",
        "statistic": ", with Welch's t as its statistic",
        "rank_test": "permutation test of ranks",
        "difference": "that of the means of variant and {baseline}",
        "brief_difference": "that of the means",
        "interval": "Welch's 95 % interval of independent runs",
        "brief_interval": "Welch's 95 % interval of independent runs",
        "coverage": "",
        "spreads": "If the true spreads differ, p is approximate, the more so for small groups and"
        " skewed values.",
    }

    def make_sample(self, values: Values, baseline: Values) -> Sample:
        """Return the values of the variant and those of the baseline."""
        return [np.array(list(group.values()), dtype=float) for group in (values, baseline)]

    def find_p(self, sample: Sample, draws: int = DRAWS) -> float:
        """Return the p of the permutations of one variant and the baseline."""
        group, baseline = sample
        return independent.group_p(baseline, group, draws, self.statistic)

    def correct(self, outcomes: Outcomes) -> dict[str, float]:
        """Return the corrected p of every variant if the groups are large enough."""
        baseline = outcomes.values[outcomes.baseline]
        samples = [self.make_sample(outcomes.values[name], baseline) for name in outcomes.others]
        return self._correct(outcomes.others, samples, outcomes.draws)

    def _correct(
        self, names: Sequence[str], samples: Sequence[Sample], draws: int
    ) -> dict[str, float]:
        """Return the corrected p of the variants whose samples are large enough."""
        compared = {}
        for name, sample in zip(names, samples, strict=True):
            if self.is_comparable(sample):
                group, baseline = sample
                compared[name] = (group, baseline)
        p_values = independent.correct_samples(list(compared.values()), draws, self.statistic)
        return dict(zip(compared, p_values, strict=True))

    def list_rows(self, groups: Mapping[Levels, Values]) -> dict[Levels, list[float]]:
        """Return a row for each group of at least two runs, which is 1 in its own column.

        A contrast of such rows has the weights of the groups, which share no seeds.
        """
        known = _list_known(groups)
        return dict(zip(known, np.eye(len(known)).tolist(), strict=True))

    def estimate_effects(
        self, groups: Mapping[Levels, Values], contrasts: Sequence[Floats], step: float
    ) -> list[EffectEstimate]:
        """Return weighted sums of the groups' means, with Welch's t test and Holm's correction."""
        known = _list_known(groups)
        estimates = []
        for contrast in contrasts:
            parts = zip(contrast.mean(axis=0).tolist(), known.values(), strict=True)
            mean = combine_means((weight, group) for weight, group in parts if weight)
            low, high = find_ends(mean, 1 - stats.ALPHA)
            p = find_p(mean)
            # Without a variance nothing is shown.
            estimates.append(EffectEstimate(mean.value, low, high, 1.0 if p is None else p, []))
        corrected = stats.holm([estimate.p for estimate in estimates])
        pairs = zip(estimates, corrected, strict=True)
        return [estimate._replace(p=p) for estimate, p in pairs]

    def rank(self, outcomes: Outcomes) -> dict[str, tuple[float, float]]:
        """Return corrected p and difference of the mean ranks of every variant."""
        groups: list[list[float | None]] = []
        for name in (outcomes.baseline, *outcomes.others):
            failed = [None] * len(outcomes.failed[name])
            groups.append([*outcomes.values[name].values(), *failed])
        baseline, *ranks = independent.rank_runs(groups, outcomes.higher_is_better)
        samples = [(group, baseline) for group in ranks]
        corrected = self._correct(outcomes.others, samples, outcomes.draws)
        by_name = dict(zip(outcomes.others, ranks, strict=True))
        return {
            name: (p, float(by_name[name].mean() - baseline.mean()))
            for name, p in corrected.items()
        }

    def find_interval(self, sample: Sample, confidence: float, step: Step) -> Interval | None:
        """Return Welch's interval of the difference of the means."""
        if not self.is_comparable(sample):
            return None
        group, baseline = sample
        return independent.welch_interval(baseline, group, confidence, step.size)

    def find_progress(self, count: int, planned: int, are_open: Sequence[bool]) -> tuple[int, int]:
        """Return the runs of both groups that have ended, and all of them."""
        return are_open.count(False), len(are_open)

    def find_smallest_p(self, count: int) -> float:
        """Return the share of the two divisions that separate the groups."""
        return 2 / math.comb(2 * count, count)

    def share_level(self, level: float, comparisons: int) -> float:
        """Return the level with Bonferroni's correction."""
        return level / comparisons

    def scale_effect(self, deviations: float) -> float:
        """Return `deviations`: a sample has the values of runs."""
        return deviations

    def list_sizes(self, count: Any) -> list[Any]:
        """Return the sizes of variant and baseline."""
        return [count, count]

    def find_power(self, effect: float, sizes: list[int], comparisons: int, level: float) -> float:
        """Return the power of the t test of two groups, with Bonferroni's correction."""
        return float(stats.t_power(effect, sizes, level / comparisons))

    def find_forecast(self, sample: Sample, rule: Rule) -> int | None:
        """Return the runs of each group that give a star; no further look is planned."""
        return super().find_forecast(sample, rule._replace(planned=MOST_RUNS, margin=None))

    def describe(self, counts: Sequence[int], baseline_count: int) -> str:
        """Return the name of the test with its number of permutations."""
        if len(counts) > 1:
            return f"{self.name}, step-down max-T ({DRAWS:,} seeded permutations)"
        if not counts:
            return self.name
        permutations = independent.count_permutations(baseline_count, counts[0])
        kind = "all" if permutations.is_exact else "seeded"
        return f"{self.name} ({permutations.number:,} {kind} permutations)"


class LogRank(IndependentRuns):
    """The log-rank test of times until an event, of which some runs know only a limit.

    p counts the divisions of the runs into two groups whose log-rank statistic is as large as the
    observed one (`find_scores`). scipy.stats.logrank takes the statistic as normal, which few runs
    do not allow: at 0.05 it has a false star in .10 of all cases with three against three runs, and
    in .07 with five against five.

    Runs with one seed are no pairs here. That is on the safe side if a seed is early or late in all
    variants, because differences then vary less than the test expects.

    The value of a variant is a median, of which few runs give no useful interval.
    """

    pairs: ClassVar[Pairs] = "log-rank"
    name = "log-rank test by permutations"
    has_seeds = True
    has_means = False
    least_skewness = math.inf
    statistic = staticmethod(independent.standardise)
    words: ClassVar[Mapping[str, str]] = {
        **PairedSeeds.words,
        "test": "log-rank test",
        "brief_test": "log-rank test",
        "statistic": ", by the divisions of their runs into two groups",
        "rank_test": "permutation test of ranks",
        "difference": "that of the medians of variant and {baseline}",
        "brief_difference": "that of the medians",
        "interval": "no interval",
        "brief_interval": "no interval",
        "coverage": "",
    }
    missing = "Seeds without a result are listed beside n and enter no median."

    def make_sample(self, values: Values, baseline: Values) -> Sample:
        """Return the log-rank scores of the variant and those of the baseline."""
        scores = times.find_scores([*values.values(), *baseline.values()])
        return [scores[: len(values)], scores[len(values) :]]

    def find_center(self, values: Iterable[float]) -> float | None:
        """Return the median, None if it is not reached."""
        return times.find_median(values)

    def find_difference(self, values: Values, baseline: Values) -> float | None:
        """Return the difference of the medians, None if one of them is not reached."""
        median = self.find_center(values.values())
        other = self.find_center(baseline.values())
        return None if median is None or other is None else median - other

    def list_rows(self, groups: Mapping[Levels, Values]) -> dict[Levels, list[float]]:
        """Return no row: a log-rank test knows no effects of crossed factors."""
        return {}

    def find_interval(self, sample: Sample, confidence: float, step: Step) -> Interval | None:
        """Return None: the median of a few runs has no useful interval."""
        return None

    def find_power(self, effect: float, sizes: list[int], comparisons: int, level: float) -> float:
        """Return the simulated power for normal times without limits, with Bonferroni's correction.

        Without equal times and limits the scores belong to the places in the common order.
        """
        first, second = sizes
        generator = np.random.default_rng(0)
        scores = times.find_scores(range(first + second))
        times_of_runs = generator.normal(size=(POWER_STUDIES, first + second))
        times_of_runs[:, :first] += effect
        places = times_of_runs.argsort(axis=1).argsort(axis=1)
        sums = np.abs(scores[places[:, :first]].sum(axis=1))
        shuffled = generator.random((DRAWS, first + second)).argsort(axis=1)[:, :first]
        by_chance = np.sort(np.abs(scores[shuffled].sum(axis=1)))
        # A sum is compared with equal ones up to rounding.
        exceeding = len(by_chance) - np.searchsorted(by_chance, sums - 1e-9)
        return float((exceeding <= level / comparisons * len(by_chance)).mean())

    def _describe_limits(self, counts: Sequence[int]) -> str:
        """Return that runs with one seed are no pairs."""
        return "runs with the same seed are not taken as pairs"


def _list_known(groups: Mapping[Levels, Values]) -> dict[Levels, list[float]]:
    """Return the values of the groups whose variance is known, which takes two runs."""
    return {levels: list(group.values()) for levels, group in groups.items() if len(group) > 1}


TESTS: dict[str, SignificanceTest] = {
    test.pairs: test for test in (PairedSeeds(), IndependentRuns(), LogRank())
}
"""All tests by their value of `pairs`."""

OWN_TEST = TESTS["seed"]
"""Test of the studies that this package trains, whose variants have the same seeds."""
