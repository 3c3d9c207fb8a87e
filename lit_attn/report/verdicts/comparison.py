"""Comparison of every variant with the baseline: differences, intervals, tests and verdicts."""

import math
from dataclasses import dataclass
from typing import Any, get_args

import pandas as pd

from lit_attn.cells.records import FailureClass, Plan
from lit_attn.report.records.study_record import StudyRecord
from lit_attn.report.statistics import stats
from lit_attn.report.statistics.sequential import look_level
from lit_attn.report.statistics.significance_base import Outcomes, Sample, Step
from lit_attn.report.statistics.stats import ALPHA
from lit_attn.report.verdicts.evidence import make_sample

SMALLEST = 1e-12  # Smallest level of an interval.
POWERS = {"power_n": 1, "power_2n": 2, "power_4n": 4}
"""Multiple of the measured pairs or runs by CSV field of a star's power."""
MOST_DRAWS = 1_000_000  # Random permutations of a test at a very small level.
FAILURES: frozenset[str] = frozenset(get_args(FailureClass))


@dataclass(frozen=True)
class Comparisons:
    """Numbers of every variant's comparison with the baseline, by variant and CSV field.

    `pairs` has the number of pairs of every compared variant, and `level` is the largest corrected
    p with a star after all planned seeds. `interim` are the bounds of the variants with planned
    seeds to run, by their number of pairs.
    """

    records: dict[str, dict[str, Any]]
    pairs: list[int]
    level: float
    interim: dict[int, float]

    @property
    def look_level(self) -> float:
        """Smallest level of a running variant, or `level` if there is none."""
        return min(self.interim.values(), default=self.level)


def compare_variants(study: StudyRecord, with_power: bool = True) -> Comparisons:
    """Compare every variant with the baseline of the study.

    The simulated power takes most of the time; a decision that does not need it leaves it out.
    """
    plan = study.plan
    test = study.test
    outcomes = _read_outcomes(study)
    failed = outcomes.failed
    adjusted = test.correct(outcomes)
    ranked: dict[str, tuple[float, float]] = {}
    failure_p: dict[str, float] = {}
    if any(failed.values()):
        ranked = test.rank(outcomes)
        failure_p = test.compare_failures(outcomes)
    final_level = _find_level(study)
    running = _find_running(study)
    interim: dict[int, float] = {}
    counts = []
    records: dict[str, dict[str, Any]] = {plan.baseline: {"failed": len(failed[plan.baseline])}}
    for name in outcomes.others:
        sample = make_sample(study, name)
        count = len(sample[0])
        level = final_level
        if name in running:
            level, has_begun = _find_interim_level(study, name, count)
            if has_begun:
                interim[count] = level
        record: dict[str, Any] = {"pairs": 0, "p": None}
        if name in adjusted:
            counts.append(count)
            # Bonferroni's correction of the simultaneous intervals.
            record = _describe(name, sample, study, level / len(adjusted), outcomes.draws)
        record["failed"] = len(failed[name])
        record["failure_p"] = failure_p.get(name)
        record["level"] = level
        record["p_adjusted"] = adjusted.get(name)
        record["significant"] = adjusted.get(name, math.inf) <= level
        record["verdict"] = _judge(record, study)
        if failed[name] or failed[plan.baseline]:
            p, favour = ranked.get(name, (1.0, 0.0))
            _confirm(record, p, favour, plan.metric.goal)
        if level != final_level:
            # The margin of a wider interval would say nothing about the complete study.
            record["margin"] = None
        effect = record.get("effect")
        if effect and with_power:
            for field, factor in POWERS.items():
                sizes = [factor * len(values) for values in sample]
                record[field] = test.find_power(effect, sizes, len(adjusted), final_level)
        records[name] = record
    return Comparisons(records, counts, final_level, dict(sorted(interim.items())))


def _read_outcomes(study: StudyRecord) -> Outcomes:
    """Return the values and the failed seeds of all variants."""
    values = {}
    failed = {}
    for variant in study.plan.variants:
        name = variant.name
        values[name] = study.values(name)
        # Cells that are still to run have not failed.
        cells = study.variant_cells(name)
        failed[name] = {cell.seed for cell in cells if cell.status in FAILURES}
    is_higher_better = study.plan.metric.goal == "max"
    return Outcomes(study.plan.baseline, values, failed, is_higher_better, _count_draws(study))


def _find_interim_level(study: StudyRecord, name: str, count: int) -> tuple[float, bool]:
    """Return the level of a running variant with a sample of `count`, and whether it has begun."""
    cells = study.variant_cells(name) + study.variant_cells(study.plan.baseline)
    are_open = [cell.is_open for cell in cells]
    done, planned = study.test.find_progress(count, len(study.plan.seeds), are_open)
    return look_level(done, planned, find_alpha(study)), done > 0


def _find_running(study: StudyRecord) -> set[str]:
    """Return the variants with planned seeds to run, in the variant or in the baseline."""
    baseline = study.variant_cells(study.plan.baseline)
    open_seeds = {cell.seed for cell in baseline if cell.is_open}
    running = set()
    for variant in study.plan.variants:
        for cell in study.variant_cells(variant.name):
            if cell.is_open or cell.seed in open_seeds:
                running.add(variant.name)
    return running


def _find_level(study: StudyRecord) -> float:
    """Return the largest corrected p with a star after all planned seeds.

    If results were shown while the study ran, these looks have used a part of the error.
    """
    alpha = find_alpha(study)
    planned = len(study.plan.seeds)
    if study.looks is not None and study.looks.has_any(planned):
        return look_level(planned, planned, alpha)
    return alpha


def find_alpha(study: StudyRecord) -> float:
    """Return the error that the looks at the planned seeds may use together.

    The first plan has spent `study.alpha`, and all extensions spend at most half as much again.
    """
    added_looks = len(study.seals.added_seeds) if study.seals else 0
    return study.alpha / 2 ** (added_looks + 1) if added_looks else study.alpha


def _count_draws(study: StudyRecord) -> int:
    """Return the random permutations of a test, ten for each one that a star leaves above it."""
    return min(MOST_DRAWS, max(stats.DRAWS, math.ceil(10 / find_alpha(study))))


def _confirm(record: dict[str, Any], p: float, favour: float, goal: str) -> None:
    """Withdraw a star and a verdict that the test with failed seeds as the worst does not confirm.

    A failed seed drops out of the mean, so this second test must agree, also in direction. `p` is
    its corrected p, and `favour` its rank sum, which is positive in favour of the variant.
    """
    gain = record.get("direction", 0.0) * (1 if goal == "max" else -1)
    is_confirmed = p <= record["level"] and gain * favour > 0
    record["p_ranked"] = p
    record["significant"] = record["significant"] and is_confirmed
    # The seeds that finished show no equivalence of all seeds.
    record["margin"] = None
    if record["verdict"] == "equivalent" or (record["verdict"] and not is_confirmed):
        record["verdict"] = "undecided"


def _describe(
    name: str, sample: Sample, study: StudyRecord, alpha: float, draws: int
) -> dict[str, Any]:
    """Return the numbers of a variant's sample by CSV field; `alpha` is the error of one interval.

    A difference of medians can be unknown; `direction`, which is no field, never is.
    """
    test = study.test
    step = Step(study.resolution, study.plan.metric.scale if study.is_two_valued else None)
    # Rounding makes equal values unequal.
    tie = 1e-6 * max(abs(value) for value in study.values(study.plan.baseline).values())
    record: dict[str, Any] = {
        "pairs": len(sample[0]),
        "p": test.find_p(sample, draws),
        "difference": test.find_difference(study.values(name), study.values(study.plan.baseline)),
        "direction": test.find_direction(sample),
        "ties": test.count_ties(sample, tie),
    }
    interval = test.find_interval(sample, 1 - ALPHA, step)
    # Levels of early looks are smaller than the distance of a confidence to 1 in floating point.
    confidence = 1 - max(alpha, SMALLEST)
    simultaneous = test.find_interval(sample, confidence, step)
    if interval is None or simultaneous is None:
        return record
    record["difference"] = interval.mean
    record["low"] = interval.low
    record["high"] = interval.high
    record["joint_low"] = simultaneous.low
    record["joint_high"] = simultaneous.high
    record["margin"] = max(abs(simultaneous.low), abs(simultaneous.high))
    # The power of a t test says nothing about shares of seeds.
    needed = None if study.is_two_valued else test.find_needed(sample)
    if needed and not interval.low <= 0 <= interval.high:
        record["seeds_low"], record["seeds_high"] = needed
        record["effect"] = test.find_effect(sample)
    return record


def find_verdict(record: dict[str, Any], plan: Plan, *, is_below_floor: bool) -> str | None:
    """Return the verdict of a variant's numbers, None for the baseline and without pairs.

    A star decides between better and worse. With a margin the simultaneous interval must agree, or
    shows that a variant is equivalent. Every other variant is undecided. A variant is not called
    better while the baseline is no better than a rule without attention.
    """
    verdict = _find_tested_verdict(record, plan)
    return "undecided" if verdict == "better" and is_below_floor else verdict


def _find_tested_verdict(record: dict[str, Any], plan: Plan) -> str | None:
    """Return the verdict of the test and the margin alone."""
    verdict = record.get("verdict")
    if verdict is not None and not pd.isna(verdict):
        return str(verdict)
    difference = record.get("difference")
    if difference is None or pd.isna(difference):
        return None
    if plan.metric.margin is not None:
        return "undecided"
    if not record["significant"]:
        return "undecided"
    is_larger = difference > 0
    return "better" if is_larger == (plan.metric.goal == "max") else "worse"


def _judge(record: dict[str, Any], study: StudyRecord) -> str | None:
    """Return the verdict with a margin, or of a test without intervals; None otherwise.

    Without an interval the verdict is a column of its own: a difference of medians can be unknown.
    """
    goal = study.plan.metric.goal
    margin = study.plan.metric.margin
    if not study.test.has_means and "direction" in record:
        if not record["significant"]:
            return "undecided"
        return "better" if (record["direction"] > 0) == (goal == "max") else "worse"
    if margin is None or "margin" not in record:
        return None
    if record["margin"] < margin:
        return "equivalent"
    # A margin asks for more than a star, never for less.
    if not record["significant"] or record["joint_low"] <= 0 <= record["joint_high"]:
        return "undecided"
    is_larger = record["joint_low"] > 0
    return "better" if is_larger == (goal == "max") else "worse"
