"""Values of single steps in TensorBoard, and that nothing waits for the device to get them."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.finished_cells import train_cell
from helpers.training_cells import digits_cell, text_cell
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn

from lit_attn.cells.rows import read_metrics
from lit_attn.config.cell import Cell
from lit_attn.tasks.late_losses import LateLosses
from lit_attn.tasks.step_graph import measure_gradient_norm
from lit_attn.training.step_values import StepValuesCallback
from lit_attn.training.timing import DeviceClock


def run(cell: Cell, root: Path) -> tuple[Path, EventAccumulator]:
    """Train a cell and return its folder and its events."""
    folder = train_cell(cell, root)
    return folder, EventAccumulator(str(folder)).Reload()


@pytest.mark.parametrize("make", [digits_cell, text_cell], ids=["one batch", "two micro-batches"])
def test_every_step_has_its_loss_and_its_rate(make: Any, tmp_path: Path) -> None:
    """The losses of an epoch have its recorded mean, and a warm-up within an epoch is visible."""
    cell = make(training={"epochs": 2, "log_every": 1}, schedule={"warmup": 0.5})
    folder, events = run(cell, tmp_path)
    losses = [event.value for event in events.Scalars("steps/loss")]
    assert [event.step for event in events.Scalars("steps/loss")] == list(range(1, 9))
    means = [row.value for row in read_metrics(folder / "metrics.csv") if row.name == "train/loss"]
    for epoch, mean in enumerate(means):
        of_epoch = losses[4 * epoch : 4 * epoch + 4]
        assert sum(of_epoch) / 4 == pytest.approx(mean, rel=1e-5)
    rates = [event.value for event in events.Scalars("steps/lr")]
    rate = cell.experiment.schedule.rate(cell.experiment.optimizer.lr, 4, 2)
    assert rates == pytest.approx([rate(step) for step in range(8)])
    assert rates[0] < rates[1] > rates[7]


def test_every_quantity_is_written(tmp_path: Path) -> None:
    _, events = run(text_cell(training={"epochs": 2, "clip": 1e-3, "log_every": 1}), tmp_path)
    norms = [event.value for event in events.Scalars("steps/gradient-norm")]
    # The norms are those before clipping.
    assert min(norms) > 1e-2
    speeds = events.Scalars("steps/samples-per-second")
    # An evaluation lies before steps 1 and 5, or the start of the training.
    assert [event.step for event in speeds] == [2, 3, 4, 6, 7, 8]
    for samples, tokens in zip(speeds, events.Scalars("steps/tokens-per-second"), strict=True):
        assert tokens.value == pytest.approx(16 * samples.value, rel=1e-5)


@pytest.mark.parametrize(("every", "steps"), [(3, [3, 6]), (50, [4, 8])])
def test_steps_between_two_intervals_are_not_written(
    every: int, steps: list[int], tmp_path: Path
) -> None:
    """An epoch that is shorter than the interval has one recorded step."""
    _, events = run(digits_cell(training={"epochs": 2, "log_every": every}), tmp_path)
    for name in ("loss", "lr", "gradient-norm"):
        assert [event.step for event in events.Scalars(f"steps/{name}")] == steps


def test_the_interval_is_not_in_the_identity() -> None:
    assert digits_cell(training={"log_every": 1}).fingerprint == digits_cell().fingerprint


def test_the_norm_is_that_of_all_gradients_together() -> None:
    network = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1), nn.Linear(1, 1))
    assert measure_gradient_norm(network) is None
    network[:2](torch.ones(4, 2)).sum().backward()
    gradients = [p.grad.flatten() for p in network.parameters() if p.grad is not None]
    norm = measure_gradient_norm(network)
    assert norm is not None
    torch.testing.assert_close(norm, torch.cat(gradients).norm())


class LateDevice(DeviceClock):
    """Device that does a step three steps later than the host, which must not wait for it."""

    step = 0

    def mark(self) -> int:
        return self.step

    def has_passed(self, mark: int) -> bool:
        return self.step >= mark + 3

    def wait(self, mark: int) -> None:
        raise AssertionError("the training waited for the device")

    def seconds(self, first: int, last: int) -> float:
        return float(last - first)


def test_values_are_written_when_the_device_has_sent_them() -> None:
    written: list[tuple[str, int]] = []
    events = SimpleNamespace(add_scalar=lambda name, value, step: written.append((name, step)))
    clock = LateDevice()
    times = SimpleNamespace(wall_times=[])
    metrics: Any = SimpleNamespace(events=events)
    callback = StepValuesCallback(metrics, clock, times, 8, None, 1)  # type: ignore[arg-type]
    module: Any = SimpleNamespace(
        rate=lambda step: 1.0,
        logged_in_step={"mine": 2},
        late_losses=LateLosses(),
        step_graph=None,
    )
    for step in range(1, 6):
        clock.step = step
        trainer: Any = SimpleNamespace(
            global_step=step, is_global_zero=True, accumulate_grad_batches=1
        )
        callback.on_train_batch_end(trainer, module, {"loss": torch.ones(())}, None, step - 1)
    names = ("steps/loss", "steps/lr", "train/mine")
    assert written == [(name, step) for step in (1, 2) for name in names]
