"""Answers of `judge` and `laws` with --json: the models of their keys."""

from typing import Literal

from pydantic import Field

from lit_attn.report.answers.entry import Entry
from lit_attn.report.answers.judged import Interval, JudgedMetric, JudgedStudy, Values
from lit_attn.schema.error_answer import FORMAT


class TargetGroup(Entry):
    """Verdict about a group of runs against a target.

    `passes` means that the mean is beyond the target, and `misses` that it is on the wrong side.
    `difference` is positive on the right side. `p` is valid also if the group is judged after every
    run; `p_t_test` is that of the one-sided t test, which is valid at one look. Both are null
    without a spread. `runs_missing` are the runs with which the group would pass if mean and spread
    stay as they are (null: decided, failed, or over 1,000). `seconds` is the median time of a run.
    """

    group: str
    verdict: Literal["passes", "misses", "undecided"]
    values: Values
    failed: int
    difference: float | None
    p: float | None
    p_t_test: float | None
    runs_missing: int | None
    seconds: float | None


class JudgedTarget(Entry):
    """Verdicts about groups of runs against a target, each at the level alone.

    If the groups are numbers, such as steps, `first_passing` is the smallest one from which on all
    pass, tested from the largest one down (null: none, or other groups).
    """

    study: str
    metric: JudgedMetric
    target: float
    level: float
    groups: list[TargetGroup]
    first_passing: str | None
    notes: list[str]
    next: str


class JudgeAnswer(Entry):
    """Answer of `judge --json`; `targets` has the files that were judged with --target."""

    format: int = FORMAT
    command: Literal["judge"] = "judge"
    studies: list[JudgedStudy]
    targets: list[JudgedTarget] = Field([])


class Law(Entry):
    """Law L = asymptote + factor C^-exponent of a variant, fitted to `runs` runs.

    `misfit` is the largest relative distance of a run from the law.
    """

    variant: str
    runs: int
    asymptote: float
    exponent: Interval
    factor: float
    misfit: float

    def predict(self, cost: float) -> float:
        """Return the loss at a cost."""
        loss: float = self.asymptote + self.factor * cost**-self.exponent.mean
        return loss


class CostComparison(Entry):
    """A variant at a cost against the baseline.

    `difference` is the loss minus the baseline's at the same cost, null outside its costs, and `p`
    that of its t test. `basis` is "runs" if the baseline has runs at this cost, else "law".
    `speedup` is the cost with which the baseline reaches this loss, relative to `cost`, and
    `time_speedup` the same in seconds, null without rates. `is_extrapolated` is true if the
    baseline needs more than its largest cost.
    """

    variant: str
    cost: float
    runs: int
    loss: float
    basis: Literal["runs", "law"]
    difference: Interval | None
    p: float | None
    speedup: Interval | None
    time_speedup: Interval | None
    is_extrapolated: bool


class LawsAnswer(Entry):
    """Answer of `laws --json`: the law of each variant, and each variant at each of its costs."""

    format: int = FORMAT
    command: Literal["laws"] = "laws"
    metric: str
    cost: str
    baseline: str
    confidence: float
    laws: list[Law]
    comparisons: list[CostComparison]
    warnings: list[str]
