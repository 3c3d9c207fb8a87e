"""Tests of significance: every question about the test of a study is a method of one object.

A test has a p and its correction for several variants, an interval, the fewest runs with a star,
its power, the runs that a verdict needs, and its words. `StudyRecord.test` is the test of a study;
tables, verdicts, next actions, streams, claims and dry runs ask it. A further test is a further
class in this file, with a value of `Pairs`. Effects of factors (lit_attn.report.tables.effects)
have this test for pairs, and Welch's with Holm's correction for independent runs.

A *sample* holds what one comparison of a variant with the baseline computes with: the differences
of pairs, or the values of both groups with the variant's first. All samples of a test have the same
number of arrays.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np
from scipy import special

from lit_attn.report.numbers import write_number
from lit_attn.report.statistics import Pairs, independent, stats
from lit_attn.report.statistics.shares import difference_interval
from lit_attn.report.statistics.stats import DRAWS, Floats, Interval
from lit_attn.schema.errors import plural

MOST_RUNS = 1000
"""Largest number of pairs, or of runs of each group, that is suggested."""

Values = Mapping[int, float]
"""Values of a variant by seed."""

Sample = Sequence[Floats]


class Outcomes(NamedTuple):
    """Values and failed seeds of all variants, by name, and the random patterns of a test."""

    baseline: str
    values: Mapping[str, Values]
    failed: Mapping[str, Collection[int]]
    higher_is_better: bool
    draws: int = DRAWS

    @property
    def others(self) -> list[str]:
        """Names of all variants but the baseline."""
        return [name for name in self.values if name != self.baseline]


class Step(NamedTuple):
    """Size of the step of a metric, and the printed value of 1 if every value is 0 or 1."""

    size: float = 0.0
    share: float | None = None


class Rule(NamedTuple):
    """Rule by which a verdict is decided.

    `level` holds up to `planned` seeds, and `next_level` for a look with more of them. The levels
    are shared by all `comparisons`. `margin` is the largest difference that does not matter.
    """

    level: float
    next_level: float
    planned: int
    comparisons: int
    margin: float | None


def _find_moments(sample: Sample) -> tuple[float, float, float]:
    """Return a unit, and in this unit the difference and the sum of the variances of all arrays."""
    # A division by a power of two changes no digit, and no square of its result overflows.
    unit = stats.find_unit(np.concatenate(sample).tolist())
    moments = [stats.find_moments((values / unit).tolist()) for values in sample]
    difference = moments[0][0] - sum(mean for mean, _ in moments[1:])
    return unit, difference, sum(variance for _, variance in moments)


class SignificanceTest(ABC):
    """A test of the hypothesis that variant and baseline have the same distribution.

    `pairs` is its value of the option, and `name` its name in answers. `is_paired` says whether
    runs with one seed belong together, so that a sample has one array; otherwise a seed is only a
    place among the runs of its variant. A sample with a p has arrays of at least `fewest_values`.
    `least_spread` is the relative spread above which values vary, and `least_skewness` the skewness
    from which on unequal spreads make p doubtful.
    """

    pairs: ClassVar[Pairs]
    name: ClassVar[str]
    is_paired: ClassVar[bool]
    fewest_values: ClassVar[int]
    least_spread: ClassVar[float]
    least_skewness: ClassVar[float]

    words: ClassVar[Mapping[str, str]]
    """Placeholders of captions and their texts, in which {baseline} is the baseline's name.

    - unit, done, fewest: a run, and the units of `planned` and of `find_fewest`.
    - test, statistic, rank_test: the test, its statistic, and the test of ranks with failed runs.
    - difference, interval, coverage: the estimate, its 95 % interval, and a sentence about it.
    - spreads: a sentence about variants whose spread is not that of the baseline.

    A name with brief_ is that of a brief caption.
    """

    share_words: ClassVar[Mapping[str, str]] = {}
    """Texts that replace some of `words` if all values are 0 or 1; empty without such an interval.

    `shares` is a sentence about such values, of which {high} is the printed value of 1.
    """

    @abstractmethod
    def make_sample(self, values: Values, baseline: Values) -> Sample:
        """Return the sample of a variant with these values."""

    def is_comparable(self, sample: Sample) -> bool:
        """Return True if the sample is large enough for a p."""
        return min(len(values) for values in sample) >= self.fewest_values

    @abstractmethod
    def find_p(self, sample: Sample, draws: int = DRAWS) -> float:
        """Return the two-sided p of one comparison."""

    @abstractmethod
    def correct(self, outcomes: Outcomes) -> dict[str, float]:
        """Return the corrected p of every variant that can be compared (step-down max-T)."""

    def correct_rows(self, rows: Floats, draws: int = DRAWS) -> list[float]:
        """Return the corrected p of each row of differences by seed, for a test of pairs alone."""
        raise NotImplementedError(f"{self.name}: independent runs have no differences by seed")

    @abstractmethod
    def rank(self, outcomes: Outcomes) -> dict[str, tuple[float, float]]:
        """Return each variant's corrected p if a failed seed is worse than any value.

        The second number is positive if the ranks favour the variant.
        """

    @abstractmethod
    def find_interval(self, sample: Sample, confidence: float, step: Step) -> Interval | None:
        """Return the interval of the difference, None if the sample is too small."""

    def find_progress(self, count: int, planned: int, are_open: Sequence[bool]) -> tuple[int, int]:
        """Return how much of a comparison is done, and how much is planned.

        `count` is the size of the sample, `planned` the number of seeds, and `are_open` has an
        entry for each cell of variant and baseline.
        """
        return count, planned

    @abstractmethod
    def find_smallest_p(self, count: int) -> float:
        """Return the smallest p of `count` pairs, or of two groups of `count` runs."""

    def find_fewest(self, level: float) -> int:
        """Return the fewest pairs, or runs of each group, whose p can be as small as `level`."""
        count = self.fewest_values
        while self.find_smallest_p(count) > level:
            count += 1
        return count

    def find_effect(self, sample: Sample) -> float | None:
        """Return the difference in standard deviations of a value, None without any spread."""
        if min(len(values) for values in sample) < 2:
            return None
        unit, difference, variance = _find_moments(sample)
        spread = math.sqrt(variance / len(sample))
        largest = max(float(np.abs(values).max()) for values in sample)
        # Rounding errors can leave a small spread where there is none.
        return None if spread * unit <= self.least_spread * largest else difference / spread

    def scale_effect(self, deviations: float) -> float:
        """Return the effect in `find_effect` of a difference in standard deviations of a run."""
        # The difference of a pair has sqrt(2) times the standard deviation of a run.
        return deviations / math.sqrt(2) if self.is_paired else deviations

    def list_sizes(self, count: Any) -> list[Any]:
        """Return the sizes of the arrays of a sample of `count` pairs, or of groups of runs."""
        return [count] if self.is_paired else [count, count]

    @abstractmethod
    def find_power(self, effect: float, sizes: list[int], comparisons: int, level: float) -> float:
        """Return the probability of a star at `level` for a variant with this effect.

        `sizes` are those of its sample. The other variants have no effect.
        """

    def find_t_power(self, effect: float, count: int, level: float) -> float:
        """Return the power of the t test of `count` pairs, or of groups of `count` runs."""
        return float(stats.t_power(effect, self.list_sizes(count), level))

    def find_needed(self, sample: Sample) -> tuple[int, int | None] | None:
        """Return the range of pairs or runs for 80 % power of a t test at 0.05.

        It follows from the 95 % interval of the effect (noncentral t), and has no upper end if that
        interval contains 0. Returns None without any spread.
        """
        effect = self.find_effect(sample)
        if effect is None:
            return None
        sizes = [len(values) for values in sample]
        freedom = sum(sizes) - len(sizes)
        error = math.sqrt(sum(1 / size for size in sizes))
        # Beyond this t scipy's series does not converge.
        t = min(abs(effect) / error, 100.0)
        low = self.count_for_power(float(special.nctdtrinc(freedom, 0.025, t)) * error)
        if t <= special.stdtrit(freedom, 0.975):
            return low, None
        return low, self.count_for_power(float(special.nctdtrinc(freedom, 0.975, t)) * error)

    def count_for_power(self, effect: float) -> int:
        """Return the pairs or runs for 80 % power of a t test at 0.05; 1001 for over MOST_RUNS."""
        counts = np.arange(2, MOST_RUNS + 1)
        has_power = stats.t_power(effect, self.list_sizes(counts), 0.05) >= 0.8
        return int(counts[has_power.argmax()]) if has_power.any() else MOST_RUNS + 1

    def find_forecast(self, sample: Sample, rule: Rule) -> int | None:
        """Return the fewest pairs or runs that decide a verdict, None above MOST_RUNS.

        Difference and spread are taken as they are. Their simultaneous interval must exclude 0,
        with enough pairs or runs for a star, or lie within the margin.
        """
        sizes = [len(values) for values in sample]
        if min(sizes) < 2:
            return None
        unit, difference, variance = _find_moments(sample)
        for level, first, last in (
            (rule.level, max(sizes) + 1, rule.planned),
            (rule.next_level, rule.planned + 1, MOST_RUNS),
        ):
            counts = np.arange(first, last + 1)
            alpha = level / rule.comparisons
            quantiles = special.stdtrit(len(sizes) * (counts - 1), 1 - alpha / 2)
            half = quantiles * np.sqrt(variance / counts)
            # All variants share the sign patterns of pairs, so each can have the smallest p.
            fewest = self.find_fewest(level if self.is_paired else alpha)
            is_decided = (abs(difference) > half) & (counts >= fewest)
            if rule.margin is not None:
                is_decided |= abs(difference) + half < rule.margin / unit
            if is_decided.any():
                return int(counts[is_decided.argmax()])
        return None

    def describe(self, counts: Sequence[int], baseline_count: int) -> str:
        """Return the name of the test with its correction; `counts` are the sizes of samples."""
        return f"{self.name}, step-down max-T"

    def define(self, comparisons: str, counts: Sequence[int]) -> str:
        """Return the sentence of a caption that defines p, corrected for `comparisons`."""
        return (
            f"p is the two-sided {self.words['test']} of the hypothesis that variant and baseline"
            f" have the same distribution{self.words['statistic']}, corrected for {comparisons} by"
            f" the step-down max-T method of Westfall and Young; {self._describe_limits(counts)}."
        )

    def _describe_limits(self, counts: Sequence[int]) -> str:
        """Return what a reader must know about p, as the end of a sentence."""
        return "it does not depend on the order of the runs"


class PairedSeeds(SignificanceTest):
    """The sign-flip test of the differences between runs with the same seed."""

    pairs = "seed"
    name = "sign flips of paired differences"
    is_paired = True
    fewest_values = 1
    least_spread = 1e-4
    least_skewness = 1.0
    words: ClassVar[Mapping[str, str]] = {
        "unit": "seed",
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

    def make_sample(self, values: Values, baseline: Values) -> Sample:
        """Return the differences of the seeds with both values."""
        return [np.array(list(self._pair(values, baseline).values()), dtype=float)]

    def _pair(self, values: Values, baseline: Values) -> dict[int, float]:
        """Return the differences to the baseline by seed."""
        return {seed: value - baseline[seed] for seed, value in values.items() if seed in baseline}

    def find_p(self, sample: Sample, draws: int = DRAWS) -> float:
        """Return the p of the sign flips of one variant."""
        return self.correct_rows(np.stack(sample), draws)[0]

    def correct_rows(self, rows: Floats, draws: int = DRAWS) -> list[float]:
        """Return the p of the joint sign flips of all rows."""
        return stats.joint_sign_flip(rows, draws)

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

    pairs = "none"
    name = "permutations of independent runs, studentised"
    is_paired = False
    fewest_values = independent.SMALLEST_GROUP
    least_spread = 1e-9
    least_skewness = 0.0
    words: ClassVar[Mapping[str, str]] = {
        "unit": "run",
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
        """Return the p of the studentised permutations of one variant and the baseline."""
        group, baseline = sample
        return independent.group_p(baseline, group, draws)

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
        baseline = np.zeros(0)
        for name, sample in zip(names, samples, strict=True):
            if self.is_comparable(sample):
                compared[name], baseline = sample
        p_values = independent.correct_groups(baseline, list(compared.values()), draws)
        return dict(zip(compared, p_values, strict=True))

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


TESTS: dict[str, SignificanceTest] = {"seed": PairedSeeds(), "none": IndependentRuns()}
"""All tests by their value of `pairs`."""

OWN_TEST = TESTS["seed"]
"""Test of the studies that this package trains, whose variants have the same seeds."""
