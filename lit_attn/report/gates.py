"""Gates: the variants of a complete study that are worse than the baseline.

A study over K sizes has K - 1 gates, because the last size has no next one. Each gate may err with
probability ALPHA / (K - 1), so all of them together stop a variant that is equal to the baseline in
at most ALPHA of studies, however the sizes depend on each other (Bonferroni; this is the linear
spending function of Kim and DeMets, "Design and analysis of group sequential tests based on the
type I error spending rate function", Biometrika 74, 1987, over the gates).
"""

from collections.abc import Mapping
from typing import Any

from lit_attn.report.comparison import ALPHA, compare_variants, find_alpha
from lit_attn.report.study_record import StudyRecord


def gate_level(sizes: int) -> float:
    """Return the largest corrected p with which a variant is worse, for a study over `sizes`."""
    return ALPHA / (sizes - 1)


def is_worse(record: Mapping[str, Any], goal: str, level: float) -> bool:
    """Return True if a variant's comparison shows it as worse than the baseline at `level`.

    `record` has the mean `difference`, the p of the joint test corrected for all variants
    (`p_adjusted`) and, with failed seeds, also that of the rank test (`p_ranked`).
    """
    p = record.get("p_adjusted")
    if p is None:
        return False
    gain = record["difference"] if goal == "max" else -record["difference"]
    return gain < 0 and max(p, record.get("p_ranked", 0.0)) <= level


def find_worse(study: StudyRecord, level: float) -> dict[str, float]:
    """Return the corrected p of every variant that is worse than the baseline, by variant.

    Seeds that were added after results had been seen lower the `level` as they lower that of a
    star.
    """
    records = compare_variants(study).records
    reduced = level * find_alpha(study) / ALPHA
    worse = {}
    for name, record in records.items():
        if name != study.plan.baseline and is_worse(record, study.plan.metric.goal, reduced):
            worse[name] = record["p_adjusted"]
    return worse
