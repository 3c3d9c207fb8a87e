"""The warning of variants whose spread makes the test of their star doubtful."""

import math

import numpy as np

from lit_attn.report.records.study_record import StudyRecord
from lit_attn.report.statistics import independent, stats
from lit_attn.report.verdicts.evidence import list_values

UNEQUAL = 2.0
"""Ratio of two standard deviations from which on a test can have a warning."""


def warn_of_spreads(study: StudyRecord) -> list[str]:
    """Return a warning if the spread of variants makes the test of their stars doubtful.

    The permutation test of independent runs is exact for equal distributions only. The test of
    paired seeds is exact for symmetric differences, which skewed values with different spreads do
    not have; the smallest skewness that matters belongs to the test.
    """
    baseline = list_values(study, study.plan.baseline)
    # The standard deviations of the doubtful variants by name, and that of the baseline.
    doubtful: dict[str, float] = {}
    baseline_spread = math.nan
    largest_skewness = 0.0
    for variant in study.plan.variants:
        group = list_values(study, variant.name)
        if variant.name == study.plan.baseline or min(len(group), len(baseline)) < 2:
            continue
        # No square of a value in this unit overflows.
        unit = stats.find_unit([*group, *baseline])
        spreads = [unit * float(np.std(values / unit, ddof=1)) for values in (group, baseline)]
        if max(spreads) <= UNEQUAL * min(spreads):
            continue
        skewness = independent.find_skewness(group if spreads[0] > spreads[1] else baseline)
        if abs(skewness) < study.test.least_skewness:
            continue
        doubtful[variant.name], baseline_spread = spreads
        largest_skewness = max(largest_skewness, skewness, key=abs)
    if not doubtful:
        return []
    return [
        f"{_describe(doubtful, baseline_spread, largest_skewness)} {study.test.words['spreads']}"
    ]


def _describe(doubtful: dict[str, float], baseline_spread: float, skewness: float) -> str:
    """Return a sentence about the standard deviations of the doubtful variants."""
    if len(doubtful) == 1:
        ((name, spread),) = doubtful.items()
        return (
            f"{name}: its standard deviation is {spread:.3g} and the baseline's is"
            f" {baseline_spread:.3g} (skewness of the wider one: {skewness:.1f})."
        )
    # Names of a product contain commas.
    names = "; ".join(f"{name} {spread:.3g}" for name, spread in doubtful.items())
    return (
        f"the standard deviations of {len(doubtful)} variants differ from the baseline's"
        f" {baseline_spread:.3g} by a factor of more than {UNEQUAL:g} ({names}; largest skewness"
        f" of the wider one: {skewness:.1f})."
    )
