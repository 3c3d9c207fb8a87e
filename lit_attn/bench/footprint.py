"""The memory of a forward and a backward pass, counted by torch's own allocator.

On a CPU the allocations and frees are those that torch's profiler records, on a GPU those of the
caching allocator. Both count what tensors take, to the byte and the same in every run. What a
library allocates past torch (the packed matrices of a BLAS) is in neither, nor in a GPU's.
"""

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

# Marks in the profile where the backward pass begins.
BACKWARD = "lit_attn.bench: backward"


class Footprint(NamedTuple):
    """Bytes beyond what stood before: `held` from forward to backward, and `peak` in either."""

    held: int
    peak: int


class Pass(Protocol):
    """One training step of something, in its two halves."""

    def forward(self) -> Tensor: ...

    def backward(self, out: Tensor) -> None: ...


def footprint(step: Pass, device: str) -> Footprint:
    """What `step` takes; its output is part of what is held."""
    return _on_gpu(step) if device == "cuda" else _on_cpu(step)


def _on_gpu(step: Pass) -> Footprint:
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    out = step.forward()
    held = torch.cuda.memory_allocated() - before
    step.backward(out)
    torch.cuda.synchronize()
    return Footprint(held, torch.cuda.max_memory_allocated() - before)


def _on_cpu(step: Pass) -> Footprint:
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True, acc_events=True
    ) as profile:
        out = step.forward()
        with torch.profiler.record_function(BACKWARD):
            step.backward(out)
    assert profile.profiler is not None
    results = profile.profiler.kineto_results
    assert results is not None
    events = results.events()
    (turn,) = (event.start_ns() for event in events if event.name() == BACKWARD)
    changes = [(e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]"]
    now = peak = held = 0
    for when, change in sorted(changes):
        now += change
        peak = max(peak, now)
        if when <= turn:
            held = now
    return Footprint(held, peak)
