"""Time, memory and FLOP rates of a run."""

import re
import resource
import statistics

import torch

from lit_attn.cells.records import Spread

CUDA_CONTEXT = 2**30
"""Bytes that CUDA needs for a process beside its allocator, rounded up; 0.5 GiB is usual."""
WARM_UP_STEPS = 5
"""First steps, which allocate, compile and tune, and are left out of the step time."""
PEAKS = {
    "B200": 2.25e15,
    "H200": 9.89e14,
    "H100 PCIe": 7.56e14,
    "H100 NVL": 8.35e14,
    "H100": 9.89e14,
    "A100": 3.12e14,
    "L40S": 3.62e14,
    "L40": 1.81e14,
    "L4": 1.21e14,
    "A6000": 1.55e14,
    "RTX 4090": 1.65e14,
    "V100": 1.25e14,
    "T4": 6.5e13,
}
"""FLOP/s of dense half-precision matrix products with float32 sums, from NVIDIA's data sheets.

The first name that occurs in a device's name applies."""


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


def speed(
    step: Spread, samples: int, tokens: int | None, flops: int, peak: float | None
) -> dict[str, float]:
    """Return tokens per second and model FLOP utilisation (MFU) at the median step time.

    A step has `samples` with `tokens` each (None if they have none) and `flops` each in the forward
    pass. The backward pass counts twice the forward pass; recomputation does not count. MFU is the
    share of `peak` FLOP/s, and left out if that is None.
    """
    if not step.median:
        return {}
    metrics = {}
    if tokens is not None:
        metrics["train/tokens_per_second"] = samples * tokens / step.median
    if peak is not None:
        metrics["train/mfu"] = 3 * flops * samples / step.median / peak
    return metrics


def peak_flops(device_name: str, precision: str) -> float | None:
    """Return the peak FLOP/s of a device; None for fp32 and for devices outside PEAKS."""
    # A setting of the process decides whether products in fp32 use TF32.
    if precision == "fp32":
        return None
    return next((v for k, v in PEAKS.items() if re.search(rf"\b{k}\b", device_name)), None)


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
