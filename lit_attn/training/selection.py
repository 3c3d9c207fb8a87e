"""Selection of the evaluation whose values are the result of a cell.

A metric that is NaN or infinite at an evaluation is recorded as such in metrics.csv. It never
chooses an epoch, and the value of an earlier evaluation never replaces it.
"""

import math

from lit_attn.cells.failure import Diverged
from lit_attn.cells.records import Metric
from lit_attn.cells.rows import MetricRow
from lit_attn.schema.errors import ConfigError


def select_epoch(rows: list[MetricRow], metric: Metric) -> list[MetricRow]:
    """Return the finite rows of the selected epoch: the last evaluated, or the best on validation.

    Raises ConfigError if the metric was not recorded there, and Diverged if it is not finite there.
    """
    if metric.selection == "last":
        last_step = max((row.step for row in rows), default=0)
        chosen = find_row(rows, metric.name, last_step)
        if chosen is None:
            raise _missing(rows, metric.name, f"at the last evaluation (step {last_step})")
    else:
        best = find_best(rows, metric)
        chosen = find_row(rows, metric.name, best.step)
        if chosen is None:
            place = f"at step {best.step}, whose '{best.name}' is the best"
            raise _missing(rows, metric.name, place)
    if not math.isfinite(chosen.value):
        raise Diverged(f"{metric.name} is {chosen.value} at the selected step {chosen.step}")
    of_epoch = [row for row in rows if row.epoch == chosen.epoch]
    return [row for row in of_epoch if math.isfinite(row.value)]


def find_best(rows: list[MetricRow], metric: Metric) -> MetricRow:
    """Return the row with the best finite value of `metric` on the validation split.

    Raises ConfigError if the metric was never recorded, and Diverged if it was never finite.
    """
    name = criterion(metric)
    candidates = [row for row in rows if row.name == name]
    if not candidates:
        raise _missing(rows, name, "at any evaluation")
    finite = [row for row in candidates if math.isfinite(row.value)]
    if not finite:
        raise Diverged(f"{name} is not finite at any of {len(candidates)} evaluations")
    choose = max if metric.goal == "max" else min
    return choose(finite, key=lambda row: row.value)


def criterion(metric: Metric) -> str:
    """Return the name of `metric` on the validation split."""
    return "val/" + metric.name.split("/", 1)[1]


def find_row(rows: list[MetricRow], name: str, step: int) -> MetricRow | None:
    """Return the row of the metric `name` after `step` steps, or None."""
    matches = [row for row in rows if row.name == name and row.step == step]
    return matches[-1] if matches else None


def _missing(rows: list[MetricRow], name: str, place: str) -> ConfigError:
    """Return the error of a metric that was not recorded at a `place`."""
    steps = [row.step for row in rows if row.name == name]
    if steps:
        return ConfigError(
            f"metric: '{name}' was not measured {place}; it was last measured at step {steps[-1]}. "
            "Choose a metric that every evaluation measures."
        )
    names = ", ".join(sorted({row.name for row in rows}))
    return ConfigError(f"metric: '{name}' was not measured {place}. These metrics were: {names}.")
