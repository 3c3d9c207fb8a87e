"""Time of a training step in this package, beside a plain PyTorch loop of the same model.

Both train the same network on one batch, with the same optimiser, precision and compilation, in
turn. The difference is what Lightning and this package add to a step: hooks, the loss that must be
finite, running means, the schedule. Data are not read; `bench data` measures them.
"""

import argparse
import logging
import time
from collections.abc import Callable, Iterator
from itertools import repeat
from pathlib import Path
from typing import Any, NamedTuple

import lightning as L
import torch
from lightning.fabric.utilities import move_data_to_device
from pydantic import ValidationError

from lit_attn.bench.measure import CLOCKS, TITLES, Setup, Spread, Table, summarize
from lit_attn.config.cell import Cell
from lit_attn.config.source import load
from lit_attn.schema.errors import explain
from lit_attn.tasks.tf32 import products_in_tf32
from lit_attn.temporary import temporary_folder
from lit_attn.training.build import Parts, build
from lit_attn.training.process_group import ProcessGroup
from lit_attn.training.trainer import make_trainer

WARM_UP = 5
"""Steps of a round that are not measured."""


class Row(NamedTuple):
    """Microseconds of a step of one experiment, in this package and in a plain loop."""

    experiment: str
    step: Spread
    plain: Spread
    added: Spread
    ratio: Spread


class RepeatedBatch:
    """Loader that gives one batch several times."""

    def __init__(self, batch: Any, batches: int) -> None:
        self.batch = batch
        self.batches = batches

    def __len__(self) -> int:
        return self.batches

    def __iter__(self) -> Iterator[Any]:
        return repeat(self.batch, self.batches)


class StepClock(L.Callback):
    """Callback that reads the clock at the end of the warm-up, and of the last step."""

    def __init__(self, read: Callable[[], float], warm_up: int) -> None:
        self.read = read
        self.warm_up = warm_up
        self.batches = 0
        self.start = 0.0
        self.end = 0.0

    def on_train_batch_end(self, *arguments: Any) -> None:
        self.batches += 1
        if self.batches == self.warm_up:
            self.start = self.read()
        self.end = self.read()


def make_training_tables(options: argparse.Namespace, setup: Setup) -> Iterator[Table]:
    """Yield the table of all experiments."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    rows = [measure(read_cell(path), path, options.steps, setup) for path in options.experiments]
    title = TITLES["training"].format(options=options, setup=setup)
    yield f"training-{setup.device}", title, rows


def read_cell(path: Path) -> Cell:
    """Return a cell of the experiment in the file `path`."""
    content = {"study": "bench", "variant": path.stem, "seed": 0, "experiment": load(path)}
    try:
        return Cell.model_validate(content)
    except ValidationError as error:
        raise explain(error, str(path)) from error


def measure(cell: Cell, path: Path, steps: int, setup: Setup) -> Row:
    """Return the times of a step of `cell`, from rounds of both loops in turn."""
    device = torch.device(setup.device)
    is_tf32 = cell.experiment.training.precision == "tf32"
    cells, loops, added, ratios = [], [], [], []
    with products_in_tf32(is_tf32):
        ours = build(cell, device)
        plain = build(cell, device)
        read = next(iter(ours.data.finish(ours.data.batch(0))))
        batch = ours.data.on_after_batch_transfer(move_data_to_device(read, device), 0)
        for _ in range(setup.rounds):
            cells.append(1e6 * time_cell(cell, ours, batch, steps, setup))
            loops.append(1e6 * time_plain_loop(cell, plain, batch, steps, setup))
            added.append(cells[-1] - loops[-1])
            ratios.append(cells[-1] / loops[-1])
    name = path.resolve().parent.name if path.stem == "experiment" else path.stem
    return Row(name, summarize(cells), summarize(loops), summarize(added), summarize(ratios))


def time_cell(cell: Cell, parts: Parts, batch: Any, steps: int, setup: Setup) -> float:
    """Return the seconds of a training step by Lightning's trainer, as a cell makes it."""
    micro_batches = parts.data.accumulate
    read = make_clock(setup)
    clock = StepClock(read, WARM_UP * micro_batches)
    with temporary_folder() as folder:
        trainer = make_trainer(
            cell.experiment.training,
            parts.task,
            ProcessGroup(0, 1, torch.device(setup.device)),
            folder,
            steps=WARM_UP + steps,
            epochs=1,
            micro_batches=micro_batches,
            callbacks=[clock],
        )
        trainer.limit_val_batches = 0
        training = RepeatedBatch(batch, (WARM_UP + steps) * micro_batches)
        trainer.fit(parts.task, training, RepeatedBatch(batch, 0))
    return (clock.end - clock.start) / steps


def time_plain_loop(cell: Cell, parts: Parts, batch: Any, steps: int, setup: Setup) -> float:
    """Return the seconds of a training step in a loop as PyTorch's tutorials write it."""
    training = cell.experiment.training
    device = torch.device(setup.device)
    task = parts.task
    task.train()
    network = task.network.to(device)
    optimizer = cell.experiment.optimizer.build(network, fused=True)
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=training.precision == "bf16")
    read = make_clock(setup)
    start = 0.0
    for step in range(WARM_UP + steps):
        if step == WARM_UP:
            start = read()
        for _ in range(parts.data.accumulate):
            with autocast:
                loss = task.loss(batch)
            (loss / parts.data.accumulate).backward()
        if training.clip is not None:
            torch.nn.utils.clip_grad_norm_(network.parameters(), training.clip)
        optimizer.step()
        optimizer.zero_grad()
    return (read() - start) / steps


def make_clock(setup: Setup) -> Callable[[], float]:
    """Return the function that reads the clock, after the work of a GPU."""
    read = CLOCKS[setup.clock]
    if setup.device == "cpu":
        return read

    def read_after_work() -> float:
        torch.cuda.synchronize()
        return time.perf_counter()

    return read_after_work
