"""Memory of a forward and a backward pass, counted by torch's allocator.

On a CPU, torch's profiler records the allocations and releases; on a GPU, the caching allocator
counts them. Both count the bytes of tensors, and give the same numbers in every run. Memory that a
library allocates without torch (for example the packed matrices of a BLAS) is not counted.
"""

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

# Name of the profiler event at which the backward pass begins.
BACKWARD = "lit_attn.bench: backward"


class Footprint(NamedTuple):
    """Bytes above the level before the pass: `held` between forward and backward, and `peak`."""

    held: int
    peak: int


class Pass(Protocol):
    """Training step in two halves, as `footprint` calls it."""

    def forward(self) -> Tensor: ...

    def backward(self, out: Tensor) -> None: ...


def footprint(step: Pass, device: str) -> Footprint:
    """Measure the memory of `step`; `held` includes its output."""
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
    (backward_start,) = (event.start_ns() for event in events if event.name() == BACKWARD)
    changes = [(e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]"]
    now = peak = held = 0
    for when, change in sorted(changes):
        now += change
        peak = max(peak, now)
        if when <= backward_start:
            held = now
    return Footprint(held, peak)
