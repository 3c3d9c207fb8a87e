"""Losses of training steps, which are read after a GPU has computed them, without a wait for it.

A GPU works behind the program, which would wait in each step for a number that it reads at once.
"""

import math
from collections import deque
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed

from lit_attn.cells.failure import Diverged


class LateLoss(NamedTuple):
    """Loss of a step, on its way from the device, which copies it before `mark`."""

    step: int
    value: Tensor
    mark: Any


class LateLosses:
    """Losses of training steps that nobody has read yet, in the order of their steps."""

    def __init__(self) -> None:
        self._unread: deque[LateLoss] = deque()

    def check(self, step: int, loss: Tensor) -> None:
        """Add the loss of a step, and raise Diverged if a loss that has arrived is not finite."""
        self.add(step, loss)
        # The update of one of several devices reaches all, and the checkpoint of the first one.
        self.require_finite(waits=distributed.is_initialized())

    def add(self, step: int, loss: Tensor) -> None:
        """Start to copy the loss of a step from its device."""
        value = copy_from_device(loss)
        self._unread.append(LateLoss(step, value, mark_work(loss.device)))

    def require_finite(self, *, waits: bool) -> None:
        """Raise Diverged if a loss that has arrived is not finite.

        With `waits`, all losses arrive first. A CPU has none that are on their way.
        """
        while self._unread:
            mark = self._unread[0].mark
            if mark is not None and waits:
                mark.synchronize()
            elif mark is not None and not mark.query():
                return
            loss = self._unread.popleft()
            number = loss.value.item()
            if not math.isfinite(number):
                raise Diverged(f"loss is {number} at step {loss.step}")


def mark_work(device: torch.device) -> Any:
    """Return an event behind all work that a GPU has been asked for so far, or None for a CPU."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event(enable_timing=False)
    event.record()
    return event


def copy_from_device(value: Tensor) -> Tensor:
    """Return a copy on the CPU, which has arrived once the device has done its work so far."""
    if value.device.type != "cuda":
        return value.detach().clone()
    copy = torch.empty(value.shape, dtype=value.dtype, pin_memory=True)
    return copy.copy_(value.detach(), non_blocking=True)
