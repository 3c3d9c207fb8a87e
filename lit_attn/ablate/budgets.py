"""Key `budgets` of a study: trainings of several lengths that share their stable phase.

Each budget is a study of its own, in which `training.epochs` is multiplied by the budget. A cell
has the identity of a training of that length from scratch. The cell with the largest budget is the
trunk of the others with the same variant and seed: it keeps a branch for each of them
(lit_attn.cells.branches), from which they continue.
"""

import math
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from lit_attn.cells import lock
from lit_attn.cells.branches import find_branch, find_trunk
from lit_attn.cells.folder import read_cell
from lit_attn.cells.records import Timing
from lit_attn.config.experiment import Experiment
from lit_attn.config.study import StudySource, name_budget
from lit_attn.schema.errors import ConfigError

if TYPE_CHECKING:
    from lit_attn.ablate.plan import Job, Matrix

TRIED_STEPS = 1_000  # Steps per epoch with which a schedule is asked for its stable phase.


class Sibling(NamedTuple):
    """The same variant with another budget: the name of its study, and its experiment."""

    study: str
    experiment: Experiment


def scale_experiments(source: StudySource, experiment: Experiment) -> dict[float, Sibling]:
    """Return a variant with each budget of its study, from its `experiment` as written.

    Raises ConfigError, whose message begins with the key, if the trainings would not be equal up to
    the decay of the shortest.
    """
    _require_equal_phases(experiment)
    siblings = {}
    for budget in source.study.budgets:
        training = experiment.training.model_copy(
            update={"epochs": _scale_epochs(experiment, budget)}
        )
        scaled = experiment.model_copy(update={"training": training})
        _require_stable_phase(scaled, budget)
        siblings[budget] = Sibling(f"{source.family}-{name_budget(budget)}", scaled)
    return siblings


def _scale_epochs(experiment: Experiment, budget: float) -> int:
    """Return the epochs of a budget. Raises ConfigError if they are no whole number."""
    written = experiment.training.epochs
    epochs = round(budget * written)
    if epochs < 1 or not math.isclose(epochs, budget * written, rel_tol=1e-9):
        raise ConfigError(
            f"training.epochs: {written} times the budget {budget:g} is {budget * written:g}, and a"
            " training has whole epochs; change training.epochs or `budgets`"
        )
    return epochs


def _require_equal_phases(experiment: Experiment) -> None:
    """Raise ConfigError for a key with which trainings of two lengths differ from the start."""
    schedule = experiment.schedule
    training = experiment.training
    if schedule.stable_steps(TRIED_STEPS, training.epochs) is None:
        raise ConfigError(
            f"schedule: {schedule.kind}: its rate depends on the length of the training from the "
            "start; `budgets` needs warm-up, stable, decay: {kind: trapezoid, warmdown: 1}"
        )
    if training.max_steps is not None:
        raise ConfigError(
            "training.max_steps: cuts the decay off; `budgets` needs the length in training.epochs"
            " (with data.epoch_steps an epoch has any number of steps)"
        )
    if training.stretch != 1:
        raise ConfigError("training.stretch: `budgets` sets the length; remove it")
    if training.stop is not None:
        raise ConfigError("training.stop: ends a budget early; remove it, or `budgets`")
    if training.changing_callbacks:
        raise ConfigError(
            "training.callbacks: a callback could change the steps that budgets share; write "
            "`observes: true` if it only records, or remove it or `budgets`"
        )
    if training.average is not None and training.average.epochs is not None:
        raise ConfigError(
            "training.average.epochs: the mean begins at another epoch for each budget; write"
            " training.average.decay"
        )


def _require_stable_phase(experiment: Experiment, budget: float) -> None:
    """Raise ConfigError unless the training of a budget has a stable phase and a decay."""
    schedule = experiment.schedule
    epochs = experiment.training.epochs
    ramp_epochs = sum(schedule.ramps().values())
    if ramp_epochs > epochs:
        raise ConfigError(
            f"schedule: its ramps take {ramp_epochs:g} epochs, but the budget {budget:g} has"
            f" {epochs}; shorten them, or leave out this budget"
        )
    stable_steps = schedule.stable_steps(TRIED_STEPS, epochs)
    if stable_steps == 0:
        raise ConfigError(
            f"schedule: the budget {budget:g} consists of its decay, so there is no stable phase to"
            " share; shorten the decay, or leave out this budget"
        )
    if stable_steps == TRIED_STEPS * epochs:
        raise ConfigError(
            "schedule: has no decay, so every budget is a point of the same curve; set"
            " schedule.warmdown, or remove `budgets`"
        )


def count_shared_steps(experiment: Experiment, steps: int) -> int:
    """Return how many of the `steps` of a cell with a trunk the trunk trains."""
    epochs = experiment.training.epochs
    return experiment.schedule.stable_steps(steps // epochs, epochs) or 0


def order_matrices(matrices: "list[Matrix]") -> "list[Matrix]":
    """Return the studies with larger budgets before their siblings, and otherwise in order."""
    first_places: dict[str, int] = {}
    for place, matrix in enumerate(matrices):
        first_places.setdefault(_family(matrix), place)

    def rank(matrix: "Matrix") -> tuple[int, float]:
        return first_places[_family(matrix)], -(matrix.source.budget or 0.0)

    return sorted(matrices, key=rank)


def _family(matrix: "Matrix") -> str:
    """Return the study that has been split into budgets, or the name of another study."""
    return matrix.source.family if matrix.source.budget is not None else matrix.name


def describe_budget(matrix: "Matrix") -> str:
    """Return the epochs of a study with a budget, and where its first steps are trained."""
    source = matrix.source
    lengths = {variant.experiment.training.epochs for variant in matrix.written}
    epochs = " or ".join(str(length) for length in sorted(lengths))
    noun = "epoch" if lengths == {1} else "epochs"
    words = f"budget {source.budget:g}: {epochs} {noun}"
    largest = source.study.budgets[-1]
    if source.budget == largest:
        return f"{words}; the smaller budgets continue from states before their decay, if it runs"
    trunk = f"{source.family}-{name_budget(largest)}"
    return f"{words}; the steps before the decay are trained once, in {trunk}, if it runs first"


def estimate_seconds(job: "Job", timing: Timing, planned: set[Path]) -> float:
    """Return the seconds of a cell, without the steps that its trunk trains.

    `planned` are the folders of the cells that run.
    """
    trunk = find_trunk(job.folder, job.cell.trunk)
    if trunk is None or _has_started(job):
        return timing.seconds
    will_have_branch = trunk in planned and not (trunk / "result.json").exists()
    if find_branch(trunk, job.identity) is None and not will_have_branch:
        return timing.seconds
    experiment = job.cell.experiment
    shared_steps = count_shared_steps(experiment, timing.steps)
    epoch_steps = timing.steps // experiment.training.epochs
    shared_evaluations = shared_steps // (epoch_steps * experiment.training.evaluate_every)
    trained = {
        "steps": timing.steps - shared_steps,
        "evaluations": timing.evaluations - shared_evaluations,
    }
    return timing.model_copy(update=trained).seconds


def must_wait(job: "Job", pending: set[Path]) -> bool:
    """Return True if a cell can continue from a branch that its trunk will have.

    `pending` are the folders of the cells that this run starts or is running.
    """
    trunk = find_trunk(job.folder, job.cell.trunk)
    if trunk is None or find_branch(trunk, job.identity) is not None:
        return False
    if _has_started(job):
        return False
    return trunk in pending or lock.read_holder(trunk) is not None


def describe_scratch(job: "Job") -> str | None:
    """Return the line about a cell that trains from its first step for want of a branch."""
    trunk = find_trunk(job.folder, job.cell.trunk)
    if trunk is None or find_branch(trunk, job.identity) is not None or _has_started(job):
        return None
    state = read_cell(trunk, trunk.name.rpartition("-")[2]).state
    return (
        f"scratch  {job.name}  trains from its first step: {job.cell.trunk} is {state} and has no"
        " branch for it"
    )


def read_trunk_holder(job: "Job") -> lock.LockHolder | None:
    """Return the process that trains the trunk of a cell, None without such a process."""
    trunk = find_trunk(job.folder, job.cell.trunk)
    return None if trunk is None else lock.read_holder(trunk)


def _has_started(job: "Job") -> bool:
    """Return True if the cell has a checkpoint of its own."""
    return any((job.folder / "checkpoints").glob("step-*.ckpt"))
