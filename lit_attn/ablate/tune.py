"""Equal tuning: `tune:` of a study gives every variant the same number of trials.

A trial is a variant with one combination of the tuned values. It is trained with the tuning seeds
and judged on the validation split. The state of the search is the results on disk: the sampler has
a fixed seed and gets the results in the order of its trials, so a stopped search continues as if it
had not been stopped, and the speed of the cells changes nothing.
"""

import itertools
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, PositiveInt, ValidationError

from lit_attn.ablate.variants import Variant, make_label, resolve
from lit_attn.cells.folder import CellStatus
from lit_attn.cells.records import Metric, TunedVariant, Tuning, TuningTrial
from lit_attn.config.source import format_value
from lit_attn.config.study import StudySource
from lit_attn.config.study_values import Seeds
from lit_attn.schema.base import Config
from lit_attn.schema.errors import ConfigError, find_problem
from lit_attn.schema.yaml_text import Mapping, Sequence
from lit_attn.tasks.metrics import MetricChoice

if TYPE_CHECKING:
    import optuna

MISSING = "tpe needs optuna, which is not installed: pip install 'lit_attn[tune]'"
BATCH = 4  # Trials that the TPE sampler proposes at once, before it gets their results.

Point = tuple[int, ...]  # Index of the value of every tuned key.
Evaluate = Callable[[str, Point, float], TuningTrial | None]
"""Function that returns a trial of a variant with a share of the steps, or None before its end."""
Trial = tuple[Point, TuningTrial | None]


class TuningOptions(Config):
    """Options of a search: the keys of `tune:` that do not name values to try."""

    select: str = Field(description="validation metric that chooses the values, as val/loss")
    seeds: Seeds = Field(description="seeds of the trials; the final cells use other seeds")
    sampler: Literal["grid", "random", "tpe"] = Field(
        "grid", description="all combinations, a random choice of them, or Optuna's TPE"
    )
    trials: PositiveInt | None = Field(None, description="trials of each variant; null: all points")
    halving: Annotated[int, Field(ge=2)] | None = Field(
        None,
        description="successive halving: 3 trains the best third of the trials for three times the "
        "steps, until the last round trains in full; null: all trials are trained in full",
    )


@dataclass(frozen=True)
class Search:
    """The search of a study: tuned keys with their values, options and the metric that selects."""

    source: StudySource
    keys: dict[str, Sequence]
    options: TuningOptions
    metric: Metric
    changes: Mapping | None
    resolved: dict[Point, dict[str, Variant]] = field(default_factory=dict)

    @property
    def trials(self) -> int:
        """Trials of each variant."""
        return self.options.trials or math.prod(len(values) for values in self.keys.values())

    @property
    def shares(self) -> list[float]:
        """Shares of the training steps in each round; the last round has at least two trials."""
        factor = self.options.halving
        if factor is None:
            return [1.0]
        last = 0
        while self.trials // factor ** (last + 1) >= 2:
            last += 1
        # The names of the trials' folders print all digits of a share.
        return [float(f"{factor ** (number - last):.4g}") for number in range(last + 1)]

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

    def label(self, point: Point, share: float) -> str:
        """Return the end of the folder name of a trial, such as `lr=0.001`, or a hash."""
        values = self.values(point)
        terms = [f"{key.split('.')[-1]}={format_value(value)}" for key, value in values.items()]
        if share < 1:
            terms.append(f"share={format_value(share)}")
        return make_label(",".join(terms), 60)

    def points(self) -> list[Point]:
        """Return all combinations, or the same random choice of them for every variant."""
        indices = [range(len(values)) for values in self.keys.values()]
        points = list(itertools.product(*indices))
        if self.options.sampler == "random":
            return random.Random(0).sample(points, self.trials)
        return points

    def run(self, names: list[str], evaluate: Evaluate) -> tuple[Tuning, dict[str, Point | None]]:
        """Return the record so far and the best points; `evaluate` reads a trial's results.

        The point of a variant in which every trial has diverged is None.
        """
        best: dict[str, Point | None] = {}
        variants = []
        for name in names:
            search = self._search_tpe if self.options.sampler == "tpe" else self._search_rounds
            trials = list(search(name, evaluate))
            ended = [(point, trial) for point, trial in trials if trial is not None]
            # The trials of the last round train in full.
            ranked = self._rank([(point, trial) for point, trial in ended if trial.share == 1])
            chosen: dict[str, Any] | None = None
            at_edge: list[str] = []
            has_ended = len(ended) == len(trials)
            if has_ended and not ranked:
                best[name] = None
            if has_ended and ranked:
                point = ranked[0]
                best[name] = point
                chosen = self.values(point)
                at_edge = [key for key in self.keys if self._is_at_edge(key, point)]
            variants.append(
                TunedVariant(
                    variant=name,
                    chosen=chosen,
                    at_edge=at_edge,
                    trials=[trial for _, trial in ended],
                )
            )
        record = Tuning(
            sampler=self.options.sampler,
            trials=self.trials,
            halving=self.options.halving,
            seeds=list(self.options.seeds),
            select=self.metric,
            keys={key: list(values) for key, values in self.keys.items()},
            variants=variants,
        )
        return record, best

    def _rank(self, ended: list[Trial]) -> list[Point]:
        """Return the points whose trials have a mean, the best first."""
        means = {point: trial.mean for point, trial in ended if trial is not None}
        valid = {point: mean for point, mean in means.items() if mean is not None}
        return sorted(valid, key=lambda p: valid[p], reverse=self.metric.goal == "max")

    def _search_rounds(self, name: str, evaluate: Evaluate) -> Iterator[Trial]:
        """Yield the trials of each round, until the first round with a trial that has not ended."""
        points = self.points()
        factor = self.options.halving or 1
        for number, share in enumerate(self.shares, start=1):
            trials = [(point, evaluate(name, point, share)) for point in points]
            yield from trials
            if any(trial is None for _, trial in trials):
                return
            points = self._rank(trials)[: self.trials // factor**number]

    def _search_tpe(self, name: str, evaluate: Evaluate) -> Iterator[Trial]:
        """Yield the trials that have ended, until the first one that has not."""
        import optuna

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        sampler = optuna.samplers.TPESampler(seed=0)
        study = optuna.create_study(
            direction="maximize" if self.metric.goal == "max" else "minimize", sampler=sampler
        )
        for start in range(0, self.trials, BATCH):
            batch = [study.ask() for _ in range(min(BATCH, self.trials - start))]
            points = [self._suggest(trial) for trial in batch]
            ended = [evaluate(name, point, 1.0) for point in points]
            for trial, point, outcome in zip(batch, points, ended, strict=True):
                yield point, outcome
                if outcome is None:
                    return
                state = optuna.trial.TrialState.FAIL if outcome.mean is None else None
                study.tell(trial, outcome.mean, state)

    def _suggest(self, trial: "optuna.Trial") -> Point:
        """Return the point that a sampler proposes for a trial."""
        last_indices = {key: len(values) - 1 for key, values in self.keys.items()}
        return tuple(trial.suggest_int(key, 0, last) for key, last in last_indices.items())

    def summarize(
        self, point: Point, share: float, ends: dict[int, CellStatus]
    ) -> TuningTrial | None:
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
        return TuningTrial(values=self.values(point), mean=mean, by_seed=by_seed, share=share)

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
    _check_options(source, keys, options, seeds)
    for variant in written:
        if "val" not in variant.experiment.data.splits:
            raise source.error(
                ("tune",), f"variant '{variant.name}': its data have no validation split"
            )
        try:
            metric = MetricChoice(name=options.select).resolve(variant.experiment)
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
            raise source.error(("tune", key), "needs a list of at least two values")
        if changes is not None and key in changes:
            raise source.error(("tune", key), f"is tuned, so --set {key} has no effect")
        is_free = key.split(".")[0] in ("optimizer", "schedule")
        if has_budget and not is_free:
            raise source.error(("tune", key), "may change the cost that `match` holds equal")


def _check_options(
    source: StudySource,
    keys: dict[str, Sequence],
    options: TuningOptions,
    seeds: tuple[int, ...],
) -> None:
    """Raise ConfigError if the options do not fit each other, the keys or the final `seeds`."""
    sampler = options.sampler
    trials = options.trials
    halving = options.halving

    def error(option: str, message: str) -> ConfigError:
        path = ("tune", option) if option in source.study.tune else ("tune",)
        return source.error(path, message)

    count = math.prod(len(values) for values in keys.values())
    if trials is None and sampler != "grid":
        raise error("trials", f"sampler: {sampler} needs their number")
    is_wrong_grid = sampler == "grid" and trials not in (None, count)
    is_wrong_choice = sampler == "random" and trials is not None and trials > count
    if is_wrong_grid or is_wrong_choice:
        raise error("trials", f"{trials}, but there are {count} points")
    common = set(options.seeds) & set(seeds)
    if common:
        raise error("seeds", f"{common} are seeds of the final cells, which need other ones")
    if not options.select.startswith("val/"):
        raise error("select", "needs a validation metric: val/loss")
    if sampler == "tpe" and find_spec("optuna") is None:
        raise error("sampler", MISSING)
    if halving is not None and sampler == "tpe":
        raise error("halving", "needs sampler: grid or random")
    first = trials or count
    second = first // (halving or 1)
    if second < 2:
        raise error(
            "halving",
            f"leaves {second} of {first} trials for the second round; it needs at least 2",
        )
