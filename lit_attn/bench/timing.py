"""Interleaved timing of several candidates, so that other programs slow all of them equally."""

import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import torch

# Clocks of a CPU: elapsed time, or the CPU time of this process. CPU time leaves out other programs
# and adds up the threads.
CLOCKS: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "cpu": time.process_time}


class Spread(NamedTuple):
    """Median of several measurements and their interquartile range."""

    median: float
    iqr: float


def interleaved(
    candidates: Mapping[str, Callable[[], object]], rounds: int, device: str, clock: str = "wall"
) -> dict[str, list[float]]:
    """Return the seconds of each candidate in each round; a round runs every candidate once.

    Two rounds of warm-up are not counted. On a GPU the time between two CUDA events is measured,
    and `clock` has no effect.
    """
    seconds: dict[str, list[float]] = {name: [] for name in candidates}
    for round_ in range(rounds + 2):
        for name, call in candidates.items():
            elapsed = once(call, device, clock)
            if round_ >= 2:
                seconds[name].append(elapsed)
    return seconds


def spread(values: Iterable[float]) -> Spread:
    """Return median and interquartile range of at least two values."""
    numbers = list(values)
    low, _, high = statistics.quantiles(numbers, n=4)
    return Spread(statistics.median(numbers), high - low)


def ratios(numerators: Iterable[float], denominators: Iterable[float]) -> Spread:
    """Return the spread of the ratios within each round, where common slowdowns cancel."""
    return spread(a / b for a, b in zip(numerators, denominators, strict=True))


def once(call: Callable[[], object], device: str, clock: str = "wall") -> float:
    """Return the seconds of one call."""
    if device == "cuda":
        begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        begun.record()
        call()
        ended.record()
        torch.cuda.synchronize()
        return begun.elapsed_time(ended) / 1e3
    now = CLOCKS[clock]
    start = now()
    call()
    return now() - start
