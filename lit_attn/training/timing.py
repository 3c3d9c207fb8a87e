"""Times of training steps and evaluations on a device that works asynchronously.

A GPU runs its kernels after the call that starts them has returned. So the time of a step is
measured by two events in the stream of the device, which are read later, without waiting. The host
may meanwhile prepare the next batch: the time of a step has no waiting for data in it, and the
whole backward pass. The wall time of a step, data included, is measured beside it.
"""

import statistics
import time
from abc import ABC, abstractmethod
from collections import deque
from typing import Any, NamedTuple

import torch

from lit_attn.cells.records import Spread

WARM_UP_STEPS = 5
"""First steps of a run, which allocate, compile and tune. They are not in the reported times."""
RECENT_STEPS = 100
"""Number of last steps whose median time is reported while a cell trains."""


class DeviceClock(ABC):
    """Marks in the work of a device, and the seconds between them."""

    def now(self) -> float:
        """Return the time of the host in seconds."""
        return time.perf_counter()

    @abstractmethod
    def mark(self) -> Any:
        """Return a mark behind all work that the device has been asked for so far."""

    @abstractmethod
    def has_passed(self, mark: Any) -> bool:
        """Return True if the device has done all work before `mark`."""

    @abstractmethod
    def wait(self, mark: Any) -> None:
        """Wait until the device has done all work before `mark`."""

    @abstractmethod
    def seconds(self, first: Any, last: Any) -> float:
        """Return the seconds between two marks that the device has passed."""


class HostClock(DeviceClock):
    """Clock of a device that has finished when a call returns: a CPU."""

    def mark(self) -> float:
        return self.now()

    def has_passed(self, mark: float) -> bool:
        return True

    def wait(self, mark: float) -> None:
        pass

    def seconds(self, first: float, last: float) -> float:
        return last - first


class EventClock(DeviceClock):
    """Clock of a CUDA device: events in its current stream."""

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def has_passed(self, mark: torch.cuda.Event) -> bool:
        return mark.query()

    def wait(self, mark: torch.cuda.Event) -> None:
        mark.synchronize()

    def seconds(self, first: torch.cuda.Event, last: torch.cuda.Event) -> float:
        return first.elapsed_time(last) / 1000


def make_clock(device: torch.device) -> DeviceClock:
    """Return the clock of `device`."""
    return EventClock() if device.type == "cuda" else HostClock()


class Span(NamedTuple):
    """Two marks of a DeviceClock around some work."""

    first: Any
    last: Any


class StepTimer:
    """Times of the steps of a training, on the device and by the wall clock, in seconds.

    A step may have several micro-batches (gradient accumulation). Its time on the device is the sum
    of theirs, so that it contains no waiting for the data of the second one.
    """

    def __init__(self, clock: DeviceClock) -> None:
        self.clock = clock
        self.device_times: list[float] = []
        self.wall_times: list[float] = []
        self._begun: Any = None
        self._spans: list[Span] = []
        self._unread: deque[list[Span]] = deque()
        self._previous_end: float | None = None

    def begin_batch(self) -> None:
        """Mark the start of the work on a micro-batch, which is on the device already."""
        self._begun = self.clock.mark()

    def end_batch(self) -> None:
        """Mark the end of the work on a micro-batch."""
        self._spans.append(Span(self._begun, self.clock.mark()))

    def end_step(self) -> None:
        """End a step after its last micro-batch, and read the times of finished steps."""
        now = self.clock.now()
        if self._previous_end is not None:
            self.wall_times.append(now - self._previous_end)
        self._previous_end = now
        self._unread.append(self._spans)
        self._spans = []
        while self._unread and self.clock.has_passed(self._unread[0][-1].last):
            self._read_oldest()

    def interrupt(self) -> None:
        """Leave the time until the next step out of the wall times: an evaluation comes between."""
        self._previous_end = None

    def finish(self) -> None:
        """Wait for the device, and read the times of all steps."""
        while self._unread:
            self.clock.wait(self._unread[0][-1].last)
            self._read_oldest()

    @property
    def device_time(self) -> Spread:
        """Spread of the times on the device after the warm-up. Waits for the device."""
        self.finish()
        return make_spread(self.device_times[WARM_UP_STEPS:] or self.device_times)

    @property
    def wall_time(self) -> Spread | None:
        """Spread of the wall times after the warm-up; None if no two steps followed each other."""
        times = self.wall_times[WARM_UP_STEPS:] or self.wall_times
        return make_spread(times) if times else None

    def recent_wall_time(self) -> float | None:
        """Return the median wall time of the last steps; None before the second step."""
        times = self.wall_times[-RECENT_STEPS:]
        return statistics.median(times) if times else None

    def _read_oldest(self) -> None:
        """Read the time of the oldest step, which the device has finished."""
        spans = self._unread.popleft()
        self.device_times.append(sum(self.clock.seconds(*span) for span in spans))


def make_spread(seconds: list[float]) -> Spread:
    """Return the median and the interquartile range of measured times."""
    if not seconds:
        return Spread(median=0.0, iqr=0.0, count=0)
    if len(seconds) == 1:
        return Spread(median=seconds[0], iqr=0.0, count=1)
    low, median, high = statistics.quantiles(seconds, n=4)
    return Spread(median=median, iqr=high - low, count=len(seconds))
