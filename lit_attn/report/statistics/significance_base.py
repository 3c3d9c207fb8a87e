"""Questions to a test of significance: every one is a method of one object.

A test has a p and its correction for several variants, an interval, the fewest runs with a star,
its power, the runs that a verdict needs, effects of factors, and its words. The tests are classes
of lit_attn.report.statistics.significance.

A *sample* holds what one comparison of a variant with the baseline computes with: the differences
of pairs, or the values of both groups with the variant's first. All samples of a test have the same
number of arrays.
"""

import math
import statistics
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np
from scipy import special

from lit_attn.report.statistics import Pairs, stats
from lit_attn.report.statistics.stats import DRAWS, Floats, Interval

MOST_RUNS = 1000
"""Largest number of pairs, or of runs of each group, that is suggested."""

Values = Mapping[int, float]
"""Values of a variant by seed."""

Places = Mapping[int, int]
"""Seeds of runs by their places, in the order in which the runs ended."""

Levels = tuple[str, ...]
"""Levels of all factors of a variant."""

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


class EffectEstimate(NamedTuple):
    """Effect of a factor: its mean, the ends of its 95 % interval, and its corrected p.

    `by_seed` has its values, and is empty if runs do not belong together by seed.
    """

    mean: float
    low: float | None
    high: float | None
    p: float
    by_seed: list[float]


class SignificanceTest(ABC):
    """A test of the hypothesis that variant and baseline have the same distribution.

    `pairs` is its value of the option, and `name` its name in answers. `is_paired` says whether
    runs with one seed belong together, so that a sample has one array; otherwise a seed is only a
    place among the runs of its variant. `has_seeds` says whether all variants have the same seeds,
    so that further runs are further seeds of each. `has_means` says whether the value of a variant
    is the mean of its runs; otherwise it is their median. A sample with a p has arrays of at least
    `fewest_values`. `least_spread` is the relative spread above which values vary, and
    `least_skewness` the skewness from which on unequal spreads make p doubtful.
    """

    pairs: ClassVar[Pairs]
    name: ClassVar[str]
    is_paired: ClassVar[bool]
    has_seeds: ClassVar[bool]
    has_means: ClassVar[bool] = True
    fewest_values: ClassVar[int]
    least_spread: ClassVar[float]
    least_skewness: ClassVar[float]

    words: ClassVar[Mapping[str, str]]
    """Placeholders of captions and their texts, in which {baseline} is the baseline's name.

    - unit, done, fewest: a run, and the units of `planned` and of `find_fewest`.
    - cell: a run of a next action.
    - test, statistic, rank_test: the test, its statistic, and the test of ranks with failed runs.
    - difference, interval, coverage: the estimate, its 95 % interval, and a sentence about it.
    - spreads: a sentence about variants whose spread is not that of the baseline.

    A name with brief_ is that of a brief caption.
    """

    share_words: ClassVar[Mapping[str, str]] = {}
    """Texts that replace some of `words` if all values are 0 or 1; empty without such an interval.

    `shares` is a sentence about such values, of which {high} is the printed value of 1.
    """

    missing: ClassVar[str] = ""
    """Sentence of a caption about planned runs without a value."""

    @abstractmethod
    def make_sample(self, values: Values, baseline: Values) -> Sample:
        """Return the sample of a variant with these values."""

    def choose_places(self, runs: Places, baseline: Places) -> tuple[list[int], list[int]]:
        """Return the places of the runs that are compared, those of the variant first."""
        return list(runs), list(baseline)

    def is_comparable(self, sample: Sample) -> bool:
        """Return True if the sample is large enough for a p."""
        return min(len(values) for values in sample) >= self.fewest_values

    @abstractmethod
    def find_p(self, sample: Sample, draws: int = DRAWS) -> float:
        """Return the two-sided p of one comparison."""

    @abstractmethod
    def correct(self, outcomes: Outcomes) -> dict[str, float]:
        """Return the corrected p of every variant that can be compared (step-down max-T)."""

    def compare_failures(self, outcomes: Outcomes) -> dict[str, float]:
        """Return the corrected p of each variant's number of failed seeds, if the test has one."""
        return {}

    @abstractmethod
    def list_rows(self, groups: Mapping[Levels, Values]) -> dict[Levels, list[float]]:
        """Return a row for each group with enough values, for contrasts of groups.

        A contrast is a weighted sum of rows. It is an array of all of its combinations of the other
        factors, each of the length of a row.
        """

    @abstractmethod
    def estimate_effects(
        self, groups: Mapping[Levels, Values], contrasts: Sequence[Floats], step: float
    ) -> list[EffectEstimate]:
        """Return the effect of each contrast, the mean over its combinations, all corrected.

        The contrasts are made of the rows of `list_rows`; `step` is the step of the metric.
        """

    @abstractmethod
    def rank(self, outcomes: Outcomes) -> dict[str, tuple[float, float]]:
        """Return each variant's corrected p if a failed seed is worse than any value.

        The second number is positive if the ranks favour the variant.
        """

    @abstractmethod
    def find_interval(self, sample: Sample, confidence: float, step: Step) -> Interval | None:
        """Return the interval of the difference, None if the sample is too small."""

    def find_center(self, values: Iterable[float]) -> float | None:
        """Return the value of a variant with these runs, None if they have none."""
        values = list(values)
        return statistics.fmean(values) if values else None

    def find_difference(self, values: Values, baseline: Values) -> float | None:
        """Return the difference of a variant to the baseline, None if they have none."""
        return self.find_direction(self.make_sample(values, baseline))

    def find_direction(self, sample: Sample) -> float:
        """Return a number that is positive if the variant's values are the larger ones."""
        means = [float(values.mean()) for values in sample]
        return means[0] - sum(means[1:])

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

    @abstractmethod
    def share_level(self, level: float, comparisons: int) -> float:
        """Return the largest uncorrected p whose p corrected for `comparisons` can be `level`."""

    def find_effect(self, sample: Sample) -> float | None:
        """Return the difference in standard deviations of a value, None without any spread."""
        if min(len(values) for values in sample) < 2:
            return None
        unit, difference, variance = _find_moments(sample)
        spread = math.sqrt(variance / len(sample))
        largest = max(float(np.abs(values).max()) for values in sample)
        # Rounding errors can leave a small spread where there is none.
        return None if spread * unit <= self.least_spread * largest else difference / spread

    @abstractmethod
    def scale_effect(self, deviations: float) -> float:
        """Return the effect in `find_effect` of a difference in standard deviations of a run."""

    @abstractmethod
    def list_sizes(self, count: Any) -> list[Any]:
        """Return the sizes of the arrays of a sample of `count` pairs, or of groups of runs."""

    def list_differences(self, values: Values, baseline: Values) -> list[float]:
        """Return the differences of pairs of runs; empty if runs do not belong together by seed."""
        return []

    def count_pairs(self, count: int) -> int | None:
        """Return the pairs of a sample of size `count`, None if runs have no pairs."""
        return None

    def count_ties(self, sample: Sample, tie: float) -> int:
        """Return the number of pairs whose difference is at most `tie`."""
        return 0

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
            fewest = self.find_fewest(self.share_level(level, rule.comparisons))
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
