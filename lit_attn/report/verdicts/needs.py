"""Numbers of seeds or runs that a verdict needs."""

from lit_attn.report.records.study_record import StudyRecord
from lit_attn.report.statistics import stats
from lit_attn.report.statistics.significance_base import Rule
from lit_attn.report.verdicts.comparison import Comparisons, find_alpha
from lit_attn.report.verdicts.evidence import make_sample


def count_added_looks(study: StudyRecord) -> int:
    """Return the number of times that seeds were added to the sealed plan."""
    return 0 if study.seals is None else len(study.seals.added_seeds)


def find_needed(study: StudyRecord, name: str) -> tuple[int, int | None] | None:
    """Return the range of seeds for 80 % power, at least as many as a star needs."""
    level = find_alpha(study)
    if not any(cell.is_waiting for cell in study.cells):
        # More seeds than the planned ones are a further look.
        level = _find_next_level(study)
    sample = make_sample(study, name)
    needed = study.test.find_needed(sample) if study.test.is_comparable(sample) else None
    if needed is None:
        return None
    low, high = needed
    floor = study.test.find_fewest(level)
    return max(low, floor), None if high is None else max(high, floor)


def _find_next_level(study: StudyRecord) -> float:
    """Return the largest p with a star if seeds are added to a sealed plan."""
    return stats.ALPHA if study.seals is None else find_added_level(study)


def find_forecast(study: StudyRecord, name: str, comparisons: Comparisons) -> int | None:
    """Return the seeds that would decide an undecided variant, None if none up to MOST_RUNS do.

    Mean and standard deviation are taken as they are. Pairs that are planned already belong to this
    look; a number beyond them needs the smaller level of the next look.
    """
    sample = make_sample(study, name)
    if not study.test.is_comparable(sample):
        return None
    rule = Rule(
        level=comparisons.level,
        next_level=find_added_level(study),
        planned=len(study.plan.seeds),
        comparisons=max(1, len(comparisons.pairs)),
        margin=study.plan.metric.margin,
    )
    return study.test.find_forecast(sample, rule)


def find_added_level(study: StudyRecord) -> float:
    """Return the level of the look at seeds that are added to those of the plan."""
    return stats.ALPHA / 2 ** (count_added_looks(study) + 2)
