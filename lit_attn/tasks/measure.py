"""What a result says about the run itself: time, memory, machine, code."""

import hashlib
import importlib.metadata
import resource
import statistics
from pathlib import Path

import torch

import lit_attn
from lit_attn.records import Spread

PACKAGES = ("lightning", "numpy", "timm", "torch", "torchmetrics")

# The first steps allocate, compile and tune.
WARM_UP = 5


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


def peak_memory(device: torch.device) -> int:
    """Bytes: what CUDA's allocator held at most, or the process's largest resident set."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def device_name(device: torch.device) -> str:
    """The GPU's name, or "CPU"."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def _code_hash() -> str:
    """Twelve hexadecimal digits over the package's Python files."""
    digest = hashlib.sha256()
    root = Path(lit_attn.__file__).parent
    for path in sorted(root.rglob("*.py")):
        digest.update(path.relative_to(root).as_posix().encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def versions() -> dict[str, str]:
    """Versions of the packages that the numbers depend on."""
    return {name: importlib.metadata.version(name) for name in PACKAGES}


# Taken when this module is imported, with the code that runs: files may change under a long study.
CODE = _code_hash()
