"""Loss, gradient norm and throughput of single training steps, for TensorBoard.

The values of some steps (`training.log_every`) are copied from the device without waiting for it,
and they are written once the copies have arrived. metrics.csv has the means of epochs only.
"""

from collections import deque
from typing import Any, NamedTuple

import lightning as L
import torch
from torch import Tensor

from lit_attn.tasks.base import TaskModule
from lit_attn.tasks.late_losses import copy_from_device
from lit_attn.tasks.step_graph import measure_gradient_norm
from lit_attn.training.recording import MetricsFile
from lit_attn.training.timing import DeviceClock, StepTimer


class StepValues(NamedTuple):
    """Values of one step by tag, on their way from the device, which copies them before `mark`."""

    step: int
    values: dict[str, Tensor]
    mark: Any


class StepValuesCallback(L.Callback):
    """Callback that writes `steps/loss` and so on to the event file of the cell, on rank 0.

    `steps/loss` is the mean over the micro-batches of this rank, `steps/lr` the learning rate of
    the step, `steps/gradient-norm` the joint norm of all gradients before clipping, and
    `steps/samples-per-second` (with `steps/tokens-per-second` for data with tokens) the mean since
    the last recorded step, by the wall clock and without evaluations. `train/NAME` is a number that
    the training step of a user logs. One of `interval` steps is recorded. `steps` has the times of
    the training; its callback comes before this one. `batch_size` counts the samples of a step on
    all devices, `tokens` those of a sample.
    """

    def __init__(
        self,
        metrics: MetricsFile,
        clock: DeviceClock,
        steps: StepTimer,
        batch_size: int,
        tokens: int | None,
        interval: int,
    ) -> None:
        self.metrics = metrics
        self.clock = clock
        self.steps = steps
        self.batch_size = batch_size
        self.tokens = tokens
        self.interval = interval
        self._losses: list[Tensor] = []
        self._gradient_norm: Tensor | None = None
        self._timed_steps = 0
        self._unwritten: deque[StepValues] = deque()

    def on_before_optimizer_step(
        self, trainer: L.Trainer, module: L.LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        # `global_step` counts the steps before this one.
        if (trainer.global_step + 1) % self.interval == 0:
            norm = measure_gradient_norm(module)
            scaler = getattr(trainer.precision_plugin, "scaler", None)
            if scaler is not None and norm is not None and is_scaled(optimizer):
                norm = norm / scaler.get_scale()
            self._gradient_norm = norm

    def on_train_batch_end(
        self, trainer: L.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if not trainer.is_global_zero:
            return
        is_step_end = (batch_idx + 1) % trainer.accumulate_grad_batches == 0
        step = trainer.global_step if is_step_end else trainer.global_step + 1
        if step % self.interval == 0:
            # Lightning has divided the loss of each micro-batch by their number.
            self._losses.append(outputs["loss"].detach())
            if module.step_graph is not None:
                # Recorded steps have no hook before the update.
                self._gradient_norm = module.step_graph.gradient_norm
            if is_step_end:
                self._record(step, module)
        self._write_arrived(module)

    def on_train_end(self, trainer: L.Trainer, module: Any) -> None:
        for values in self._unwritten:
            self.clock.wait(values.mark)
        self._write_arrived(module)

    def _record(self, step: int, module: TaskModule) -> None:
        """Start to copy the values of `step` from the device."""
        values = {
            "steps/loss": torch.stack(self._losses).sum(),
            # The schedule counts the steps before this one.
            "steps/lr": torch.tensor(module.rate(step - 1)),
        }
        if self._gradient_norm is not None:
            values["steps/gradient-norm"] = self._gradient_norm
        self._losses = []
        self._gradient_norm = None
        times = self.steps.wall_times[self._timed_steps :]
        self._timed_steps += len(times)
        if times:
            speed = self.batch_size * len(times) / sum(times)
            values["steps/samples-per-second"] = torch.tensor(speed)
            if self.tokens is not None:
                values["steps/tokens-per-second"] = torch.tensor(speed * self.tokens)
        for name, value in module.logged_in_step.items():
            values[f"train/{name}"] = torch.as_tensor(value)
        copies = {tag: copy_from_device(value) for tag, value in values.items()}
        self._unwritten.append(StepValues(step, copies, self.clock.mark()))

    def _write_arrived(self, module: TaskModule) -> None:
        """Write the values whose copies have arrived, in the order of their steps.

        Raises Diverged before the values of a step whose loss is not finite.
        """
        while self._unwritten and self.clock.has_passed(self._unwritten[0].mark):
            # The loss of this step has arrived before its values.
            module.late_losses.require_finite(waits=False)
            arrived = self._unwritten.popleft()
            for tag, value in arrived.values.items():
                self.metrics.events.add_scalar(tag, value.item(), arrived.step)


def is_scaled(optimizer: torch.optim.Optimizer) -> bool:
    """Return True if gradients still have the loss scale of fp16 before the optimiser's step.

    A fused optimiser removes the scale itself; for the others it is removed before.
    """
    return getattr(optimizer, "_step_supports_amp_scaling", False)
