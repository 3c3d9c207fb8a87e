"""Comparison of every variant with the baseline: differences, intervals, tests and verdicts."""

import math
import statistics
from dataclasses import dataclass
from typing import Any, get_args

import pandas as pd

from lit_attn.cells.records import FailureClass
from lit_attn.report import stats
from lit_attn.report.read import StudyRecord

ALPHA = 0.05
POWERS = {"power_n": 1, "power_2n": 2, "power_4n": 4}
"""Multiple of the measured pairs of seeds by CSV field of a star's power."""
FAILURES: frozenset[str] = frozenset(get_args(FailureClass))
Values = dict[str, dict[int, float]]  # By variant and seed.
Seeds = dict[str, set[int]]  # By variant.


@dataclass(frozen=True)
class Comparisons:
    """Numbers of every variant's comparison with the baseline, by variant and CSV field.

    `pairs` has the number of pairs of every compared variant, and `level` is the largest corrected
    p with a star.
    """

    records: dict[str, dict[str, Any]]
    pairs: list[int]
    level: float


def compare_variants(study: StudyRecord) -> Comparisons:
    """Compare every variant with the baseline of the study."""
    plan = study.plan
    values = {variant.name: study.values(variant.name) for variant in plan.variants}
    # Cells that are still to run have not failed.
    cells = {name: study.variant_cells(name) for name in values}
    failed = {n: {c.seed for c in group if c.status in FAILURES} for n, group in cells.items()}
    baseline = values[plan.baseline]
    # The first look has spent ALPHA, and all others together spend at most half as much again.
    added = study.seals.added_seeds if study.seals else ()
    level = ALPHA / 2 ** (len(added) + 1) if added else ALPHA
    differences = {
        name: {seed: v - baseline[seed] for seed, v in by_seed.items() if seed in baseline}
        for name, by_seed in values.items()
        if name != plan.baseline
    }
    compared = {name: pairs for name, pairs in differences.items() if pairs}
    adjusted = _adjust(compared)
    has_failures = any(failed.values())
    ranked = _rank_test(study, values, failed) if has_failures else {}
    failure_p = _failure_tests(plan.baseline, values, failed) if has_failures else {}
    records = {plan.baseline: {"failed": len(failed[plan.baseline])}}
    for name, pairs in differences.items():
        alpha = level / max(1, len(compared))
        record = _describe(list(pairs.values()), baseline, alpha, study.resolution)
        record |= {"failed": len(failed[name]), "failure_p": failure_p.get(name), "level": level}
        record["p_adjusted"] = adjusted.get(name)
        is_significant = adjusted.get(name, math.inf) <= level
        record["verdict"] = _judge(record, plan.metric.goal, plan.metric.margin)
        if failed[name] or failed[plan.baseline]:
            # A failed seed drops out of the mean, so the second test must agree, also in direction.
            gain = record.get("difference", 0.0) * (1 if plan.metric.goal == "max" else -1)
            record["p_ranked"], favour = ranked.get(name, (1.0, 0.0))
            is_confirmed = record["p_ranked"] <= level and gain * favour > 0
            is_significant &= is_confirmed
            # The seeds that finished show no equivalence of all seeds.
            record["margin"] = None
            if record["verdict"] == "equivalent" or (record["verdict"] and not is_confirmed):
                record["verdict"] = "undecided"
        record["significant"] = is_significant
        if effect := record.get("effect"):
            for field, factor in POWERS.items():
                pair_count = factor * len(pairs)
                record[field] = stats.star_power(effect, pair_count, len(compared), level)
        records[name] = record
    return Comparisons(records, [*map(len, compared.values())], level)


def _adjust(pairs: Values) -> dict[str, float]:
    """Return each variant's p of the joint sign-flip test, corrected for all variants.

    A sign pattern flips a seed in all variants that have it. A seed that a variant lacks adds
    nothing to its statistic, whichever sign it has, so the test stays exact, and a variant with all
    seeds keeps its own number of patterns.
    """
    frame = pd.DataFrame.from_dict(pairs, orient="index", dtype=float).sort_index(axis=1)
    p_values = stats.joint_sign_flip(frame.fillna(0.0).to_numpy())
    return dict(zip(pairs, p_values, strict=True))


def _rank_test(study: StudyRecord, values: Values, failed: Seeds) -> dict[str, tuple[float, float]]:
    """Return each variant's corrected p and rank sum if a failed seed is worse than any value."""
    baseline = study.plan.baseline
    ranks: Values = {}
    for name, by_seed in values.items():
        ended = (by_seed.keys() | failed[name]) & (values[baseline].keys() | failed[baseline])
        if name != baseline and (seeds := sorted(ended)):
            ours, theirs = ([v.get(s) for s in seeds] for v in (by_seed, values[baseline]))
            signed = stats.rank_with_failures(ours, theirs, study.plan.metric.goal == "max")
            ranks[name] = dict(zip(seeds, signed, strict=True))
    adjusted = _adjust(ranks)
    return {name: (adjusted[name], sum(by_seed.values())) for name, by_seed in ranks.items()}


def _failure_tests(baseline: str, values: Values, failed: Seeds) -> dict[str, float]:
    """Return Fisher's p of each variant's failures against the baseline's, corrected by Holm."""
    from scipy.stats import fisher_exact

    counts = {name: (len(failed[name]), len(values[name])) for name in values}
    names = [name for name in values if name != baseline and any(counts[name])]
    if not any(counts[baseline]):
        return {}
    p_values = [float(fisher_exact([counts[name], counts[baseline]]).pvalue) for name in names]
    return dict(zip(names, stats.holm(p_values), strict=True))


def _describe(
    differences: list[float], baseline: dict[int, float], alpha: float, resolution: float
) -> dict[str, Any]:
    record: dict[str, Any] = {"pairs": len(differences), "p": stats.sign_flip_p(differences)}
    if not differences:
        return record
    record["difference"] = statistics.fmean(differences)
    # Rounding makes equal values unequal.
    tie = 1e-6 * max(map(abs, baseline.values()))
    record["ties"] = sum(abs(difference) <= tie for difference in differences)
    interval = stats.paired_interval(differences, 1 - ALPHA, resolution)
    simultaneous = stats.paired_interval(differences, 1 - alpha, resolution)
    if interval and simultaneous:
        record |= {"low": interval.low, "high": interval.high}
        record |= {"joint_low": simultaneous.low, "joint_high": simultaneous.high}
        record["margin"] = max(abs(simultaneous.low), abs(simultaneous.high))
        needed = stats.seeds_needed(differences)
        if needed and not interval.low <= 0 <= interval.high:
            record |= zip(("seeds_low", "seeds_high"), needed, strict=True)
            record["effect"] = interval.mean / statistics.stdev(differences)
    return record


def _judge(record: dict[str, Any], goal: str, margin: float | None) -> str | None:
    """Return the verdict of the simultaneous interval, or None without a margin or an interval."""
    if margin is None or "margin" not in record:
        return None
    if record["margin"] < margin:
        return "equivalent"
    if record["joint_low"] <= 0 <= record["joint_high"]:
        return "undecided"
    return "better" if (record["joint_low"] > 0) == (goal == "max") else "worse"
