"""Warnings of variants whose spread makes the test of their star doubtful."""

import numpy as np

from lit_attn.report.records.study_record import StudyRecord
from lit_attn.report.statistics import independent, stats
from lit_attn.report.verdicts.evidence import list_values

UNEQUAL = 2.0
"""Ratio of two standard deviations from which on a test can have a warning."""

SKEWED = 1.0
"""Skewness of the wider group from which on a test of paired seeds has the warning."""


def warn_of_spreads(study: StudyRecord) -> list[str]:
    """Return a warning for each variant whose spread makes the test of its star doubtful.

    The permutation test of independent runs is exact for equal distributions only. The test of
    paired seeds is exact for symmetric differences, which skewed values with different spreads do
    not have.
    """
    baseline = list_values(study, study.plan.baseline)
    warnings = []
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
        if study.pairs != "seed":
            advice = (
                "If the true spreads differ, p is approximate, the more so for small groups and"
                " skewed values."
            )
        elif abs(skewness) >= SKEWED:
            advice = (
                "If the true values are so, a star can mean another spread instead of another mean"
                " (docs/statistics.md, Screening)."
            )
        else:
            continue
        warnings.append(
            f"{variant.name}: its standard deviation is {spreads[0]:.3g} and the baseline's is"
            f" {spreads[1]:.3g} (skewness of the wider one: {skewness:.1f}). {advice}"
        )
    return warnings
