"""The best floor of a study, its row in the table, and whether the baseline is above it."""

from collections.abc import Iterable
from typing import Literal, NamedTuple

from lit_attn.report.numbers import write_number
from lit_attn.report.records.study_record import StudyRecord
from lit_attn.report.tables.columns import NOT_REACHED, NOTHING, format_number
from lit_attn.report.tables.formats import Cell

Validity = Literal["below-floor", "above-floor"]

BELOW_FLOOR = "(below its floor)"
"""Mark of a verdict of a study whose baseline is not better than its best floor."""

BELOW_FLOOR_WARNING = "Below its floor: "
"""Start of the warning of such a study."""


class BestFloor(NamedTuple):
    """The floor with the best value of a metric."""

    rule: str
    value: float
    conditions: str


def find_best_floor(study: StudyRecord) -> BestFloor | None:
    """Return the best floor in the study's metric and its printed units, or None without one."""
    metric = study.plan.metric
    best = find_best_value(study, metric.name)
    return None if best is None else best._replace(value=best.value * metric.scale)


def find_best_value(study: StudyRecord, metric: str) -> BestFloor | None:
    """Return the best floor in the study's metric on the split of `metric`, in recorded units.

    None if no rule has this metric, or if `metric` is another one, whose direction is unknown.
    """
    split, name = _split_name(metric)
    if study.floors is None or name != _split_name(study.plan.metric.name)[1]:
        return None
    best: BestFloor | None = None
    for floor in study.floors.floors:
        if floor.split != split or name not in floor.values:
            continue
        value = floor.values[name]
        if best is None or is_better(value, best.value, study.plan.metric.goal):
            best = BestFloor(floor.rule, value, floor.conditions)
    return best


def _split_name(metric: str) -> tuple[str, str]:
    """Return the split of a metric, and its name without the mark of averaged weights.

    An average of the weights has the floors of the weights themselves.
    """
    split, _, name = metric.partition("/")
    return split, name.removeprefix("averaged-")


def is_better(value: float, other: float, goal: Literal["max", "min"]) -> bool:
    """Return True if `value` is better than `other`."""
    return value > other if goal == "max" else value < other


def find_validity(study: StudyRecord) -> Validity | None:
    """Return whether the baseline's mean is better than the best floor; None if it is unknown."""
    floor = find_best_floor(study)
    if floor is None or not study.values(study.plan.baseline):
        return None
    center = study.center(study.plan.baseline)
    # A median that is not reached is no better than any limit.
    is_above = center is not None and is_better(center, floor.value, study.plan.metric.goal)
    return "above-floor" if is_above else "below-floor"


def is_below_floor(study: StudyRecord) -> bool:
    """Return True if the baseline is known to be no better than the best floor."""
    return find_validity(study) == "below-floor"


def warn_of_floor(study: StudyRecord) -> list[str]:
    """Return a warning if the baseline is not better than its best floor."""
    floor = find_best_floor(study)
    if floor is None or not is_below_floor(study):
        return []
    metric = study.plan.metric
    center = study.center(study.plan.baseline)
    value = NOT_REACHED if center is None else write_number(center, ".4g")
    return [
        f"{BELOW_FLOOR_WARNING}{study.plan.baseline} has {metric.label} {value},"
        f" and {floor.rule} {write_number(floor.value, '.4g')} without attention"
        f" ({floor.conditions}), so no variant of this study can be called better."
    ]


def warn_of_floors(studies: Iterable[StudyRecord]) -> list[str]:
    """Return a warning for each study whose baseline is not better than its best floor."""
    warnings = []
    for study in studies:
        warnings += [f"{study.plan.study}: {warning}" for warning in warn_of_floor(study)]
    return warnings


def make_floor_row(study: StudyRecord, keys: list[str], digits: int) -> list[Cell] | None:
    """Return the row of the best floor for columns with `keys`, or None without a floor.

    `digits` are the decimals of the values in the table. A time until an event has whole steps.
    """
    floor = find_best_floor(study)
    if floor is None:
        return None
    decimals = 0 if study.plan.metric.event else digits
    value = format_number(floor.value, f".{decimals}f")
    texts = {"variant": f"floor: {floor.rule}", "value": value}
    return [Cell(texts.get(key, NOTHING)) for key in keys]
