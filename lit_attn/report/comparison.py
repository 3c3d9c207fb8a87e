"""Comparison of every variant with the baseline: differences, intervals, tests and verdicts."""

import statistics
from dataclasses import dataclass
from typing import Any, get_args

import numpy as np

from lit_attn.cells.records import FailureClass
from lit_attn.report import stats
from lit_attn.report.read import StudyRecord

ALPHA = 0.05
FAILURES: frozenset[str] = frozenset(get_args(FailureClass))


@dataclass(frozen=True)
class Comparisons:
    """Numbers of every variant's comparison with the baseline, by variant and CSV field.

    `is_joint` is True if the corrected p values come from the joint sign-flip test, which needs
    the same seeds in all variants, and False if they come from Holm's correction. `pairs` is the
    largest number of pairs, `resolution` the step of the metric in printed units, `level` the
    largest corrected p with a star.
    """

    records: dict[str, dict[str, Any]]
    count: int
    pairs: int
    is_joint: bool
    has_failures: bool
    resolution: float
    level: float


def compare_variants(study: StudyRecord) -> Comparisons:
    """Compare every variant with the baseline of the study."""
    plan = study.plan
    values = {variant.name: study.values(variant.name) for variant in plan.variants}
    failed = {variant.name: _failed_seeds(study, variant.name) for variant in plan.variants}
    baseline = values.get(plan.baseline, {})
    # Bonferroni over looks at the results spends ALPHA once, however the looks were chosen.
    level = ALPHA / (1 + len(study.seals.added_seeds) if study.seals else 1)
    resolution = stats.find_resolution(v for by_seed in values.values() for v in by_seed.values())
    others = [variant.name for variant in plan.variants if variant.name != plan.baseline]
    differences = {
        name: {
            seed: value - baseline[seed] for seed, value in values[name].items() if seed in baseline
        }
        for name in others
    }
    compared = {name: pairs for name, pairs in differences.items() if pairs}
    single = {name: stats.sign_flip_p(list(pairs.values())) for name, pairs in compared.items()}
    is_joint, adjusted = _adjust(compared)
    ranked = _rank_test(study, values, failed) if any(failed.values()) else {}
    failure_p = _failure_tests(plan.baseline, values, failed)
    records = {plan.baseline: {"failed": len(failed.get(plan.baseline, ()))}}
    for name in others:
        record = _describe(list(differences[name].values()), baseline, len(compared), resolution)
        record |= {"p": single.get(name), "p_adjusted": adjusted.get(name)}
        record |= {"failed": len(failed[name]), "failure_p": failure_p.get(name)}
        is_significant = record["p_adjusted"] is not None and record["p_adjusted"] <= level
        if failed[name] or failed[plan.baseline]:
            # A failed seed drops out of the mean, so the second test must agree, also in direction.
            gain = record.get("difference", 0.0)
            gain = gain if plan.metric.goal == "max" else -gain
            record["p_ranked"], favour = ranked.get(name, (1.0, 0.0))
            is_significant &= record["p_ranked"] <= level and gain * favour > 0
        record["significant"] = is_significant
        record["verdict"] = _judge(record, plan.metric.goal, plan.metric.margin)
        records[name] = record
    return Comparisons(
        records,
        len(compared),
        max((len(pairs) for pairs in compared.values()), default=0),
        is_joint,
        any(failed.values()),
        resolution,
        level,
    )


def _failed_seeds(study: StudyRecord, variant: str) -> set[int]:
    """Return the seeds whose last attempt failed; cells that are still to run do not count."""
    return {c.seed for c in study.variant_cells(variant) if c.status in FAILURES}


def _adjust(pairs: dict[str, dict[int, float]]) -> tuple[bool, dict[str, float]]:
    """Return whether the joint test applies, and each variant's p corrected for all variants."""
    if not pairs:
        return False, {}
    seeds = sorted(next(iter(pairs.values())))
    if all(by_seed.keys() == set(seeds) for by_seed in pairs.values()):
        matrix = np.array([[by_seed[seed] for seed in seeds] for by_seed in pairs.values()])
        return True, dict(zip(pairs, stats.joint_sign_flip(matrix), strict=True))
    p_values = [stats.sign_flip_p(list(by_seed.values())) or 1.0 for by_seed in pairs.values()]
    return False, dict(zip(pairs, stats.holm(p_values), strict=True))


def _rank_test(
    study: StudyRecord, values: dict[str, dict[int, float]], failed: dict[str, set[int]]
) -> dict[str, tuple[float, float]]:
    """Return each variant's corrected p and rank sum if a failed seed is worse than any value."""
    baseline = study.plan.baseline
    known = {name: by_seed.keys() | failed[name] for name, by_seed in values.items()}
    ranks: dict[str, dict[int, float]] = {}
    for name in values:
        seeds = sorted(known[name] & known[baseline])
        if name != baseline and seeds:
            signed = stats.rank_with_failures(
                [values[name].get(seed) for seed in seeds],
                [values[baseline].get(seed) for seed in seeds],
                study.plan.metric.goal == "max",
            )
            ranks[name] = dict(zip(seeds, signed, strict=True))
    _, adjusted = _adjust(ranks)
    return {name: (adjusted[name], sum(by_seed.values())) for name, by_seed in ranks.items()}


def _failure_tests(
    baseline: str, values: dict[str, dict[int, float]], failed: dict[str, set[int]]
) -> dict[str, float]:
    """Return Fisher's p of each variant's failures against the baseline's, corrected by Holm."""
    if not any(failed.values()):
        return {}
    totals = {name: len(values[name]) + len(failed[name]) for name in values}
    names = [name for name in values if name != baseline and totals[name] and totals[baseline]]
    p_values = [
        stats.failure_p(len(failed[name]), totals[name], len(failed[baseline]), totals[baseline])
        for name in names
    ]
    return dict(zip(names, stats.holm(p_values), strict=True))


def _describe(
    differences: list[float], baseline: dict[int, float], comparisons: int, resolution: float
) -> dict[str, Any]:
    """Return mean difference, intervals, ties and the range of seeds needed."""
    record: dict[str, Any] = {"pairs": len(differences)}
    if not differences:
        return record
    record["difference"] = statistics.fmean(differences)
    record["ties"] = stats.count_ties(differences, max(map(abs, baseline.values())))
    interval = stats.paired_interval(differences, 1 - ALPHA, resolution)
    simultaneous = stats.paired_interval(differences, 1 - ALPHA / comparisons, resolution)
    if interval and simultaneous:
        record |= {"low": interval.low, "high": interval.high}
        record |= {"joint_low": simultaneous.low, "joint_high": simultaneous.high}
        record["margin"] = max(abs(simultaneous.low), abs(simultaneous.high))
        if interval.low > 0 or interval.high < 0:
            record |= zip(
                ("seeds_low", "seeds_high"), stats.seeds_needed(differences) or (), strict=False
            )
    return record


def _judge(record: dict[str, Any], goal: str, margin: float | None) -> str | None:
    """Return the verdict of the simultaneous interval, or None without a margin or an interval.

    "equivalent": the interval lies inside ± margin (two one-sided tests). "better" or "worse": it
    excludes 0. "undecided": neither.
    """
    if margin is None or "margin" not in record:
        return None
    if record["margin"] < margin:
        return "equivalent"
    if record["joint_low"] <= 0 <= record["joint_high"]:
        return "undecided"
    return "better" if (record["joint_low"] > 0) == (goal == "max") else "worse"
