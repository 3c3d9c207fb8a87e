"""Key `budget` of a study: the design that finds most with its trainings.

A budget of time becomes a number of trainings with the seconds that `--dry-run --estimate` has
measured. The choice is recorded in the study's folder before the first cell: neither another
measurement nor another version of the program changes it then.
"""

from pathlib import Path
from typing import NamedTuple

from lit_attn.ablate.variants import Variant
from lit_attn.cells.budget import (
    FILE,
    TIMES_FILE,
    Budget,
    ChosenDesign,
    TrainingTime,
    TrainingTimes,
    write_seconds,
)
from lit_attn.cells.records import Timing
from lit_attn.config.study import StudySource
from lit_attn.config.study_design import DesignConfig
from lit_attn.config.study_values import MOST_SEEDS
from lit_attn.report.statistics import designs
from lit_attn.schema.errors import ConfigError, program


class _Trainings(NamedTuple):
    """Number of trainings of a budget, and the seconds of one where the budget is a time."""

    number: int
    seconds: float | None


def choose_design(
    source: StudySource, written: list[Variant], folder: Path, *, is_estimate: bool
) -> ChosenDesign | None:
    """Return the design of a study with `budget`, None for another study.

    `folder` is that of the study. For an estimate, which measures the seconds of a training, the
    smallest design stands in for an unknown one. Raises ConfigError for a budget that is too small
    or that needs this measurement, and for a recorded design that cannot be read.
    """
    budget = source.study.budget
    if budget is None:
        return None
    recorded = ChosenDesign.read(folder / FILE)
    if recorded is not None and recorded.is_for(budget, len(written)):
        return recorded
    trainings = _count_trainings(source, budget, written, folder)
    if trainings is None:
        if not is_estimate:
            raise _ask_for_times(source, budget)
        trainings = _Trainings(_find_fewest(source, len(written)), None)
    chosen = _choose(source, trainings.number, len(written))
    if chosen is None:
        raise _refuse(source, budget, trainings, len(written))
    times = {"budget_seconds": budget.seconds, "training_seconds": trainings.seconds}
    return chosen.model_copy(update=times)


def apply_choice(source: StudySource, chosen: ChosenDesign) -> dict[str, object]:
    """Return the keys of the study that the chosen design replaces."""
    if chosen.seeds is not None:
        # `select` ranks the variants of a screening, and there is none.
        return {"seeds": tuple(range(chosen.seeds)), "design": None}
    written = source.study.design or DesignConfig()
    numbers = {"screen": chosen.screen, "keep": chosen.keep, "confirm": chosen.confirm}
    return {"design": written.model_copy(update=numbers)}


def store_times(
    folder: Path, name: str, written: list[Variant], timings: dict[str, Timing]
) -> bool:
    """Record the seconds of all variants; return False if one of them was not measured."""
    entries = []
    for variant in written:
        kind = variant.cell(name, 0).kind
        if kind not in timings:
            return False
        seconds = timings[kind].seconds
        entries.append(TrainingTime(variant=variant.name, kind=kind, seconds=seconds))
    TrainingTimes(variants=entries).write(folder / TIMES_FILE)
    return True


def _count_trainings(
    source: StudySource, budget: Budget, written: list[Variant], folder: Path
) -> _Trainings | None:
    """Return the trainings of a budget, or None if the seconds of one are not measured."""
    if budget.trainings is not None:
        return _Trainings(budget.trainings, None)
    assert budget.seconds is not None
    times = TrainingTimes.read_valid(folder / TIMES_FILE)
    known = {} if times is None else {entry.kind: entry.seconds for entry in times.variants}
    compared = written
    if "time" in source.study.match:
        # All variants train as long as the baseline.
        compared = [variant for variant in written if variant.name == source.study.baseline]
    kinds = [variant.cell("", 0).kind for variant in compared]
    if any(kind not in known for kind in kinds):
        return None
    mean = sum(known[kind] for kind in kinds) / len(kinds)
    return _Trainings(int(budget.seconds / mean), mean)


def _choose(source: StudySource, trainings: int, variants: int) -> ChosenDesign | None:
    """Return the design with the largest power, or None if no star is possible.

    Seeds of all variants are kept where a screening does not gain GAIN, because all variants then
    have an estimate.
    """
    compared = variants - 1
    seeds = min(trainings // variants, MOST_SEEDS)
    has_seeds = seeds >= designs.FEWEST_PAIRS
    if _can_screen(source, compared):
        screening = designs.choose_screening(compared, trainings)
        if screening is not None:
            gain = screening.power(compared)
            if has_seeds:
                gain -= designs.find_power(compared, seeds)
            if gain >= designs.GAIN or not has_seeds:
                return ChosenDesign(trainings=trainings, variants=variants, **screening._asdict())
    if not has_seeds:
        return None
    return ChosenDesign(trainings=trainings, variants=variants, seeds=seeds)


def _can_screen(source: StudySource, compared: int) -> bool:
    """Return False for few variants, and for a product, whose effects come from all cells."""
    return compared >= designs.FEWEST_VARIANTS and len(source.study.axes) <= 1


def _find_fewest(source: StudySource, variants: int) -> int:
    """Return the fewest trainings with which a star is possible."""
    fewest = designs.FEWEST_PAIRS * variants
    if _can_screen(source, variants - 1):
        return min(fewest, designs.find_cheapest(variants - 1))
    return fewest


def _refuse(
    source: StudySource, budget: Budget, trainings: _Trainings, variants: int
) -> ConfigError:
    """Return the error about a budget with which no star is possible."""
    fewest = _find_fewest(source, variants)
    least = str(fewest)
    number = f"{trainings.number} trainings"
    if trainings.seconds is not None:
        least = f"{fewest * trainings.seconds / 3600:.2g}h"
        number = f"{budget.describe()} are {number} of {write_seconds(trainings.seconds)}, which"
    return source.error(
        ("budget",),
        f"{number} are too few for a star of one of {variants - 1} variants; write at least"
        f" {least}",
    )


def _ask_for_times(source: StudySource, budget: Budget) -> ConfigError:
    """Return the error about a budget of time before the seconds of a training are measured."""
    command = f"{program('run')} {source.path} --study {source.name} --dry-run --estimate"
    return source.error(
        ("budget",),
        f"{budget.describe()} are as many trainings as their seconds say, which are not measured;"
        f" run `{command}`, or write a number of trainings: budget: 126",
    )
