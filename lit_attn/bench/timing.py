"""Timing candidates side by side: interleaved, so that clock drift and neighbours hit all alike."""

import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import torch

# What a CPU's seconds are: those that pass, or those that this process computes for. The second
# leaves out what other programs on the machine take; it adds up the threads.
CLOCKS: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "cpu": time.process_time}


class Spread(NamedTuple):
    """The middle of several measurements, and their interquartile range."""

    median: float
    iqr: float


def interleaved(
    candidates: Mapping[str, Callable[[], object]], rounds: int, device: str, clock: str = "wall"
) -> dict[str, list[float]]:
    """Seconds of each candidate in each round; a round runs every candidate once, in turn.

    Two rounds of warm-up are not counted. On a GPU the seconds are those between two events on its
    own stream, whatever `clock` says.
    """
    seconds: dict[str, list[float]] = {name: [] for name in candidates}
    for round_ in range(rounds + 2):
        for name, call in candidates.items():
            elapsed = once(call, device, clock)
            if round_ >= 2:
                seconds[name].append(elapsed)
    return seconds


def spread(values: Iterable[float]) -> Spread:
    """Median and interquartile range of at least two values."""
    found = list(values)
    low, _, high = statistics.quantiles(found, n=4)
    return Spread(statistics.median(found), high - low)


def ratios(own: Iterable[float], other: Iterable[float]) -> Spread:
    """own / other within each round: what hits both of a round alike cancels."""
    return spread(a / b for a, b in zip(own, other, strict=True))


def once(call: Callable[[], object], device: str, clock: str = "wall") -> float:
    """Seconds of one call."""
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
