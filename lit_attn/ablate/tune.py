"""Equal tuning: `tune:` of a study tries the same combinations of values for every variant.

A trial is a variant with one combination of the tuned values. It is trained with the tuning seeds
and judged on the validation split. The state of the search is the results on disk, so a stopped
search continues as if it had not been stopped, and the speed of the cells changes nothing.
"""

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from pydantic import Field, ValidationError

from lit_attn.ablate.variants import Variant, make_label, resolve
from lit_attn.cells.folder import CellStatus
from lit_attn.cells.records import Metric, TunedVariant, Tuning, TuningTrial
from lit_attn.config.source import format_value
from lit_attn.config.study import StudySource
from lit_attn.config.study_values import Seeds
from lit_attn.schema.base import Config
from lit_attn.schema.errors import find_problem
from lit_attn.schema.yaml_text import Mapping, Sequence
from lit_attn.tasks.metrics import MetricChoice

Point = tuple[int, ...]  # Index of the value of every tuned key.
Evaluate = Callable[[str, Point], TuningTrial | None]
"""Function that returns the trial of a variant at a point, or None before its end."""


class TuningOptions(Config):
    """Options of a search: the keys of `tune:` that do not name values to try."""

    select: str = Field(description="validation metric that chooses the values, as val/loss")
    seeds: Seeds = Field(description="seeds of the trials; the final cells use other seeds")


@dataclass(frozen=True)
class Search:
    """The search of a study: tuned keys with their values, options and the metric that selects."""

    source: StudySource
    keys: dict[str, Sequence]
    options: TuningOptions
    metric: Metric
    changes: Mapping | None
    resolved: dict[Point, dict[str, Variant]] = field(default_factory=dict)

    def values(self, point: Point) -> dict[str, Any]:
        """Return the values of the tuned keys at `point`."""
        chosen = {}
        for key, index in zip(self.keys, point, strict=True):
            chosen[key] = self.keys[key][index]
        return chosen

    def variant(self, name: str, point: Point) -> Variant:
        """Return a variant with the values at `point`; ConfigError if they are wrong."""
        if point not in self.resolved:
            where = self.source.tree.where["tune"]
            changes = Mapping(where) if self.changes is None else self.changes.copy()
            for key, value in self.values(point).items():
                changes.put(key, value, self.source.study.tune.where[key])
            variants = resolve(self.source, changes)
            self.resolved[point] = {variant.name: variant for variant in variants}
        return self.resolved[point][name]

    def label(self, point: Point) -> str:
        """Return the end of the folder name of a trial, such as `lr=0.001`, or a hash."""
        values = self.values(point)
        terms = [f"{key.split('.')[-1]}={format_value(value)}" for key, value in values.items()]
        return make_label(",".join(terms), 60)

    def points(self) -> list[Point]:
        """Return all combinations of the tuned values."""
        indices = [range(len(values)) for values in self.keys.values()]
        return list(itertools.product(*indices))

    def run(self, names: list[str], evaluate: Evaluate) -> tuple[Tuning, dict[str, Point | None]]:
        """Return the record so far and the best points; `evaluate` reads a trial's results.

        The point of a variant in which every trial has diverged is None.
        """
        points = self.points()
        best: dict[str, Point | None] = {}
        variants = []
        for name in names:
            trials: dict[Point, TuningTrial] = {}
            for point in points:
                trial = evaluate(name, point)
                if trial is not None:
                    trials[point] = trial
            chosen: dict[str, Any] | None = None
            at_edge: list[str] = []
            if len(trials) == len(points):
                best_point = self._find_best(trials)
                best[name] = best_point
                if best_point is not None:
                    chosen = self.values(best_point)
                    at_edge = [key for key in self.keys if self._is_at_edge(key, best_point)]
            variants.append(
                TunedVariant(
                    variant=name, chosen=chosen, at_edge=at_edge, trials=list(trials.values())
                )
            )
        record = Tuning(
            trials=len(points),
            seeds=list(self.options.seeds),
            select=self.metric,
            keys={key: list(values) for key, values in self.keys.items()},
            variants=variants,
        )
        return record, best

    def _find_best(self, trials: dict[Point, TuningTrial]) -> Point | None:
        """Return the point of the best mean, the first of equal ones; None if no trial has one."""
        means = {point: trial.mean for point, trial in trials.items() if trial.mean is not None}
        if not means:
            return None
        choose = max if self.metric.goal == "max" else min
        return choose(means, key=lambda point: means[point])

    def summarize(self, point: Point, ends: dict[int, CellStatus]) -> TuningTrial | None:
        """Return a trial from the cell of each seed.

        A trial with a diverged cell has no mean, whatever its other cells do; a cell in which the
        metric is not finite counts as diverged. Returns None if a cell has neither a result nor
        diverged.
        """
        by_seed: dict[str, float | None] = {}
        has_diverged = False
        is_complete = True
        for seed, status in ends.items():
            value = None if status.result is None else status.result.metrics.get(self.metric.name)
            by_seed[str(seed)] = None if value is None else self.metric.scale * value
            # A result leaves out the metrics that are not finite.
            is_undefined = status.result is not None and value is None
            has_diverged |= status.state == "diverged" or is_undefined
            is_complete &= value is not None
        if not has_diverged and not is_complete:
            return None
        values = [value for value in by_seed.values() if value is not None]
        mean = None if has_diverged else math.fsum(values) / len(values)
        return TuningTrial(values=self.values(point), mean=mean, by_seed=by_seed)

    def _is_at_edge(self, key: str, point: Point) -> bool:
        """Return True if `point` has the smallest or the largest number of `key`."""
        numbers = self.keys[key]
        if not all(isinstance(number, int | float) for number in numbers):
            return False
        return self.values(point)[key] in (min(numbers), max(numbers))


def read_search(
    source: StudySource, seeds: tuple[int, ...], written: list[Variant], changes: Mapping | None
) -> Search | None:
    """Return the search of a study, or None without `tune:`. Raises ConfigError for a mistake."""
    tune = source.study.tune
    if not tune:
        return None
    keys = {key: tune[key] for key in tune if key not in TuningOptions.model_fields}
    try:
        options = TuningOptions.model_validate({k: v for k, v in tune.items() if k not in keys})
    except ValidationError as error:
        path, message = find_problem(error)
        raise source.error(("tune", *path), message) from error
    _check_keys(source, keys, changes)
    common = set(options.seeds) & set(seeds)
    if common:
        raise source.error(
            ("tune", "seeds"), f"{common} are seeds of the final cells, which need other ones"
        )
    if not options.select.startswith("val/"):
        raise source.error(("tune", "select"), "needs a validation metric: val/loss")
    for variant in written:
        if "val" not in variant.experiment.data.splits:
            raise source.error(
                ("tune",), f"variant '{variant.name}': its data have no validation split"
            )
        try:
            metric = MetricChoice(name=options.select).resolve(variant.experiment).untested
        except ValueError as error:
            raise source.error(("tune", "select"), str(error)) from error
    return Search(source, keys, options, metric, changes)


def _check_keys(source: StudySource, keys: dict[str, Any], changes: Mapping | None) -> None:
    """Raise ConfigError if there are no tuned keys, or if one of them cannot be tuned."""
    if not keys:
        raise source.error(("tune",), "needs a key to tune, as optimizer.lr: [1e-4, 3e-4, 1e-3]")
    has_budget = "flops" in source.study.match or "time" in source.study.match
    for key, values in keys.items():
        if not isinstance(values, Sequence) or len(values) < 2:
            raise source.error(
                ("tune", key), "needs a list of at least two values of a key of the experiment"
            )
        if any(value in values[:place] for place, value in enumerate(values)):
            raise source.error(("tune", key), "has a value twice")
        if changes is not None and key in changes:
            raise source.error(("tune", key), f"is tuned, so --set {key} has no effect")
        is_free = key.split(".")[0] in ("optimizer", "schedule")
        if has_budget and not is_free:
            raise source.error(("tune", key), "may change the cost that `match` holds equal")
