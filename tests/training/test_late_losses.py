"""A loss of a GPU is read when it has arrived, and nothing is saved or recorded before."""

import math
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from helpers.stopping import stop_at
from helpers.training_cells import digits_cell, folder_of
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lit_attn.cells.failure import Diverged
from lit_attn.cells.rows import read_metrics
from lit_attn.tasks import late_losses
from lit_attn.tasks.late_losses import LateLosses
from lit_attn.train import run_cell
from lit_attn.training.timing import HostClock


class Device:
    """Device that works behind the program: it passes a mark when `behind` later ones are made."""

    def __init__(self, behind: float) -> None:
        self.behind = behind
        self.marks = 0
        self.waited = -1

    def mark(self, *_: Any) -> "Mark":
        self.marks += 1
        return Mark(self, self.marks - 1)


class Mark(NamedTuple):
    """Mark in the work of a device."""

    device: Device
    number: int

    def query(self) -> bool:
        later = self.device.marks - 1 - self.number
        return self.number <= self.device.waited or later >= self.device.behind

    def synchronize(self) -> None:
        self.device.waited = max(self.device.waited, self.number)


def work_behind(monkeypatch: pytest.MonkeyPatch, behind: float) -> Device:
    """Let the CPU seem to be a device that works behind the program."""
    device = Device(behind)
    monkeypatch.setattr(late_losses, "mark_work", device.mark)
    monkeypatch.setattr(HostClock, "mark", device.mark)
    monkeypatch.setattr(HostClock, "has_passed", lambda clock, mark: mark.query())
    monkeypatch.setattr(HostClock, "wait", lambda clock, mark: mark.synchronize())
    monkeypatch.setattr(HostClock, "seconds", lambda clock, first, last: 1.0)
    return device


def diverging_cell(**training: Any) -> Any:
    """Return a cell whose loss is finite in its first step alone."""
    changes: dict[str, Any] = {"optimizer": {"lr": 1e30}, "schedule": {"warmup": 0}}
    return digits_cell(**changes, training=training)


def test_a_loss_that_has_not_arrived_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    work_behind(monkeypatch, 2)
    losses = LateLosses()
    losses.add(7, torch.tensor(torch.inf))
    losses.require_finite(waits=False)
    losses.add(8, torch.tensor(1.0))
    losses.require_finite(waits=False)
    losses.add(9, torch.tensor(1.0))
    with pytest.raises(Diverged, match=r"^loss is inf at step 7$"):
        losses.require_finite(waits=False)


def test_a_wait_reads_every_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    work_behind(monkeypatch, math.inf)
    losses = LateLosses()
    losses.add(0, torch.tensor(1.0))
    losses.add(1, torch.tensor(torch.nan))
    with pytest.raises(Diverged, match=r"^loss is nan at step 1$"):
        losses.require_finite(waits=True)


def test_a_cpu_checks_at_once() -> None:
    losses = LateLosses()
    losses.add(0, torch.tensor(torch.nan))
    with pytest.raises(Diverged, match="loss is nan at step 0"):
        losses.require_finite(waits=False)


@pytest.mark.slow
@pytest.mark.parametrize("behind", [3, math.inf])
def test_a_late_loss_names_its_step_and_nothing_of_it_is_recorded(
    behind: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    work_behind(monkeypatch, behind)
    folder = folder_of(diverging_cell(log_every=1), tmp_path)
    with pytest.raises(Diverged, match=r"loss is nan at step 1$"):
        run_cell(folder)
    assert not (folder / "result.json").exists()
    assert read_metrics(folder / "metrics.csv") == []
    events = EventAccumulator(str(folder))
    events.Reload()
    if "steps/loss" in events.Tags()["scalars"]:
        assert [event.step for event in events.Scalars("steps/loss")] == [1]


@pytest.mark.slow
def test_a_stopped_training_saves_no_state_after_a_loss_that_is_not_finite(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    work_behind(monkeypatch, math.inf)
    folder = folder_of(diverging_cell(), tmp_path)
    stop_at(monkeypatch, 3)
    with pytest.raises(Diverged, match=r"loss is nan at step 1$"):
        run_cell(folder)
    assert list(folder.rglob("*.ckpt")) == []
