"""What a result says about the run itself: time, memory, machine, code."""

import hashlib
import importlib.metadata
import re
import resource
import statistics
from collections.abc import Iterable
from pathlib import Path

import torch

import lit_attn
from lit_attn.cells.records import Spread
from lit_attn.schema.plugins import get_file_hash, get_package_versions

PACKAGES = ("lightning", "numpy", "timm", "torch", "torchmetrics")

# CUDA's own memory for a process, which no allocator counts; half of it is usual.
CONTEXT = 2**30

# The first steps allocate, compile and tune.
WARM_UP = 5

# FLOP/s of dense matrix products in half precision, sums in float32, as NVIDIA's data sheets have
# them; the first name that stands in a device's name counts.
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


def step_time(seconds: list[float]) -> Spread:
    """Median and interquartile range of the step times after the first few."""
    return _spread(seconds[WARM_UP:] or seconds)


def evaluation_time(seconds: list[float]) -> Spread | None:
    """The same of the evaluations after the first; None where there was none."""
    return _spread(seconds[1:] or seconds) if seconds else None


def _spread(counted: list[float]) -> Spread:
    if len(counted) < 2:
        return Spread(median=counted[0] if counted else 0.0, iqr=0.0, count=len(counted))
    low, median, high = statistics.quantiles(counted, n=4)
    return Spread(median=median, iqr=high - low, count=len(counted))


def speed(
    step: Spread, samples: int, tokens: int | None, flops: int, peak: float | None
) -> dict[str, float]:
    """Tokens a second and MFU by the median step time, by the names of metrics.

    A step has `samples` of `tokens` each, null where they have none, and of `flops` in the forward
    pass; the backward pass counts twice that, and nothing that is computed again. MFU is the share
    of `peak` FLOP/s that these make, where that is known.
    """
    if not step.median:
        return {}
    found = {}
    if tokens is not None:
        found["train/tokens_per_second"] = samples * tokens / step.median
    if peak is not None:
        found["train/mfu"] = 3 * flops * samples / step.median / peak
    return found


def peak_flops(device_name: str, precision: str) -> float | None:
    """FLOP/s that a device could make in `precision`; null for fp32 and what is not in the table.

    fp32 has none: whether its products take TF32's path is a setting of the process.
    """
    if precision == "fp32":
        return None
    return next((v for k, v in PEAKS.items() if re.search(rf"\b{k}\b", device_name)), None)


def peak_memory(device: torch.device) -> int:
    """Bytes: what CUDA's allocator held at most, or the process's largest resident set."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def held_memory(device: torch.device) -> int:
    """The most bytes of a device that this process has held from all others, its context included.

    That is more than `peak_memory`, which is what its tensors needed.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_reserved(device) + CONTEXT
    return peak_memory(device)


def device_name(device: torch.device) -> str:
    """The GPU's name, or "CPU"."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def code_of(parts: Iterable[Path]) -> str:
    """Twelve hexadecimal digits over the package's Python files and a cell's loaded `parts`."""
    digest = _PACKAGE.copy()
    for path in parts:
        digest.update(path.name.encode())
        digest.update(get_file_hash(path))
    return digest.hexdigest()[:12]


def _package() -> "hashlib._Hash":
    digest = hashlib.sha256()
    root = Path(lit_attn.__file__).parent
    for path in sorted(root.rglob("*.py")):
        digest.update(path.relative_to(root).as_posix().encode())
        digest.update(path.read_bytes())
    return digest


def versions() -> dict[str, str]:
    """Return the versions of the packages that the numbers depend on, plug-ins included."""
    return {name: importlib.metadata.version(name) for name in PACKAGES} | get_package_versions()


# Taken when this module is imported, with the code that runs: files may change under a long study.
_PACKAGE = _package()
