"""Whole trainings of a small cell on data of a package: two ranks, a resume, the same seed twice.

Every training is `lit-attn train` in a process of its own, as the runner starts it.
"""

import math
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch

from lit_attn.cells.records import Result
from lit_attn.cells.rows import read_metrics
from lit_attn.config.cell import Cell

LIMIT = 600.0
"""Seconds after which a training counts as failed."""

POLL = 0.02  # Seconds between two looks at the progress of a training.

PREEMPTED = 143  # Exit code of a cell that has saved its state after SIGTERM.

LARGEST_DIFFERENCE = 1e-3
"""Largest relative difference of a loss where sums may be added in another order."""


class TrainingCheck(NamedTuple):
    """Comparison of two trainings: `difference` is the largest relative one of all losses."""

    name: str
    difference: float
    limit: float
    failure: str = ""
    not_checked: str = ""

    @property
    def problem(self) -> str:
        """Why the comparison fails, or an empty text."""
        if self.not_checked:
            return ""
        if self.failure:
            return f"{self.name}: {self.failure}"
        # A comparison with NaN is false.
        if not self.difference <= self.limit:
            return f"{self.name}: losses differ by {self.difference:.2g} (limit {self.limit:.2g})"
        return ""

    def describe(self) -> str:
        """Return one line about the comparison."""
        if self.not_checked:
            return f"{self.name}: not checked, {self.not_checked}"
        if self.problem:
            return f"FAILED {self.problem}"
        if self.difference == 0:
            return f"{self.name}: equal, bit by bit"
        return f"{self.name}: losses differ by {self.difference:.2g} (limit {self.limit:.2g})"


def check_trainings(folder: Path, device: torch.device) -> list[TrainingCheck]:
    """Return the comparisons; the cells are trained in `folder`."""
    # Sums of a GPU may be added in another order each time.
    repeat_limit = 0.0 if device.type == "cpu" else LARGEST_DIFFERENCE
    first = train(folder / "first", make_cell(device))
    resumed = train(folder / "resumed", make_cell(device), is_interrupted=True)
    again = train(folder / "again", make_cell(device))
    return [
        _check_two_ranks(folder, device),
        compare("resumed training against an uninterrupted one", resumed, first, repeat_limit),
        compare("same seed twice", again, first, repeat_limit),
    ]


def _check_two_ranks(folder: Path, device: torch.device) -> TrainingCheck:
    """Return the comparison of two ranks with one."""
    name = "two ranks against one"
    if device.type == "cuda" and torch.cuda.device_count() < 2:
        return TrainingCheck(name, 0.0, LARGEST_DIFFERENCE, not_checked="there is one GPU")
    # Every rank draws its own dropout, so there is none.
    one = train(folder / "one-rank", make_cell(device, dropout=0.0))
    two = train(folder / "two-ranks", make_cell(device, devices=2, dropout=0.0))
    return compare(name, two, one, LARGEST_DIFFERENCE)


def make_cell(device: torch.device, devices: int = 1, dropout: float = 0.1) -> Cell:
    """Return a cell that trains for a few seconds on the digits that come with scikit-learn."""
    experiment: dict[str, Any] = {
        "data": {"kind": "digits", "batch_size": 64, "augment": ["normalize"]},
        "model": {
            "kind": "vit",
            "dim": 32,
            "depth": 2,
            "heads": 2,
            "patch": 2,
            "ffn": {"width": 32},
            "attention": "belief2",
            "dropout": dropout,
        },
        "optimizer": {"kind": "adamw", "lr": 1e-3},
        "schedule": {"kind": "cosine", "warmup": 1},
        "training": {"epochs": 4, "accelerator": device.type, "devices": devices},
    }
    return Cell.model_validate(
        {"study": "doctor", "variant": "belief2", "seed": 0, "experiment": experiment}
    )


class Trained(NamedTuple):
    """Losses of a training by their name, or why there are none."""

    losses: dict[str, float]
    failure: str = ""
    not_checked: str = ""


def train(folder: Path, cell: Cell, is_interrupted: bool = False) -> Trained:
    """Train a cell; with `is_interrupted` stop it after its first epoch, and continue it."""
    folder.mkdir(parents=True)
    cell.write(folder / "config.yaml")
    if is_interrupted:
        code, output = _run(folder, stop_after=folder / "metrics.csv")
        if code == 0:
            return Trained({}, not_checked="it ended before it could be interrupted")
        if code != PREEMPTED:
            return Trained({}, failure=_last_line(code, output))
    code, output = _run(folder)
    if code:
        return Trained({}, failure=_last_line(code, output))
    result = Result.read_valid(folder / "result.json")
    if result is None:
        return Trained({}, failure="the training ended without a result")
    losses = {name: value for name, value in result.metrics.items() if name.endswith("/loss")}
    return Trained(losses)


def _run(folder: Path, stop_after: Path | None = None) -> tuple[int, str]:
    """Return exit code and output of `lit-attn train`; send SIGTERM once `stop_after` has rows."""
    command = [sys.executable, "-m", "lit_attn.train", str(folder)]
    log = folder / "doctor.log"
    deadline = time.monotonic() + LIMIT
    with log.open("ab") as stream:
        process = subprocess.Popen(command, stdout=stream, stderr=subprocess.STDOUT)
        try:
            while process.poll() is None and time.monotonic() < deadline:
                if stop_after is not None and read_metrics(stop_after):
                    process.send_signal(signal.SIGTERM)
                    stop_after = None
                time.sleep(POLL)
        finally:
            if process.poll() is None:
                process.kill()
            process.wait()
    return process.returncode, log.read_text("utf-8", errors="replace")


def _last_line(code: int, output: str) -> str:
    """Return the last line of a failed training."""
    lines = output.strip().splitlines() or ["no output"]
    return f"a training failed with exit code {code}: {lines[-1]}"


def compare(name: str, one: Trained, other: Trained, limit: float) -> TrainingCheck:
    """Return the comparison of the losses of two trainings."""
    failure = one.failure or other.failure
    not_checked = one.not_checked or other.not_checked
    if failure or not_checked:
        return TrainingCheck(name, 0.0, limit, failure, not_checked)
    differences = [0.0]
    for key, loss in one.losses.items():
        difference = abs(loss - other.losses[key]) / abs(other.losses[key])
        differences.append(math.inf if math.isnan(difference) else difference)
    return TrainingCheck(name, max(differences), limit)
