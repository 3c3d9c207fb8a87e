"""Build what Lightning trains from a cell: the data, the task, and the cost of the model."""

from collections.abc import Iterable
from typing import Any, NamedTuple

import lightning as L
import torch
from torch import nn

from lit_attn.cells.inputs import collect_inputs
from lit_attn.cells.records import Metric
from lit_attn.config.cell import Cell
from lit_attn.config.training import Training
from lit_attn.data.log import LOG
from lit_attn.data.module import DataModule
from lit_attn.models import factory
from lit_attn.models.batch_norm import synchronise_batch_norms
from lit_attn.models.blocks import compile_blocks, is_mostly_blocks, recompute_blocks
from lit_attn.optim.schedules import stretch
from lit_attn.schema.errors import ConfigError, suggest
from lit_attn.tasks.base import TaskModule
from lit_attn.tasks.step_graph import CudaRecorder, StepGraph
from lit_attn.training.compilation import should_compile
from lit_attn.training.several_devices import require_shared_losses
from lit_attn.training.start_weights import prepare_start


class Parts(NamedTuple):
    """Data, task, the cost of the matched model, and the stamps of the files that were read."""

    data: DataModule
    task: TaskModule
    costs: factory.Budget
    inputs: dict[str, str]
    is_compiled: bool


def build(cell: Cell, device: torch.device, *, may_compile: bool = True) -> Parts:
    """Return the parts of a cell, compiled as the configuration says if it `may_compile`.

    Raises ConfigError for a configuration that cannot run.
    """
    experiment = cell.experiment
    if device.type == "cpu" and experiment.training.precision == "fp16":
        LOG.warning(
            "training.precision: a step in fp16 takes 4 to 14 times as long as in fp32 on a CPU; "
            "choose fp32, or bf16 on a CPU that has it"
        )
    is_compiled = may_compile and should_compile(experiment, device)
    model = factory.resolve(experiment.model, cell.match_to, experiment.data)
    costs = factory.describe(model, experiment.data)
    L.seed_everything(cell.seed, verbose=False)
    data = build_data(cell, device)
    network = factory.build(model, experiment.data)
    training = experiment.training
    prepare_for_devices(network, training)
    task = build_task(cell, data, network)
    if is_compiled:
        if training.is_compiled_by_block or is_mostly_blocks(network):
            compile_blocks(network)
        else:
            for module in task.list_compiled():
                module.compile()
    if training.compile == "step":
        task.step_graph = StepGraph(CudaRecorder, training.clip)
    if training.recompute == "blocks":
        recompute_blocks(network)
    inputs = collect_inputs(cell.parts, experiment.input_paths())
    return Parts(data, task, costs, inputs, is_compiled)


def build_data(cell: Cell, device: torch.device) -> DataModule:
    """Return the data of a cell. Raises ConfigError if they cannot be had."""
    try:
        data = cell.experiment.data.build(cell.seed, device)
    except ConfigError as error:
        message = str(error)
        if not message.startswith("data"):
            message = f"data: {message}"
        raise ConfigError(message) from error
    _require_type(data, DataModule, f"data: `build` of kind '{cell.experiment.data.kind}'")
    return data


def prepare_for_devices(network: nn.Module, training: Training) -> None:
    """Let the batch norms of `network` share their statistics if there are several devices.

    Raises ConfigError if several devices cannot share a loss or a statistic.
    """
    if training.is_distributed:
        with factory.model_errors():
            synchronise_batch_norms(network)
            require_shared_losses(network)


def build_task(cell: Cell, data: DataModule, network: nn.Module) -> TaskModule:
    """Return the task of a cell, with its metrics, schedules and average of the weights.

    `network` gets the weights to start with, and its frozen parameters.

    Raises ConfigError for a configuration that cannot run.
    """
    experiment = cell.experiment
    training = experiment.training
    kept = prepare_start(network, training)
    if kept:
        LOG.warning(kept)
    _warn_of_schedule(cell, data)
    rate = experiment.schedule.rate(experiment.optimizer.lr, data.steps_per_epoch, training.epochs)
    stretched_rate = stretch(rate, training.stretch)
    task = experiment.task.build(
        network, data, experiment.loss, experiment.optimizer, stretched_rate
    )
    _require_type(task, TaskModule, f"task: `build` of kind '{experiment.task.kind}'")
    outputs = experiment.task.outputs(data.signature)
    added_metrics = {}
    for metric in experiment.metrics:
        added_metrics[metric.info(outputs).name] = metric.build(outputs)
    if added_metrics:
        task.add_metrics(added_metrics)
    momentum = experiment.schedule.momentum(data.steps_per_epoch, training.epochs)
    task.momentum = None if momentum is None else stretch(momentum, training.stretch)
    decay = experiment.schedule.weight_decay(data.steps_per_epoch, training.epochs)
    task.decay_factor = None if decay is None else stretch(decay, training.stretch)
    task.evaluates_as_training = training.evaluation == "as-training"
    if training.average is not None:
        task.average_weights(training.average, training.steps(data.steps_per_epoch))
    _require_metric(cell.metric, task)
    if training.stop is not None and "val" not in task.splits:
        raise ConfigError("training.stop: this data has no split val")
    return task


def require_selection(names: Iterable[str], task: TaskModule) -> None:
    """Raise ConfigError if the task will not measure the metrics by which its study selects."""
    for name in names:
        split = name.partition("/")[0]
        if split not in task.splits:
            raise ConfigError(
                f"data: this study selects by '{name}', and this data has no split {split}; test "
                "results choose nothing. Add samples for it, or remove `tune` and `design`"
            )


def _warn_of_schedule(cell: Cell, data: DataModule) -> None:
    """Log a warning if the schedule does not fit the number of steps.

    A stretched training stretches its schedule too, so the steps are those without `stretch`.
    """
    unstretched = cell.experiment.training.model_copy(update={"stretch": 1.0})
    steps = unstretched.steps(data.steps_per_epoch)
    warning = cell.experiment.schedule.warn_of_steps(steps, data.steps_per_epoch)
    if warning:
        LOG.warning("schedule: %s", warning)


def _require_type(built: Any, expected: type, source: str) -> None:
    """Raise ConfigError if a member outside the package builds something else."""
    if not isinstance(built, expected):
        name = f"{expected.__module__}.{expected.__qualname__}"
        raise ConfigError(f"{source} returns {type(built).__name__}, which is not a {name}")


def _require_metric(metric: Metric, task: TaskModule) -> None:
    """Raise ConfigError, before the training, if the cell will not measure `metric`."""
    split, _, name = metric.name.partition("/")
    if metric.selection == "best-validation" and "val" not in task.splits:
        raise ConfigError(
            f"metric: best-validation needs 'val/{name}', but this data has no split val"
        )
    if split in ("train", "evaluation"):
        return
    if split not in task.splits:
        splits = ", ".join(task.splits)
        raise ConfigError(f"metric: '{metric.name}': this data has these splits: {splits}")
    if metric.averaged and task.average is None:
        raise ConfigError(
            f"metric: '{metric.name}' measures averaged weights; set training.average"
        )
    bare_name = name.removeprefix("averaged-")
    measured = task.metric_names(split) + [str(added) for added in task.added_metrics]
    if bare_name not in measured:
        hint = suggest(bare_name, measured)
        raise ConfigError(f"metric: '{metric.name}': '{bare_name}' is not measured{hint}")
