"""Time of a training step in this package, beside a plain PyTorch loop of the same model.

Both train the same network on one batch, with the same optimiser, precision and compilation, in
turn. The difference is what Lightning and this package add to a step: hooks, all callbacks of a
cell, the loss that must be finite, running means, the schedule. A second table has the parts of a
step that add most, from further rounds. Data are not read; `bench data` measures them.
"""

import argparse
import contextlib
import logging
import math
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from itertools import repeat
from pathlib import Path
from typing import Any, NamedTuple

import lightning as L
import torch
from lightning.fabric.utilities import move_data_to_device
from pydantic import ValidationError

from lit_attn.bench.measure import CLOCKS, TITLES, Setup, Spread, Table, summarize
from lit_attn.bench.step_parts import (
    BACKWARD,
    CLEARING,
    CLIPPING,
    FORWARD,
    UPDATE,
    Cause,
    PartTimer,
    list_causes,
)
from lit_attn.config.cell import Cell
from lit_attn.config.source import load
from lit_attn.schema.errors import explain
from lit_attn.tasks.tf32 import products_in_tf32
from lit_attn.temporary import temporary_folder
from lit_attn.training.build import build
from lit_attn.training.fit import Attempt
from lit_attn.training.process_group import ProcessGroup

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
    """Callback that reads the clock at the end of the warm-up, and of the last step.

    `timer` forgets the warm-up.
    """

    def __init__(
        self, read: Callable[[], float], warm_up: int, last: int, timer: PartTimer | None
    ) -> None:
        self.read = read
        self.warm_up = warm_up
        self.last = last
        self.timer = timer
        self.batches = 0
        self.start = 0.0
        self.end = 0.0

    def on_train_batch_end(self, *arguments: Any) -> None:
        self.batches += 1
        if self.batches == self.warm_up:
            self.start = self.read()
            if self.timer is not None:
                self.timer.forget()
        if self.batches == self.last:
            self.end = self.read()
            if self.timer is not None:
                self.timer.finish()


def make_training_tables(options: argparse.Namespace, setup: Setup) -> Iterator[Table]:
    """Yield the table of all experiments, and that of the largest causes."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    rows = []
    causes = []
    for path in options.experiments:
        row, largest = measure(read_cell(path), path, options.steps, setup)
        rows.append(row)
        causes += largest
    for name, table in (("training", rows), ("training-causes", causes)):
        title = TITLES[name].format(options=options, setup=setup)
        yield f"{name}-{setup.device}", title, table


def read_cell(path: Path) -> Cell:
    """Return a cell of the experiment in the file `path`."""
    content = {"study": "bench", "variant": path.stem, "seed": 0, "experiment": load(path)}
    # Every experiment has this metric, whatever its task and its splits.
    content["metric"] = {"name": "train/loss"}
    try:
        return Cell.model_validate(content)
    except ValidationError as error:
        raise explain(error, str(path)) from error


def measure(cell: Cell, path: Path, steps: int, setup: Setup) -> tuple[Row, list[Cause]]:
    """Return the times of a step of `cell`, from rounds of both loops in turn, and its causes.

    The times come from rounds without a timer of parts, which costs time itself.
    """
    is_tf32 = cell.experiment.training.precision == "tf32"
    cells, loops, added, ratios = [], [], [], []
    parts_of_cells, parts_of_loops = [], []
    with products_in_tf32(is_tf32), temporary_folder() as folder, signals_kept():
        ours = CellLoop(cell, folder, steps, setup)
        plain = PlainLoop(cell, ours.batch, steps, setup)
        for _ in range(setup.rounds):
            cells.append(1e6 * ours.time())
            loops.append(1e6 * plain.time())
            added.append(cells[-1] - loops[-1])
            ratios.append(cells[-1] / loops[-1])
        for _ in range(setup.rounds):
            parts_of_cells.append(ours.time_parts())
            parts_of_loops.append(plain.time_parts())
    name = path.resolve().parent.name if path.stem == "experiment" else path.stem
    row = Row(name, summarize(cells), summarize(loops), summarize(added), summarize(ratios))
    return row, list_causes(name, parts_of_cells, parts_of_loops)


def lengthen(cell: Cell, steps: int) -> Cell:
    """Return `cell` with the steps of a round, and without checkpoints within them."""
    training = cell.experiment.training
    changes = {
        "max_steps": WARM_UP + steps,
        # An epoch has at least one step.
        "epochs": max(training.epochs, WARM_UP + steps),
        "stretch": 1.0,
        "checkpoint_every": math.inf,
    }
    longer = cell.experiment.model_copy(update={"training": training.model_copy(update=changes)})
    return cell.model_copy(update={"experiment": longer})


@contextlib.contextmanager
def signals_kept() -> Iterator[None]:
    """Restore the handler of SIGTERM afterwards, which a training replaces by its own."""
    handler = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, handler)


class CellLoop:
    """Training of a cell by Lightning's trainer, with its callbacks and records, on one batch."""

    def __init__(self, cell: Cell, folder: Path, steps: int, setup: Setup) -> None:
        device = torch.device(setup.device)
        self.steps = steps
        self.read = make_clock(setup)
        self.attempt = Attempt(lengthen(cell, steps), folder, ProcessGroup(0, 1, device), None)
        data = self.attempt.parts.data
        loaded = data.finish(data.batch(0))
        first = move_data_to_device(next(iter(loaded)), device)
        self.batch = data.on_after_batch_transfer(first, 0)

    def time(self) -> float:
        """Return the seconds of a step."""
        clock = self._train(None)
        return (clock.end - clock.start) / self.steps

    def time_parts(self) -> dict[str, float]:
        """Return the seconds of each part of a step."""
        timer = PartTimer(self.read)
        task = self.attempt.parts.task
        ends = [
            timer.time_method(task, "record_training", "running means of the epoch"),
            timer.time_method(task.late_losses, "check", "check that the loss is finite"),
        ]
        try:
            self._train(timer)
        finally:
            for end in ends:
                end()
        return {part: seconds / self.steps for part, seconds in timer.seconds.items()}

    def _train(self, timer: PartTimer | None) -> StepClock:
        """Train the steps of a round, and return the clock that was read in them."""
        batches = self.attempt.parts.data.accumulate
        last = (WARM_UP + self.steps) * batches
        clock = StepClock(self.read, WARM_UP * batches, last, timer)
        trainer = self.attempt.make_trainer([], [clock], timer)
        trainer.limit_val_batches = 0
        training = RepeatedBatch(self.batch, last)
        trainer.fit(self.attempt.parts.task, training, RepeatedBatch(self.batch, 0))
        return clock


class PlainLoop:
    """Training of the same network in a loop as PyTorch's tutorials write it."""

    def __init__(self, cell: Cell, batch: Any, steps: int, setup: Setup) -> None:
        self.training = cell.experiment.training
        self.optimizer = cell.experiment.optimizer
        self.device = torch.device(setup.device)
        self.parts = build(cell, self.device)
        self.batch = batch
        self.steps = steps
        self.read = make_clock(setup)

    def time(self) -> float:
        """Return the seconds of a step."""
        start, end = self._train(nullcontext, lambda: None)
        return (end - start) / self.steps

    def time_parts(self) -> dict[str, float]:
        """Return the seconds of each part of a step."""
        timer = PartTimer(self.read)
        self._train(timer.profile, timer.forget)
        return {part: seconds / self.steps for part, seconds in timer.seconds.items()}

    def _train(
        self, part: Callable[[str], AbstractContextManager[Any]], forget: Callable[[], None]
    ) -> tuple[float, float]:
        """Train the steps of a round; return the clock at the end of the warm-up and at the end.

        Each part of a step runs in a context of `part`, which `forget` makes forget the warm-up.
        """
        # The task with its network and the running means.
        task = self.parts.task.to(self.device)
        task.train()
        network = task.network
        optimizer = self.optimizer.build(network, fused=True)
        is_bf16 = self.training.precision == "bf16"
        autocast = torch.autocast(self.device.type, torch.bfloat16, enabled=is_bf16)
        micro_batches = self.parts.data.accumulate
        start = 0.0
        for step in range(WARM_UP + self.steps):
            if step == WARM_UP:
                start = self.read()
                forget()
            for _ in range(micro_batches):
                with part(FORWARD), autocast:
                    loss = task.loss(self.batch)
                with part(BACKWARD):
                    (loss / micro_batches).backward()
            if self.training.clip is not None:
                with part(CLIPPING):
                    torch.nn.utils.clip_grad_norm_(network.parameters(), self.training.clip)
            with part(UPDATE):
                optimizer.step()
            with part(CLEARING):
                optimizer.zero_grad()
        return start, self.read()


def make_clock(setup: Setup) -> Callable[[], float]:
    """Return the function that reads the clock, after the work of a GPU."""
    read = CLOCKS[setup.clock]
    if setup.device == "cpu":
        return read

    def read_after_work() -> float:
        torch.cuda.synchronize()
        return time.perf_counter()

    return read_after_work
