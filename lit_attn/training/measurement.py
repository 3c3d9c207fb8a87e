"""Time and memory of a run."""

import resource
import statistics

import torch

from lit_attn.cells.records import Spread

CUDA_CONTEXT = 2**30
"""Bytes that CUDA needs for a process beside its allocator, rounded up; 0.5 GiB is usual."""
WARM_UP_STEPS = 5
"""First steps, which allocate, compile and tune, and are left out of the step time."""


def step_time(seconds: list[float]) -> Spread:
    """Return the median and interquartile range of the step times after the warm-up."""
    return _spread(seconds[WARM_UP_STEPS:] or seconds)


def evaluation_time(seconds: list[float]) -> Spread | None:
    """Return the spread of the evaluation times after the first; None without any evaluation."""
    return _spread(seconds[1:] or seconds) if seconds else None


def _spread(seconds: list[float]) -> Spread:
    if len(seconds) < 2:
        return Spread(median=seconds[0] if seconds else 0.0, iqr=0.0, count=len(seconds))
    low, median, high = statistics.quantiles(seconds, n=4)
    return Spread(median=median, iqr=high - low, count=len(seconds))


def peak_memory(device: torch.device) -> int:
    """Return the most bytes allocated by tensors on a GPU, or the process's peak resident set."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def reserved_memory(device: torch.device) -> int:
    """Return the most bytes unavailable to others: more than `peak_memory`, which is tensors."""
    if device.type == "cuda":
        return torch.cuda.max_memory_reserved(device) + CUDA_CONTEXT
    return peak_memory(device)


def device_name(device: torch.device) -> str:
    """Return the GPU's name, or "CPU"."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
