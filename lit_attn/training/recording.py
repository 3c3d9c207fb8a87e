"""Output of a training cell: metric rows, progress, and printed lines."""

import json
import os
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.loggers.logger import Logger, rank_zero_experiment
from lightning.pytorch.utilities import rank_zero_only
from torch.utils.tensorboard import SummaryWriter

from lit_attn.cells.records import Spread
from lit_attn.cells.rows import MetricRow, csv_lines, read_clock, read_metrics
from lit_attn.files import append, write_atomic
from lit_attn.private_names.of_tensorboard import events_path, rename_events
from lit_attn.training.timing import DeviceClock, StepTimer, make_spread

BAR_WIDTH = 24  # Characters of the progress bar on a terminal.
CLEAR_LINE = "\r\x1b[K"  # Go to the start of the terminal's line and clear it.


class MetricsFile(Logger):
    """Logger with the records of a cell: `metrics.csv`, and TensorBoard's event file.

    The cell appends its values to `metrics.csv` as step,epoch,name,value with `write_rows`, which
    calls fsync. Everything that Lightning, a callback or a user logs goes to the event file. The
    times stand in `clock.csv`, because a cell that was stopped has the same `metrics.csv` as one
    that was not. Lightning's CSVLogger rewrites its file when a new name appears and deletes it on
    a second run. `elapsed` returns the seconds of all attempts; `console` gets the rows too.
    """

    def __init__(
        self, path: Path, elapsed: Callable[[], float], console: "Console | None" = None
    ) -> None:
        super().__init__()
        self.path = path
        self.clock = path.with_name("clock.csv")
        self.elapsed = elapsed
        self.console = console

    # Lightning asks every logger for these, and uses them for loggers with folders only.
    name, version = "metrics", 0

    def start(self, step: int) -> None:
        """Start the file, or keep its rows up to the checkpoint at `step` that training resumes."""
        rows: list[MetricRow] = []
        times: list[tuple[int, float]] = []
        if step > 0:
            rows = [row for row in read_metrics(self.path) if row.step <= step]
            times = [row for row in read_clock(self.clock).items() if row[0] <= step]
        write_atomic(self.path, csv_lines([MetricRow._fields, *rows]))
        write_atomic(self.clock, csv_lines([("step", "seconds"), *times]))
        # `purge_step` makes TensorBoard drop what a stopped attempt wrote after its checkpoint.
        self.events = SummaryWriter(self.path.parent, purge_step=step + 1)
        _remove_host_name(self.events)

    @property
    def save_dir(self) -> str:
        """Folder of the cell, in which callbacks write their files."""
        return str(self.path.parent)

    @property
    @rank_zero_experiment
    def experiment(self) -> SummaryWriter:
        """TensorBoard's writer on rank 0; on other ranks an object whose methods do nothing."""
        return self.events

    def log_hyperparams(self, *_: Any, **__: Any) -> None:
        """Do nothing: the cell's config.yaml holds the hyperparameters."""

    @rank_zero_only
    def finalize(self, status: str) -> None:
        self.events.flush()

    @rank_zero_only
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        """Write values to the event file."""
        for name, value in sorted(metrics.items()):
            if name != "epoch":
                self.events.add_scalar(name, value, step or 0)

    @rank_zero_only
    def write_rows(self, values: dict[str, float], step: int, epoch: int) -> None:
        """Append the cell's own values to metrics.csv, and show them on the console."""
        rows = [MetricRow(step, epoch, name, float(values[name])) for name in sorted(values)]
        append(self.path, csv_lines(rows))
        append(self.clock, csv_lines([(step, round(self.elapsed(), 3))]))
        if self.console is not None:
            self.console.add(values, step, epoch + 1)


def _remove_host_name(events: SummaryWriter) -> None:
    """Rename the file of an event writer, whose name contains the name of this machine."""
    events.flush()
    path = events_path(events)
    # events.out.tfevents.TIME.HOST.PID.NUMBER, where HOST may contain dots.
    words = path.name.split(".")
    words[4:-2] = ["cell"]
    rename_events(events, path.with_name(".".join(words)))


def flatten_settings(settings: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested settings by path, such as `model/attention/zz`, with values for HPARAMS.

    TensorBoard's HPARAMS tab takes numbers and texts. A list of mappings has paths of its items.
    """
    flat: dict[str, Any] = {}
    for key, value in settings.items():
        path = f"{prefix}{key}"
        if isinstance(value, list) and all(isinstance(item, dict) for item in value):
            value = dict(enumerate(value))
        if isinstance(value, dict):
            flat |= flatten_settings(value, f"{path}/")
        elif isinstance(value, bool | int | float | str):
            flat[path] = value
        else:
            flat[path] = str(value)
    return flat


class Console:
    """Printed losses and metric of each epoch, and a progress bar if stdout is a terminal."""

    def __init__(self, total_steps: int, total_epochs: int, metric: str) -> None:
        self.total_steps = total_steps
        self.total_epochs = total_epochs
        self.metric = metric
        self.started = time.monotonic()
        self.step = 0
        self.epoch = 0
        self.values: dict[str, float] = {}

    def add(self, metrics: dict[str, float], step: int, epoch: int) -> None:
        """Collect the values of an epoch, and print them after its last one, the training loss.

        The last step may be evaluated after that: the caller prints its line.
        """
        self.step = step
        self.epoch = epoch
        for name, value in metrics.items():
            if name == self.metric or name.endswith("/loss"):
                self.values[name] = value
        if "train/loss" in metrics and self.step < self.total_steps:
            self.print_line()

    def print_line(self) -> None:
        """Print the collected values, if there are any."""
        if not self.values:
            return
        parts = [f"epoch {self.epoch}/{self.total_epochs}", f"step {self.step}/{self.total_steps}"]
        for name, value in self.values.items():
            parts.append(f"{name} {value:.4g}")
        parts.append(f"{time.monotonic() - self.started:.1f} s")
        if sys.stdout.isatty():
            print(CLEAR_LINE, end="")
        print("  ".join(parts), flush=True)
        self.values.clear()

    def draw_bar(self, step: int, step_time: float | None) -> None:
        """Draw the progress bar over the last line of the terminal; `step_time` is in seconds."""
        if not sys.stdout.isatty():
            return
        done = BAR_WIDTH * step // self.total_steps
        bar = "#" * done + "-" * (BAR_WIDTH - done)
        text = f"[{bar}] step {step}/{self.total_steps}"
        if step_time is not None:
            text += f", {step_time * 1e3:.4g} ms each"
        print(CLEAR_LINE + text, end="", flush=True)


class Progress(L.Callback):
    """Callback that times steps and evaluations, and writes `progress.json` once a second.

    The file has "step", "total" and "step_time" (seconds by the wall clock, median of the last
    steps, absent before the second step). It is written during evaluations too: the runner kills a
    cell whose file stops changing (`--stall`). The time of an evaluation covers all splits and the
    reading of their data.
    """

    def __init__(self, path: Path, total: int, console: Console, clock: DeviceClock) -> None:
        self.path = path
        self.total = total
        self.console = console
        self.clock = clock
        self.steps = StepTimer(clock)
        self.pid = os.getpid()
        self.evaluation_times: list[float] = []
        self.evaluation_start: Any = None
        self.written = 0.0

    def on_train_batch_start(
        self, trainer: L.Trainer, module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self.steps.begin_batch()

    def on_train_batch_end(
        self, trainer: L.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.steps.end_batch()
        if (batch_idx + 1) % trainer.accumulate_grad_batches == 0:
            self.steps.end_step()
            self._write(trainer)

    def on_validation_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        self._write(trainer)

    def on_validation_start(self, *_: Any) -> None:
        # The mark stands behind the work of the last training step, which may still run.
        self.evaluation_start = self.clock.mark()

    def on_validation_end(self, *_: Any) -> None:
        end = self.clock.mark()
        # The metrics were read from the device before this, so the wait is short.
        self.clock.wait(end)
        self.evaluation_times.append(self.clock.seconds(self.evaluation_start, end))
        self.steps.interrupt()

    @property
    def evaluation_time(self) -> Spread | None:
        """Spread of the evaluation times after the first; None without any evaluation."""
        times = self.evaluation_times
        return make_spread(times[1:] or times) if times else None

    def _write(self, trainer: L.Trainer) -> None:
        """Write the file and draw the bar: once a second, and after the last step."""
        if os.getpid() != self.pid:
            # The cell's own code has forked. Two processes must not write the records of one cell.
            os._exit(1)
        if not trainer.is_global_zero:
            return
        now = time.perf_counter()
        step = trainer.global_step
        if now - self.written < 1 and step < self.total:
            return
        self.written = now
        step_time = self.steps.recent_wall_time()
        progress = {"step": step, "total": self.total, "step_time": step_time}
        # Without fsync: only the display reads this file.
        write_atomic(self.path, json.dumps(progress) + "\n", fsync=False)
        self.console.draw_bar(step, step_time)


def measure_memory(device: torch.device) -> int:
    """Return the most bytes of tensors on a GPU, or the process's largest resident set."""
    if device.type != "cuda":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return torch.cuda.max_memory_allocated(device)
