"""Build what Lightning trains from a cell: the data, the task, and the cost of the model."""

from typing import Any, NamedTuple

import lightning as L
import torch

from lit_attn.cells.inputs import collect_inputs
from lit_attn.cells.records import Metric
from lit_attn.config.cell import Cell
from lit_attn.config.schedules import stretch
from lit_attn.data.module import DataModule
from lit_attn.models import factory
from lit_attn.schema.errors import ConfigError, suggest
from lit_attn.tasks.base import TaskModule


class Parts(NamedTuple):
    """Data, task, the cost of the matched model, and the stamps of the files that were read."""

    data: DataModule
    task: TaskModule
    costs: factory.Budget
    inputs: dict[str, str]


def build(cell: Cell, device: torch.device) -> Parts:
    """Return the parts of a cell. Raises ConfigError for a configuration that cannot run."""
    experiment = cell.experiment
    model = factory.resolve(experiment.model, cell.match_to, experiment.data)
    costs = factory.describe(model, experiment.data)
    L.seed_everything(cell.seed, verbose=False)
    data = experiment.data.build(cell.seed, device)
    _require_type(data, DataModule, f"data: `build` of kind '{experiment.data.kind}'")
    network = factory.build(model, experiment.data)
    optimizer, training = experiment.optimizer, experiment.training
    rate = experiment.schedule.rate(optimizer.lr, data.steps_per_epoch, training.epochs)
    rate = stretch(rate, training.stretch)
    task = experiment.task.build(network, data, experiment.loss, optimizer, rate)
    _require_type(task, TaskModule, f"task: `build` of kind '{experiment.task.kind}'")
    outputs = experiment.task.outputs(data.signature)
    added = {metric.info(outputs).name: metric.build(outputs) for metric in experiment.metrics}
    if added:
        task.add_metrics(added)
    momentum = experiment.schedule.momentum(data.steps_per_epoch, training.epochs)
    task.momentum = None if momentum is None else stretch(momentum, training.stretch)
    task.evaluates_as_training = training.evaluation == "as-training"
    if training.average is not None:
        task.average_weights(training.average, training.steps(data.steps_per_epoch))
    _require_metric(cell.metric, task)
    if training.compile:
        task.compile_network()
    return Parts(data, task, costs, collect_inputs(cell.parts, experiment.data.input_paths()))


def _require_type(built: Any, expected: type, source: str) -> None:
    """Raise ConfigError if a member outside the package builds something else."""
    if not isinstance(built, expected):
        name = f"{expected.__module__}.{expected.__qualname__}"
        raise ConfigError(f"{source} returns {type(built).__name__}, which is not a {name}")


def _require_metric(metric: Metric, task: TaskModule) -> None:
    """Raise ConfigError, before the training, if the cell will not measure `metric`."""
    split, _, name = metric.name.partition("/")
    if metric.selection == "best-validation" and "val" not in task.splits:
        text = f"best-validation needs 'val/{name}', but this data has no split val"
        raise ConfigError(f"metric: {text}")
    if split in ("train", "evaluation"):
        return
    if split not in task.splits:
        splits = ", ".join(task.splits)
        raise ConfigError(f"metric: '{metric.name}': this data has these splits: {splits}")
    if metric.averaged and task.average is None:
        text = "measures averaged weights; set training.average"
        raise ConfigError(f"metric: '{metric.name}' {text}")
    bare, names = name.removeprefix("averaged-"), [*task.metric_names(split), *task.added_metrics]
    if bare not in names:
        hint = suggest(bare, names)
        raise ConfigError(f"metric: '{metric.name}': '{bare}' is not measured{hint}")
