"""Replay a recorded trajectory through this project: YAML, data module, task, optimiser, Trainer.

A replay runs `lit_attn.train` on a cell of a shipped experiment that overrides shrink to the
recorded size. Two things are replaced: the initial values of the network and the batches.
"""

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import torch
from helpers.paths import EXPERIMENTS
from timm.utils import ModelEmaV3

from lit_attn.attention.spec import attention_spec
from lit_attn.cells.rows import read_metrics
from lit_attn.config.cell import Cell
from lit_attn.data.module import TrainLoader
from lit_attn.schema.yaml_text import parse_plain
from lit_attn.tasks.base import TaskModule
from lit_attn.train import run_cell
from released import ranks
from released.recording import Arrays, Recorder, Tensors, initial_values, shared_draws, trained


class Replay(NamedTuple):
    """This project's side of a record.

    `batch(step)` returns the tensors of one optimiser step, of which each rank takes its share and
    cuts it into `micro_batches`, or any batch of a single micro-batch;
    without it the cell reads its own data. `view` renames parameters of this project to released
    names. It may also cut a tensor into several, reorder its elements or change their sign.
    `outputs(network)` returns more arrays to compare, from the trained network, and `metrics` are
    the names of evaluated metrics to compare as the array `evaluation`. `start(network)` fills what
    is not trained.
    """

    cell: Cell
    batch: Callable[[int], Any] | None
    view: Callable[[Tensors], Tensors]
    micro_batches: int = 1
    draws: bool = False
    outputs: Callable[[torch.nn.Module], Arrays] = lambda _: {}
    metrics: tuple[str, ...] = ()
    precision: torch.dtype = torch.float64
    start: Callable[[torch.nn.Module], None] = lambda _: None


def shipped_cell(experiment: str, changes: dict[str, Any], seed: int, metric: str = "") -> Cell:
    """Return a cell of a shipped experiment with `changes` (dotted keys) applied."""
    tree = parse_plain((EXPERIMENTS / experiment).read_text(), "text")
    tree["training"] |= {"accelerator": "cpu", "compile": "none"}
    for key, value in changes.items():
        *path, last = key.split(".")
        node = tree
        for name in path:
            node = node.setdefault(name, {})
        node[last] = value
    attention = tree["model"].get("attention", "standard")
    tree["model"]["attention"] = attention_spec(attention, experiment)
    return Cell.model_validate(
        {
            "study": "released",
            "variant": "v",
            "seed": seed,
            "experiment": tree,
            "metric": {"name": metric or "val/loss", "goal": "min", "label": "loss", "scale": 1},
        }
    )


def start_from_record(
    network: torch.nn.Module, view: Callable[[Tensors], Tensors], seed: int
) -> None:
    """Give the network the initial values that the released code started from.

    Each element of this project's parameters is numbered from 1, `view` shows where the numbers
    stand under released names, and the released values are written back to those places. A
    negative number stands for a value of the opposite sign.
    """
    parameters = trained(network)
    numbers, first = {}, 1
    for name, parameter in parameters.items():
        numbers[name] = torch.arange(first, first + parameter.numel()).double().view_as(parameter)
        first += parameter.numel()
    flat = torch.full((first,), torch.nan, dtype=torch.float64)
    for name, places in view(numbers).items():
        values = initial_values(name, tuple(places.shape), seed) * places.sign()
        flat[places.abs().long().flatten()] = values.flatten()
    if flat[1:].isnan().any():
        raise ValueError("the renaming leaves out parameters of this project")
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(flat[numbers[name].long()])


def replay_run(module: ModuleType, name: str, folder: Path) -> Arrays:
    """Replay the run `name` of a set-up in `folder`, on all devices of its cell, and return it."""
    replay: Replay = module.replay(name, folder)
    if replay.cell.experiment.training.devices > 1:
        return ranks.replay(module, name, folder)
    return run(replay, folder)


def run(replay: Replay, folder: Path) -> Arrays:
    """Train the cell in `folder` as one rank and return its record under released names."""
    recorder = Recorder(replay.micro_batches)
    seed = replay.cell.seed
    configure = TaskModule.configure_optimizers
    averages: list[ModelEmaV3] = []

    def start(task: TaskModule) -> torch.optim.Optimizer:
        task.to(replay.precision)
        if replay.precision == torch.float64:
            task.network.register_forward_pre_hook(to_double)
        recorder.begin(
            task.network,
            lambda network: start_from_record(network, replay.view, seed),
            replay.view,
        )
        with torch.no_grad():
            replay.start(task.network)
        if task.average is not None:
            task.average.set(task.network)
            averages.append(task.average)
        return configure(task)

    replay.cell.write(folder / "config.yaml")
    contexts = (
        recorder,
        default_precision(replay.precision),
        recorded_batches(replay),
        shared_draws(seed) if replay.draws else contextlib.nullcontext(),
        patch.object(TaskModule, "configure_optimizers", start),
        # A cell points temporary files to its own folder.
        patch.dict(os.environ),
        patch.object(tempfile, "tempdir", None),
    )
    with contextlib.ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        run_cell(folder)
    assert recorder.network is not None
    arrays = recorder.arrays() | replay.outputs(recorder.network)
    if replay.metrics:
        last = {row.name: row.value for row in read_metrics(folder / "metrics.csv")}
        arrays["evaluation"] = np.array([last[name] for name in replay.metrics])
    for average in averages:
        averaged = replay.view(dict(average.module.named_parameters()))
        arrays["average"] = recorder.average(averaged, average.decay)
    return arrays


def to_double(_: torch.nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Convert the floating-point inputs of a network, as evaluation batches are float32."""
    return tuple(x.double() if torch.is_tensor(x) and x.is_floating_point() else x for x in inputs)


@contextlib.contextmanager
def default_precision(dtype: torch.dtype) -> Iterator[None]:
    """Build and run everything in `dtype`."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def recorded_batches(replay: Replay) -> Iterator[None]:
    """Replace the training batches of every data module by those of the record."""
    batch = replay.batch
    if batch is None:
        yield
        return

    def batches(loader: TrainLoader) -> Iterator[Any]:
        assert loader.data.trainer is not None
        start = loader.data.trainer.global_step
        for step in range(start, start + loader.data.steps_per_epoch):
            if replay.micro_batches == 1:
                yield batch(step)
            else:
                shares = map(loader.data.share, batch(step))
                parts = [tensor.chunk(replay.micro_batches) for tensor in shares]
                yield from zip(*parts, strict=True)

    with patch.object(TrainLoader, "__iter__", batches):
        yield
