"""Numbers of seeds or runs that a verdict needs."""

from lit_attn.report.records.study_record import StudyRecord
from lit_attn.report.statistics import independent, stats
from lit_attn.report.verdicts.comparison import Comparisons, find_alpha
from lit_attn.report.verdicts.evidence import list_values, pair_differences

MOST_PAIRS = 1000
"""Largest number of pairs that is suggested."""


def count_added_looks(study: StudyRecord) -> int:
    """Return the number of times that seeds were added to the sealed plan."""
    return 0 if study.seals is None else len(study.seals.added_seeds)


def find_needed(study: StudyRecord, name: str) -> tuple[int, int | None] | None:
    """Return the range of seeds for 80 % power, at least as many as a star needs."""
    level = find_alpha(study)
    if not any(cell.is_waiting for cell in study.cells):
        # More seeds than the planned ones are a further look.
        level = _find_next_level(study)
    if study.pairs == "none":
        baseline = list_values(study, study.plan.baseline)
        group = list_values(study, name)
        if min(len(group), len(baseline)) < independent.SMALLEST_GROUP:
            return None
        needed = independent.runs_needed(baseline, group, MOST_PAIRS)
        floor = independent.runs_for_a_star(level)
    else:
        needed = stats.seeds_needed_range(pair_differences(study, name))
        floor = stats.pairs_for_a_star(1, level)
    if needed is None:
        return None
    low, high = needed
    return max(low, floor), None if high is None else max(high, floor)


def _find_next_level(study: StudyRecord) -> float:
    """Return the largest p with a star if seeds are added to a sealed plan."""
    if study.seals is None:
        return stats.ALPHA
    return stats.ALPHA / 2 ** (count_added_looks(study) + 2)


def find_forecast(study: StudyRecord, name: str, comparisons: Comparisons) -> int | None:
    """Return the seeds that would decide an undecided variant, None if none up to MOST_PAIRS do.

    Mean and standard deviation are taken as they are. Pairs that are planned already belong to this
    look; a number beyond them needs the smaller level of the next look.
    """
    compared = max(1, len(comparisons.pairs))
    if study.pairs == "none":
        baseline = list_values(study, study.plan.baseline)
        group = list_values(study, name)
        if min(len(group), len(baseline)) < independent.SMALLEST_GROUP:
            return None
        first = max(len(group), len(baseline)) + 1
        alpha = comparisons.level / compared
        return independent.runs_for_decision(baseline, group, alpha, first, MOST_PAIRS)
    differences = pair_differences(study, name)
    planned = len(study.plan.seeds)
    next_level = stats.ALPHA / 2 ** (count_added_looks(study) + 2)
    margin = study.plan.metric.margin
    for level, first, last in (
        (comparisons.level, len(differences) + 1, planned),
        (next_level, planned + 1, MOST_PAIRS),
    ):
        pairs = stats.pairs_for_decision(differences, level, compared, margin, (first, last))
        if pairs is not None:
            return pairs
    return None
