"""Comparison of every variant with the baseline: differences, intervals, tests and verdicts."""

import math
import statistics
from dataclasses import dataclass
from typing import Any, get_args

import numpy as np
import pandas as pd

from lit_attn.cells.records import FailureClass, Plan
from lit_attn.report.records.study_record import StudyRecord
from lit_attn.report.statistics import independent, stats
from lit_attn.report.statistics.sequential import look_level
from lit_attn.report.statistics.shares import difference_interval
from lit_attn.report.statistics.stats import ALPHA

SMALLEST = 1e-12  # Smallest level of an interval.
POWERS = {"power_n": 1, "power_2n": 2, "power_4n": 4}
"""Multiple of the measured pairs of seeds by CSV field of a star's power."""
MOST_DRAWS = 1_000_000  # Random permutations of a test at a very small level.
FAILURES: frozenset[str] = frozenset(get_args(FailureClass))
Values = dict[str, dict[int, float]]  # By variant and seed.
Seeds = dict[str, set[int]]  # By variant.


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
    if study.pairs == "none":
        return _compare_independent(study)
    plan = study.plan
    values = {variant.name: study.values(variant.name) for variant in plan.variants}
    failed: Seeds = {}
    for name in values:
        # Cells that are still to run have not failed.
        cells = study.variant_cells(name)
        failed[name] = {cell.seed for cell in cells if cell.status in FAILURES}
    differences = _pair_values(values, plan.baseline)
    compared = {name: pairs for name, pairs in differences.items() if pairs}
    draws = _count_draws(study)
    adjusted = _adjust(compared, draws)
    ranked: dict[str, tuple[float, float]] = {}
    failure_p: dict[str, float] = {}
    if any(failed.values()):
        ranked = _rank_test(study, values, failed)
        failure_p = _failure_tests(plan.baseline, values, failed)
    final_level = _find_level(study)
    running = _find_running(study)
    interim: dict[int, float] = {}
    records: dict[str, dict[str, Any]] = {plan.baseline: {"failed": len(failed[plan.baseline])}}
    for name, pairs in differences.items():
        level = final_level
        if name in running:
            level = look_level(len(pairs), len(plan.seeds), find_alpha(study))
        if name in running and pairs:
            interim[len(pairs)] = level
        # Bonferroni's correction of the simultaneous intervals.
        alpha = level / max(1, len(compared))
        ours = list(pairs.values())
        record = _describe(ours, study, alpha, draws)
        record["failed"] = len(failed[name])
        record["failure_p"] = failure_p.get(name)
        record["level"] = level
        record["p_adjusted"] = adjusted.get(name)
        record["significant"] = adjusted.get(name, math.inf) <= level
        record["verdict"] = _judge(record, plan.metric.goal, plan.metric.margin)
        if failed[name] or failed[plan.baseline]:
            p, favour = ranked.get(name, (1.0, 0.0))
            _confirm(record, p, favour, plan.metric.goal)
        if level != final_level:
            # The margin of a wider interval would say nothing about the complete study.
            record["margin"] = None
        effect = record.get("effect")
        if effect and with_power:
            for field, factor in POWERS.items():
                pair_count = factor * len(pairs)
                record[field] = stats.star_power(effect, pair_count, len(compared), final_level)
        records[name] = record
    pair_counts = [len(pairs) for pairs in compared.values()]
    return Comparisons(records, pair_counts, final_level, dict(sorted(interim.items())))


def _compare_independent(study: StudyRecord) -> Comparisons:
    """Compare every variant with the baseline of a study whose runs share no seeds."""
    plan = study.plan
    values = {v.name: np.array(list(study.values(v.name).values())) for v in plan.variants}
    failed = _count_failed(study)
    baseline = values[plan.baseline]
    others = [name for name in values if name != plan.baseline]
    smallest = independent.SMALLEST_GROUP
    compared = []
    if len(baseline) >= smallest:
        compared = [name for name in others if len(values[name]) >= smallest]
    draws = _count_draws(study)
    groups = [values[name] for name in compared]
    p_values = independent.correct_groups(baseline, groups, draws)
    adjusted = dict(zip(compared, p_values, strict=True))
    ranked = _rank_independent(study, failed) if any(failed.values()) else {}
    alpha = find_alpha(study)
    running = _find_running(study)
    interim: dict[int, float] = {}
    records: dict[str, dict[str, Any]] = {plan.baseline: {"failed": failed[plan.baseline]}}
    for name in others:
        group = values[name]
        level = alpha
        if name in running:
            level = _find_open_level(study, name, alpha)
            interim[len(group)] = level
        record: dict[str, Any] = {
            "pairs": len(group) if name in adjusted else 0,
            "failed": failed[name],
            "level": level,
            "p": None,
            "p_adjusted": adjusted.get(name),
            "significant": adjusted.get(name, math.inf) <= level,
        }
        if name in adjusted:
            share = level / len(compared)
            record |= _describe_groups(baseline, group, share, study.resolution, draws)
        record["verdict"] = _judge(record, plan.metric.goal, plan.metric.margin)
        if failed[name] or failed[plan.baseline]:
            p, favour = ranked.get(name, (1.0, 0.0))
            _confirm(record, p, favour, plan.metric.goal)
        effect = record.get("effect")
        if effect:
            for field, factor in POWERS.items():
                counts = (factor * len(group), factor * len(baseline))
                record[field] = independent.find_power(effect, *counts, alpha / len(compared))
        records[name] = record
    counts_of_runs = [len(values[name]) for name in compared]
    return Comparisons(records, counts_of_runs, alpha, dict(sorted(interim.items())))


def _count_failed(study: StudyRecord) -> dict[str, int]:
    """Return the number of failed cells by variant."""
    counts = {}
    for variant in study.plan.variants:
        cells = study.variant_cells(variant.name)
        counts[variant.name] = sum(cell.status in FAILURES for cell in cells)
    return counts


def _find_open_level(study: StudyRecord, name: str, alpha: float) -> float:
    """Return the level of a look at independent runs of which some have not ended."""
    cells = study.variant_cells(name) + study.variant_cells(study.plan.baseline)
    ended = sum(not cell.is_open for cell in cells)
    return look_level(ended, len(cells), alpha)


def _describe_groups(
    baseline: stats.Floats, group: stats.Floats, alpha: float, resolution: float, draws: int
) -> dict[str, Any]:
    """Return the numbers of two independent groups, by CSV field."""
    interval = independent.welch_interval(baseline, group, 1 - ALPHA, resolution)
    confidence = 1 - max(alpha, SMALLEST)
    simultaneous = independent.welch_interval(baseline, group, confidence, resolution)
    record: dict[str, Any] = {
        "p": independent.group_p(baseline, group, draws),
        "difference": interval.mean,
        "low": interval.low,
        "high": interval.high,
        "joint_low": simultaneous.low,
        "joint_high": simultaneous.high,
        "margin": max(abs(simultaneous.low), abs(simultaneous.high)),
        "ties": 0,
    }
    needed = independent.runs_needed(baseline, group)
    if needed is not None and not interval.low <= 0 <= interval.high:
        record["seeds_low"], record["seeds_high"] = needed
        record["effect"] = independent.find_effect(baseline, group)
    return record


def _rank_independent(study: StudyRecord, failed: dict[str, int]) -> dict[str, tuple[float, float]]:
    """Return each variant's corrected p and rank difference, with failed runs as the worst."""
    plan = study.plan
    names = [plan.baseline]
    names += [v.name for v in plan.variants if v.name != plan.baseline]
    groups: list[list[float | None]] = []
    for name in names:
        runs: list[float | None] = list(study.values(name).values())
        runs += [None] * failed[name]
        groups.append(runs)
    ranks = independent.rank_runs(groups, plan.metric.goal == "max")
    baseline = ranks[0]
    by_name = dict(zip(names[1:], ranks[1:], strict=True))
    tested = {}
    if len(baseline) >= independent.SMALLEST_GROUP:
        smallest = independent.SMALLEST_GROUP
        tested = {name: group for name, group in by_name.items() if len(group) >= smallest}
    p_values = independent.correct_groups(baseline, list(tested.values()), _count_draws(study))
    results = {}
    for (name, group), p in zip(tested.items(), p_values, strict=True):
        results[name] = (p, float(group.mean() - baseline.mean()))
    return results


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


def _pair_values(values: Values, baseline: str) -> Values:
    """Return the differences to the baseline's values with the same seed, by variant."""
    differences: Values = {}
    for name, by_seed in values.items():
        if name == baseline:
            continue
        pairs = {}
        for seed, value in by_seed.items():
            if seed in values[baseline]:
                pairs[seed] = value - values[baseline][seed]
        differences[name] = pairs
    return differences


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
    gain = record.get("difference", 0.0) * (1 if goal == "max" else -1)
    is_confirmed = p <= record["level"] and gain * favour > 0
    record["p_ranked"] = p
    record["significant"] = record["significant"] and is_confirmed
    # The seeds that finished show no equivalence of all seeds.
    record["margin"] = None
    if record["verdict"] == "equivalent" or (record["verdict"] and not is_confirmed):
        record["verdict"] = "undecided"


def _adjust(pairs: Values, draws: int) -> dict[str, float]:
    """Return each variant's p of the joint sign-flip test, corrected for all variants.

    A sign pattern flips a seed in all variants that have it. A seed that a variant lacks adds
    nothing to its statistic, whichever sign it has, so the test stays exact, and a variant with all
    seeds keeps its own number of patterns.
    """
    frame = pd.DataFrame.from_dict(pairs, orient="index", dtype=float).sort_index(axis=1)
    p_values = stats.joint_sign_flip(frame.fillna(0.0).to_numpy(), draws)
    return dict(zip(pairs, p_values, strict=True))


def _rank_test(study: StudyRecord, values: Values, failed: Seeds) -> dict[str, tuple[float, float]]:
    """Return each variant's corrected p and rank sum if a failed seed is worse than any value."""
    plan = study.plan
    baseline = values[plan.baseline]
    baseline_ended = baseline.keys() | failed[plan.baseline]
    ranks: Values = {}
    for name, by_seed in values.items():
        if name == plan.baseline:
            continue
        seeds = sorted((by_seed.keys() | failed[name]) & baseline_ended)
        if seeds:
            # None is a failed seed.
            ours = [by_seed.get(seed) for seed in seeds]
            theirs = [baseline.get(seed) for seed in seeds]
            signed = stats.rank_with_failures(ours, theirs, plan.metric.goal == "max")
            ranks[name] = dict(zip(seeds, signed, strict=True))
    adjusted = _adjust(ranks, _count_draws(study))
    return {name: (adjusted[name], sum(by_seed.values())) for name, by_seed in ranks.items()}


def _failure_tests(baseline: str, values: Values, failed: Seeds) -> dict[str, float]:
    """Return Fisher's p of each variant's failures against the baseline's, corrected by Holm."""
    from scipy.stats import fisher_exact

    # Seeds that failed and that finished.
    counts = {name: (len(failed[name]), len(values[name])) for name in values}
    if not any(counts[baseline]):
        return {}
    names = [name for name in values if name != baseline and any(counts[name])]
    p_values = [float(fisher_exact([counts[name], counts[baseline]]).pvalue) for name in names]
    return dict(zip(names, stats.holm(p_values), strict=True))


def _describe(
    differences: list[float], study: StudyRecord, alpha: float, draws: int
) -> dict[str, Any]:
    """Return the numbers of a variant's differences, by CSV field; `alpha` is that of one interval.

    Without pairs there are only their number and no p.
    """
    record: dict[str, Any] = {"pairs": len(differences)}
    record["p"] = stats.sign_flip_p(differences, draws)
    if not differences:
        return record
    record["difference"] = statistics.fmean(differences)
    # Rounding makes equal values unequal.
    tie = 1e-6 * max(abs(value) for value in study.values(study.plan.baseline).values())
    record["ties"] = sum(abs(difference) <= tie for difference in differences)
    interval = _find_interval(differences, study, 1 - ALPHA)
    # Levels of early looks are smaller than the distance of a confidence to 1 in floating point.
    simultaneous = _find_interval(differences, study, 1 - max(alpha, SMALLEST))
    if interval and simultaneous:
        record["low"] = interval.low
        record["high"] = interval.high
        record["joint_low"] = simultaneous.low
        record["joint_high"] = simultaneous.high
        record["margin"] = max(abs(simultaneous.low), abs(simultaneous.high))
        # The power of a t test says nothing about shares of seeds.
        needed = None if study.is_two_valued else stats.seeds_needed(differences)
        if needed and not interval.low <= 0 <= interval.high:
            record["seeds_low"], record["seeds_high"] = needed
            record["effect"] = interval.mean / statistics.stdev(differences)
    return record


def _find_interval(
    differences: list[float], study: StudyRecord, confidence: float
) -> stats.Interval | None:
    """Return the interval of the mean difference, an exact one if the values are shares."""
    if study.is_two_valued:
        return difference_interval(differences, confidence, study.plan.metric.scale)
    return stats.paired_interval(differences, confidence, study.resolution)


def find_verdict(record: dict[str, Any], plan: Plan) -> str | None:
    """Return the verdict of a variant's numbers, None for the baseline and without pairs.

    A star decides between better and worse. With a margin the simultaneous interval must agree, or
    shows that a variant is equivalent. Every other variant is undecided.
    """
    difference = record.get("difference")
    if difference is None or pd.isna(difference):
        return None
    if plan.metric.margin is not None:
        verdict = record.get("verdict")
        return "undecided" if verdict is None or pd.isna(verdict) else str(verdict)
    if not record["significant"]:
        return "undecided"
    is_larger = difference > 0
    return "better" if is_larger == (plan.metric.goal == "max") else "worse"


def _judge(record: dict[str, Any], goal: str, margin: float | None) -> str | None:
    """Return the verdict with a margin, or None without a margin or an interval."""
    if margin is None or "margin" not in record:
        return None
    if record["margin"] < margin:
        return "equivalent"
    # A margin asks for more than a star, never for less.
    if not record["significant"] or record["joint_low"] <= 0 <= record["joint_high"]:
        return "undecided"
    is_larger = record["joint_low"] > 0
    return "better" if is_larger == (goal == "max") else "worse"
