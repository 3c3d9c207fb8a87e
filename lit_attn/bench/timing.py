"""Timing candidates side by side: interleaved, so that clock drift and neighbours hit all alike."""

import statistics
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch


class Timing(NamedTuple):
    """Seconds of one call, and the ratio to the baseline within the same round."""

    median: float
    iqr: float
    ratio: float
    ratio_iqr: float


def interleaved(
    candidates: Mapping[str, Callable[[], object]], baseline: str, rounds: int, device: str
) -> dict[str, Timing]:
    """Time each candidate once per round, in turn; two rounds of warm-up are not counted.

    The ratio is the median over rounds of (candidate / baseline in that round).
    """
    seconds: dict[str, list[float]] = {name: [] for name in candidates}
    for round_ in range(rounds + 2):
        for name, call in candidates.items():
            elapsed = _once(call, device)
            if round_ >= 2:
                seconds[name].append(elapsed)
    timings = {}
    for name, own in seconds.items():
        ratios = [a / b for a, b in zip(own, seconds[baseline], strict=True)]
        timings[name] = Timing(
            statistics.median(own), _iqr(own), statistics.median(ratios), _iqr(ratios)
        )
    return timings


def peak_memory(call: Callable[[], object], device: str) -> int:
    """Bytes that `call` allocates at most beyond what stood before it."""
    if device == "cuda":
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        call()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        call()
    assert profile.profiler is not None
    results = profile.profiler.kineto_results
    assert results is not None
    events = results.events()
    changes = [(e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]"]
    now = peak = 0
    for _, change in sorted(changes):
        now += change
        peak = max(peak, now)
    return peak


def _once(call: Callable[[], object], device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    call()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def _iqr(values: list[float]) -> float:
    low, _, high = statistics.quantiles(values, n=4)
    return high - low
