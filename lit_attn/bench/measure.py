"""Measurements of time and memory, and their tables with the conditions of the machine.

Time is measured for all candidates in turn (interleaved), so that a change of the clock rate or
another program affects all of them. Memory is counted by torch's own allocator: on a CPU the
allocations that torch's profiler records, on a GPU those of the caching allocator. Both count the
bytes of tensors, which are the same in every run. They do not count what a library allocates
itself, for example the packed matrices of a BLAS.
"""

import datetime
import os
import platform
import re
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import pandas as pd
import torch
import yaml
from torch import Tensor, nn

from lit_attn.files import write_atomic

CLOCKS: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "cpu": time.process_time}
"""Clocks on a CPU: elapsed time, or the CPU time of this process, which sums over its threads."""


class Setup(NamedTuple):
    """Device and dtype of a benchmark, the number of measurements, and one of CLOCKS."""

    device: str
    dtype: torch.dtype
    rounds: int
    clock: str = "wall"


class Spread(NamedTuple):
    """Median and interquartile range of several measurements."""

    median: float
    iqr: float


TITLES: dict[str, str] = yaml.safe_load(Path(__file__).with_name("titles.yaml").read_text("utf-8"))
"""Template of the title of each benchmark's table."""

Table: TypeAlias = tuple[str, str, Sequence[Any]]
"""Name of the files, title and rows, which are NamedTuples, of a table."""


def measure_seconds(
    candidates: Mapping[str, Callable[[], object]], rounds: int, device: str, clock: str = "wall"
) -> dict[str, list[float]]:
    """Return the seconds of each candidate in each round; a round calls every candidate once.

    Two further rounds of warm-up are not counted. On a GPU the seconds are between two events of
    its stream, whatever `clock` is.
    """
    seconds: dict[str, list[float]] = {name: [] for name in candidates}
    for round_ in range(rounds + 2):
        for name, call in candidates.items():
            elapsed = time_call(call, device, clock)
            if round_ >= 2:
                seconds[name].append(elapsed)
    return seconds


def summarize(values: Iterable[float]) -> Spread:
    """Return the median and the interquartile range of at least two values."""
    low, median, high = statistics.quantiles(values, n=4)
    return Spread(median, high - low)


def summarize_ratios(values: Iterable[float], references: Iterable[float]) -> Spread:
    """Return the ratios within each round, which a slower round does not change."""
    return summarize(a / b for a, b in zip(values, references, strict=True))


def time_call(call: Callable[[], object], device: str, clock: str) -> float:
    """Return the seconds of one call."""
    if device == "cuda":
        start_event, end_event = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start_event.record()
        call()
        end_event.record()
        torch.cuda.synchronize()
        return start_event.elapsed_time(end_event) / 1e3
    now = CLOCKS[clock]
    start = now()
    call()
    return now() - start


class Step:
    """Forward and backward pass of a module on fixed random tokens; it leaves no gradient."""

    def __init__(self, module: nn.Module, x: Tensor, causal: bool, mode: str = "eager") -> None:
        """`mode`: "eager" or "compiled"."""
        self.module = module.train()
        self.call: Callable[..., Tensor] = torch.compile(module) if mode == "compiled" else module
        self.x = x.clone().requires_grad_()
        self.gradient = torch.randn_like(x)
        self.causal = causal

    def forward(self) -> Tensor:
        return self.call(self.x, is_causal=self.causal)

    def backward(self, out: Tensor) -> None:
        out.backward(self.gradient)
        self.x.grad = None
        self.module.zero_grad(set_to_none=True)

    def __call__(self) -> None:
        self.backward(self.forward())


def check_graphs() -> None:
    """Raise RuntimeError if a part of a block was not compiled."""
    for reason in torch._dynamo.utils.counters["graph_break"]:
        raise RuntimeError(f"a part of a block was not compiled: {reason}")


class Footprint(NamedTuple):
    """Bytes allocated by a training step: `held` from forward to backward, and the `peak`."""

    held: int
    peak: int


def measure_memory(step: Step, device: str) -> Footprint:
    """Return the memory of `step`; its output counts as held."""
    if device == "cuda":
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        out = step.forward()
        held = torch.cuda.memory_allocated() - before
        step.backward(out)
        torch.cuda.synchronize()
        return Footprint(held, torch.cuda.max_memory_allocated() - before)
    backward_name = "lit_attn.bench: backward"
    cpu = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=cpu, profile_memory=True, acc_events=True) as profile:
        out = step.forward()
        with torch.profiler.record_function(backward_name):
            step.backward(out)
    assert profile.profiler is not None
    results = profile.profiler.kineto_results
    assert results is not None
    events = results.events()
    (backward_start,) = (event.start_ns() for event in events if event.name() == backward_name)
    changes = [(e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]"]
    allocated = peak = held = 0
    for time_ns, change in sorted(changes):
        allocated += change
        peak = max(peak, allocated)
        if time_ns <= backward_start:
            held = allocated
    return Footprint(held, peak)


def read_conditions(device: str, clock: str) -> dict[str, str]:
    """Return the conditions now; `load` is the load average of the last minute."""
    if device == "cuda":
        device_name, clock_name = torch.cuda.get_device_name(), "GPU events"
    else:
        path = Path("/proc/cpuinfo")
        model = re.search(r"model name\s*: (.+)", path.read_text()) if path.exists() else None
        processor = platform.machine() if model is None else model[1]
        device_name = f"CPU, {processor}, {torch.get_num_threads()} thread(s)"
        clock_name = {"wall": "wall clock", "cpu": "CPU time of the process"}[clock]
    return {
        "date": datetime.date.today().isoformat(),
        "device": device_name,
        "clock": clock_name,
        "torch": torch.__version__,
        "load": f"{os.getloadavg()[0]:.1f}",
    }


def write_table(table: Table, conditions: dict[str, str], folder: Path | None) -> None:
    """Print a table in Markdown, and write NAME.md and NAME.csv to `folder` if there is one.

    The columns are the fields of the rows; the CSV adds the conditions, and splits a `Spread`.
    """
    line = "{date}, {device}, {clock}, torch {torch}, load average {load}.".format(**conditions)
    name, title, rows = table
    headings = rows[0]._fields
    cells = [headings, ["---:"] * len(headings), *(map(format_cell, row) for row in rows)]
    lines = [title, line, "", *(f"| {' | '.join(row)} |" for row in cells)]
    text = "\n".join(lines) + "\n"
    print(text)
    if folder is None:
        return
    records = []
    for row in rows:
        record: dict[str, object] = {}
        for key, value in row._asdict().items():
            is_spread = isinstance(value, Spread)
            record |= {key: value.median, f"{key}_iqr": value.iqr} if is_spread else {key: value}
        records.append(record | conditions)
    write_atomic(folder / f"{name}.csv", pd.DataFrame(records).to_csv(index=False))
    write_atomic(folder / f"{name}.md", text)


def format_cell(value: object) -> str:
    """Return a value of a row in Markdown; "" for None."""
    if isinstance(value, Spread):
        return f"{value.median:.3g} ± {value.iqr:.2g}"
    if isinstance(value, float):
        return f"{value:.2f}"
    return "" if value is None else str(value)
