"""Verdicts about groups of runs against a fixed target: the rule of a record.

Each group is judged alone, at its own level. The verdict follows from the e-value, which may be
looked at after every run; the plain t test stands beside it.
"""

import statistics
from collections.abc import Sequence

from lit_attn.cells.records import Metric
from lit_attn.judging.answers import JudgedTarget, TargetGroup
from lit_attn.report.answers.judged import JudgedMetric, Values
from lit_attn.report.records.study_record import StudyRecord
from lit_attn.report.statistics.target import MOST_RUNS, e_value, find_t, runs_needed, student_p
from lit_attn.report.verdicts.evidence import describe_values, measure_cost
from lit_attn.schema.errors import plural

DEFAULT_LEVEL = 0.01
"""Level of the public speed runs."""


def judge_groups(
    study: StudyRecord, target: float, level: float, notes: Sequence[str]
) -> JudgedTarget:
    """Return whether the mean of each group of runs is beyond the target."""
    metric = study.plan.metric
    groups = []
    for variant in study.plan.variants:
        cells = study.variant_cells(variant.name)
        failed = sum(cell.status == "error" for cell in cells)
        is_final = not any(cell.is_open for cell in cells)
        values = describe_values(study, variant.name)
        gains = [
            value - target if metric.goal == "max" else target - value
            for value in study.values(variant.name).values()
        ]
        group = _judge_group(variant.name, gains, values, failed, level, is_final=is_final)
        seconds = measure_cost(study, variant.name).seconds_per_seed
        groups.append(group.model_copy(update={"seconds": seconds}))
    return JudgedTarget(
        study=study.plan.study,
        metric=JudgedMetric.from_record(metric),
        target=target,
        level=level,
        groups=groups,
        first_passing=_find_first_passing(groups),
        notes=list(notes),
        next=_advise(groups, metric),
    )


def _judge_group(
    name: str, gains: list[float], values: Values, failed: int, level: float, *, is_final: bool
) -> TargetGroup:
    """Return the verdict about a group; `gains` are positive on the right side of the target."""
    t = find_t(gains)
    e = None if t is None else e_value(t, len(gains))
    reverse = None if t is None else e_value(-t, len(gains))
    passes = e is not None and e >= 1 / level and not failed and is_final
    misses = reverse is not None and reverse >= 1 / level
    needed = None
    if t is not None and not passes and not misses and not failed:
        needed = runs_needed(t, len(gains), level)
    return TargetGroup(
        group=name,
        verdict="passes" if passes else "misses" if misses else "undecided",
        values=values,
        failed=failed,
        difference=statistics.fmean(gains) if gains else None,
        p=None if e is None else min(1.0, 1 / e),
        p_t_test=None if t is None else student_p(t, len(gains)),
        runs_missing=None if needed is None else needed - len(gains),
        seconds=None,
    )


def _find_first_passing(groups: Sequence[TargetGroup]) -> str | None:
    """Return the smallest number from which on every group passes, None without one.

    The groups are numbers, such as steps. They are tested from the largest one down, and the first
    one that does not pass ends the test, so the level holds for all of them together.
    """
    try:
        ordered = sorted(groups, key=lambda group: float(group.group), reverse=True)
    except ValueError:
        return None
    first = None
    for group in ordered:
        if group.verdict != "passes":
            break
        first = group.group
    return first if len(groups) > 1 else None


def _advise(groups: Sequence[TargetGroup], metric: Metric) -> str:
    """Return what to run next in one sentence."""
    undecided = [group for group in groups if group.verdict == "undecided"]
    if not undecided:
        return "Every group is decided; nothing remains to run."
    possible = [group for group in undecided if group.runs_missing is not None]
    if possible:
        cheapest = min(possible, key=lambda group: group.runs_missing or 0)
        return (
            f"Run {cheapest.group} {plural(cheapest.runs_missing or 0, 'more time')}: it would pass"
            " if mean and spread stay as measured. Judging after every run is allowed."
        )
    short = [group for group in undecided if group.p is None and not group.failed]
    if short:
        return f"Run {short[0].group} again: fewer than two different values have no spread."
    failed = [group for group in undecided if group.failed]
    if failed:
        return f"A failed run of {failed[0].group} is worse than any {metric.label}: replace none."
    return f"Stop: no group would pass with {MOST_RUNS:,} runs if mean and spread stay as measured."
