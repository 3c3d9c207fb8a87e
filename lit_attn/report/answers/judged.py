"""Verdicts of a study: the models of the keys that `judge --json` prints."""

from typing import Literal

from pydantic import Field

from lit_attn.report.answers.entry import Entry
from lit_attn.report.answers.runs import EndedVariant, StudyDesign
from lit_attn.report.statistics import Pairs

Verdict = Literal["better", "worse", "equivalent", "undecided"]


Stage = Literal["screening", "screened-out", "confirming", "judged"]
"""Stage of an idea of a stream (lit_attn.judging.stream)."""


ActionKind = Literal["none", "run", "add-seeds", "rerun", "stop", "screen", "confirm"]
"""Kind of the next action.

- none: every verdict is decided, and no planned seed is missing.
- run: train the planned cells that have no result.
- add-seeds: train more seeds of all variants, which is a further look at the results.
- rerun: remove the reason why seeds have failed, and train them again.
- stop: no number of seeds that can be paid decides an undecided variant.
- screen: run an idea of a stream, or its baseline, as often as the screening needs.
- confirm: give the best variants, or an idea that has passed its screening, fresh runs, and the
  baseline, too.
"""


class JudgedMetric(Entry):
    """Metric of a study; `margin` is the largest difference that does not matter."""

    name: str
    label: str
    goal: Literal["max", "min"]
    margin: float | None


class Values(Entry):
    """Values of the metric of a variant or of the baseline, in printed units.

    `n` counts the runs with a value, `sd` is the sample standard deviation (null below two runs).
    Times until an event have the number of runs with it as `events`; under the log-rank test they
    have a `median` (null if it is not reached) in place of a mean.
    """

    n: int
    mean: float | None
    sd: float | None
    median: float | None = None
    events: int | None = None

    @property
    def center(self) -> float | None:
        """Mean, or median of times until an event."""
        return self.median if self.mean is None else self.mean


class Interval(Entry):
    """Mean difference to the baseline with its 95 % interval, in printed units.

    It is the mean of the differences of pairs, or the difference of the means of independent runs.
    Under the log-rank test it is the difference of the medians and has no interval.
    """

    mean: float
    low: float | None
    high: float | None


class SeedCounts(Entry):
    """Numbers of seeds; `pairs` are those with a value of the variant and of the baseline.

    Independent runs have no pairs (null).
    """

    done: int
    planned: int
    failed: int
    pairs: int | None


class Range(Entry):
    """Range of a number of seeds; `high` is null if it is above 1,000 or has no limit."""

    low: int
    high: int | None


class Power(Entry):
    """Probability of a star with `pairs` pairs if the measured effect is true.

    With independent runs `pairs` are the runs of the variant.
    """

    pairs: int
    probability: float


class Cost(Entry):
    """Cost of a variant, null where it was not measured.

    Seconds are those of one seed (median) and of all its seeds. `step_time` is in seconds (median)
    and `step_time_ratio` its ratio to the baseline's; `peak_memory` is in bytes (median). `flops`
    are those of the forward pass of one sample, and `cache_bytes` those that decoding stores for
    each token, in float32 (null for a model without a cache).
    """

    seconds_per_seed: float | None
    seconds_spent: float | None
    step_time: float | None
    step_time_ratio: float | None
    peak_memory: float | None
    parameters: float | None
    flops: float | None
    cache_bytes: float | None


class InterimLook(Entry):
    """Look at a running study: the fewest pairs of a running variant, and its largest p for a star.

    The levels of all looks spend 0.05 together (docs/methods.md).
    """

    seeds: int
    planned: int
    level: float


SCREEN_RUNS = 2
"""Runs of an idea of a stream that screen it."""


class StreamStep(Entry):
    """Place of an idea in a stream, and what its screening and its confirmation have shown.

    `place` counts the ideas from 1 on. `screened` is the difference of the means of its screening
    runs and the baseline's, and `threshold` the smallest improvement with which an idea is
    confirmed (both null before its screening has ended). `confirmation` counts the confirmations
    from 1 on, and `confirm_runs` are the runs of this one, of which `confirmed_runs` have ended
    (both null for an idea that has not passed its screening).
    """

    place: int
    stage: Stage
    screening_runs: int
    screened: float | None
    threshold: float | None
    confirmation: int | None
    confirm_runs: int | None
    confirmed_runs: int


class JudgedVariant(Entry):
    """Verdict of a variant and the numbers that it follows from.

    `criterion` is the entry of `match` that holds for it (null: unknown, as for other programs).
    `p` is corrected for all variants. `seeds_needed` is the range of pairs (or of independent runs
    of each variant) for 80 % power of a t test at 0.05, but at least as many as a star needs, and
    `seeds_missing` what remains of it; both are null for a decided variant. `pairs_for_verdict` is
    the number with which the verdict would be decided at the next look, if mean and spread stay as
    they are (null: decided already, unknown, or over 1,000). `level` is the variant's
    largest p with a star. `ended` is null unless a stream has ended the idea. `stream` is null
    without --stream; with it, all numbers but `cost` are those of the confirmation, and p is not
    corrected, because `level` is.
    """

    variant: str
    label: str
    criterion: str | None
    verdict: Verdict
    is_final: bool
    ended: EndedVariant | None
    values: Values
    difference: Interval | None
    p: float | None
    level: float
    is_significant: bool
    seeds: SeedCounts
    power: list[Power]
    seeds_needed: Range | None
    seeds_missing: Range | None
    pairs_for_verdict: int | None
    cost: Cost
    stream: StreamStep | None = None


class SealedPlan(Entry):
    """First seal of the plan, and what changed after results had been seen."""

    hash: str
    time: str
    is_before_results: bool
    added_seeds: list[int]
    added_variants: list[str]
    removed_variants: list[str]
    removed_seeds: list[str]
    changed_decisions: list[str]


class Action(Entry):
    """Next action that can change a verdict at the lowest cost.

    `seconds` is the expected time of its cells one after another, null if no cell was measured.
    `command` is null if the file of the study is unknown, as for runs of other programs. `runs` has
    the number of further runs by variant, and `seeds` their seeds (empty if any new run will do).
    """

    kind: ActionKind
    text: str
    command: str | None
    variants: list[str]
    runs: dict[str, int]
    seeds: dict[str, list[int]] = Field({})
    cells: int
    seconds: float | None


class Stream(Entry):
    """Stream of ideas: the error of all of its confirmations, and what the next one would need.

    `confirmations` is the number of ideas that have passed the screening. The next one that does
    has the largest p `next_level` for a star, and `next_runs` runs.
    """

    error: float
    confirmations: int
    next_level: float
    next_runs: int | None


class BudgetPlan(Entry):
    """Budget of --budget, as seconds or as a number of trainings; the other one is null.

    `power` is the probability of a verdict by variant if the runs of `next` are made, predicted
    from the measured values (empty if too few of them are known).
    """

    seconds: float | None
    trainings: int | None
    power: dict[str, float]


class JudgedStudy(Entry):
    """Verdicts of a study.

    `pairs` is "seed" if runs with one seed belong together, "none" for independent runs, and
    "log-rank" for the times until an event of runs with equal seeds; `test`
    names the test. `validity` says whether the baseline is better than the best rule without
    attention (null: no rule is known). No variant of a study below its floor is called better.
    `notes` are the odd things of the runs of another program, such as missing and equal values.
    `rule` is the rule of the verdicts: the margin of the study, or the star of its table. `level`
    is the largest corrected p with a star at this look (0.05 for a complete first plan without
    earlier looks). `is_interim` is true while planned seeds are missing; `interim` has the bound.
    `design` is null for a study with `seeds`; `variants` are those that its screening has kept, and
    all of them before it has ended. `is_smoke` is true for a smoke run, of which no variant is
    judged.
    """

    study: str
    title: str
    is_smoke: bool
    metric: JudgedMetric
    baseline: str
    baseline_label: str
    baseline_values: Values
    baseline_cost: Cost
    pairs: Pairs
    test: str
    validity: Literal["above-floor", "below-floor"] | None
    notes: list[str]
    rule: Literal["margin", "star"]
    level: float
    look: int
    is_interim: bool
    interim: InterimLook | None
    design: StudyDesign | None
    sealed: SealedPlan | None
    warnings: list[str]
    variants: list[JudgedVariant]
    stream: Stream | None = None
    budget: BudgetPlan | None = None
    next: Action
