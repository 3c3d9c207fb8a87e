"""Build what Lightning trains from a cell: the data, the task, and the cost of the model."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import lightning as L
import torch
from torch import nn

from lit_attn.cells.inputs import collect_inputs
from lit_attn.cells.records import Metric
from lit_attn.config.cell import Cell
from lit_attn.config.data.base import Data, find_paths
from lit_attn.config.schedules import stretch
from lit_attn.data.log import LOG
from lit_attn.data.module import DataModule
from lit_attn.models import factory
from lit_attn.models.batch_norm import synchronise_batch_norms
from lit_attn.schema.errors import ConfigError, suggest
from lit_attn.tasks.base import TaskModule
from lit_attn.training.several_devices import require_gradients


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
    data = _build_data(cell, device)
    network = factory.build(model, experiment.data)
    _prepare_for_devices(network, experiment.training.devices)
    task = _build_task(cell, data, network)
    if experiment.training.compile:
        task.compile_network()
    return Parts(data, task, costs, collect_inputs(cell.parts, experiment.data.input_paths()))


def _build_data(cell: Cell, device: torch.device) -> DataModule:
    """Return the data of a cell. Raises ConfigError if they cannot be had."""
    try:
        data = cell.experiment.data.build(cell.seed, device)
    except ConfigError as error:
        text = str(error)
        raise ConfigError(text if text.startswith("data") else f"data: {text}") from error
    _require_type(data, DataModule, f"data: `build` of kind '{cell.experiment.data.kind}'")
    return data


def find_mistake(
    cells: Sequence[Any],
    has_data: bool = True,
    start_cell: Callable[[int], None] = lambda number: None,
) -> tuple[int, str] | None:
    """Return the number and the ConfigError of the first of `cells` that cannot run.

    `cells` has the content of each config.yaml. The networks have no memory. The logs of the cells
    will show other exceptions. Unless this machine `has_data`, only the model of a cell whose files
    are missing is checked. `start_cell` is called with the number of each cell before its check.
    """
    known: tuple[Data, DataModule] | None = None
    for number, written in enumerate(cells):
        start_cell(number)
        try:
            cell = Cell.parse(written, "config.yaml")
            experiment = cell.experiment
            model = factory.resolve(experiment.model, cell.match_to, experiment.data)
            network = factory.build(model, experiment.data, "meta")
            _prepare_for_devices(network, experiment.training.devices)
            sample = experiment.data.signature().sample()
            require_gradients(network, sample, experiment.training.devices)
            paths = [path for _, path in find_paths(experiment.data.model_dump())]
            if not (has_data or all(map(Path.exists, paths))):
                continue
            if known is None or known[0] != experiment.data:
                known = experiment.data, _build_data(cell, torch.device("cpu"))
                known[1].check()
            _build_task(cell, known[1], network)
        except ConfigError as error:
            return number, str(error)
        except Exception:
            continue
    return None


def _prepare_for_devices(network: nn.Module, devices: int) -> None:
    """Let the batch norms of `network` share their statistics if there are several devices."""
    if devices > 1:
        with factory.model_errors():
            synchronise_batch_norms(network)


def _build_task(cell: Cell, data: DataModule, network: nn.Module) -> TaskModule:
    experiment, training = cell.experiment, cell.experiment.training
    steps = training.model_copy(update={"stretch": 1.0}).steps(data.steps_per_epoch)
    if warning := experiment.schedule.warn_of_steps(steps, data.steps_per_epoch):
        LOG.warning("schedule: %s", warning)
    rate = experiment.schedule.rate(experiment.optimizer.lr, data.steps_per_epoch, training.epochs)
    rate = stretch(rate, training.stretch)
    task = experiment.task.build(network, data, experiment.loss, experiment.optimizer, rate)
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
    return task


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
