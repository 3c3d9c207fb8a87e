"""Measurements of time and memory, and their tables with the conditions of the machine.

Time is measured for all candidates in turn (interleaved), so that a change of the clock rate or
another program affects all of them. Memory is counted by torch's own allocator: on a CPU the
allocations that torch's profiler records, on a GPU those of the caching allocator. Both count the
bytes of tensors, which are the same in every run. They do not count what a library allocates
itself, for example the packed matrices of a BLAS.
"""

import datetime
import json
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
from torch import Tensor, nn

from lit_attn.files import write_atomic
from lit_attn.private_names.of_torch import compiler_counters
from lit_attn.schema.yaml_text import parse_plain
from lit_attn.temporary import temporary_folder

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


_TITLES_FILE = Path(__file__).with_name("titles.yaml")
TITLES: dict[str, str] = parse_plain(_TITLES_FILE.read_text("utf-8"), _TITLES_FILE.name)
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
        start_event = torch.cuda.Event(enable_timing=True)
        end_event = torch.cuda.Event(enable_timing=True)
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
    for reason in compiler_counters()["graph_break"]:
        raise RuntimeError(f"a part of a block was not compiled: {reason}")


BACKWARD = "lit_attn.bench: backward"
"""Name of the backward pass in a profile."""


class Footprint(NamedTuple):
    """Bytes allocated by a training step: `held` from forward to backward, and the `peak`."""

    held: int
    peak: int


def measure_memory(step: Step, device: str) -> Footprint:
    """Return the memory of `step`; its output counts as held."""
    return _measure_on_gpu(step) if device == "cuda" else _measure_on_cpu(step)


def _measure_on_gpu(step: Step) -> Footprint:
    """Return the memory of `step` in the counters of torch's caching allocator."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    out = step.forward()
    held = torch.cuda.memory_allocated() - before
    step.backward(out)
    torch.cuda.synchronize()
    return Footprint(held, torch.cuda.max_memory_allocated() - before)


def _measure_on_cpu(step: Step) -> Footprint:
    """Return the memory of `step` from the allocations that torch's profiler records."""
    cpu = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=cpu, profile_memory=True, acc_events=True) as profile:
        out = step.forward()
        with torch.profiler.record_function(BACKWARD):
            step.backward(out)
    events = _read_trace(profile)
    (backward_start,) = (event["ts"] for event in events if event["name"] == BACKWARD)
    memory_events = [event for event in events if event["name"] == "[memory]"]
    changes = sorted((event["ts"], event["args"]["Bytes"]) for event in memory_events)
    allocated = 0
    held = 0
    peak = 0
    for time_of_change, change in changes:
        allocated += change
        peak = max(peak, allocated)
        if time_of_change <= backward_start:
            held = allocated
    return Footprint(held, peak)


def _read_trace(profile: torch.profiler.profile) -> list[dict[str, Any]]:
    """Return the events of a finished profile in Chrome's format: `name`, `ts` (us) and `args`.

    torch has no other public way to single changes of the allocated memory.
    """
    with temporary_folder() as folder:
        path = folder / "trace.json"
        profile.export_chrome_trace(str(path))
        return json.loads(path.read_text("utf-8"))["traceEvents"]


def read_conditions(device: str, clock: str) -> dict[str, str]:
    """Return the conditions now; `load` is the load average of the last minute."""
    if device == "cuda":
        device_name = torch.cuda.get_device_name()
        clock_name = "GPU events"
    else:
        device_name = f"CPU, {_read_processor()}, {torch.get_num_threads()} thread(s)"
        clock_name = {"wall": "wall clock", "cpu": "CPU time of the process"}[clock]
    return {
        "date": datetime.date.today().isoformat(),
        "device": device_name,
        "clock": clock_name,
        "torch": torch.__version__,
        "load": f"{os.getloadavg()[0]:.1f}",
    }


def _read_processor() -> str:
    """Return the name of the processor, or its architecture on systems without /proc/cpuinfo."""
    path = Path("/proc/cpuinfo")
    if path.exists():
        model = re.search(r"model name\s*: (.+)", path.read_text())
        if model is not None:
            return model[1]
    return platform.machine()


def write_table(table: Table, conditions: dict[str, str], folder: Path | None) -> None:
    """Print a table in Markdown, and write NAME.md and NAME.csv to `folder` if there is one.

    The columns are the fields of the rows; the CSV adds the conditions, and splits a `Spread`.
    """
    name, title, rows = table
    text = _format_table(title, rows, conditions)
    print(text)
    if folder is None:
        return
    records = [_flatten_row(row) | conditions for row in rows]
    write_atomic(folder / f"{name}.csv", pd.DataFrame(records).to_csv(index=False))
    write_atomic(folder / f"{name}.md", text)


def _format_table(title: str, rows: Sequence[Any], conditions: dict[str, str]) -> str:
    """Return a table in Markdown under its title and the conditions of the machine."""
    headings = rows[0]._fields
    alignments = ["---:" for _ in headings]
    lines = [
        title,
        "{date}, {device}, {clock}, torch {torch}, load average {load}.".format(**conditions),
        "",
        _format_row(headings),
        _format_row(alignments),
    ]
    lines += [_format_row([format_cell(value) for value in row]) for row in rows]
    return "\n".join(lines) + "\n"


def _format_row(cells: Sequence[str]) -> str:
    """Return one row of a table in Markdown."""
    return f"| {' | '.join(cells)} |"


def _flatten_row(row: Any) -> dict[str, object]:
    """Return the values of a row by column, a `Spread` in two columns."""
    record: dict[str, object] = {}
    for key, value in row._asdict().items():
        if isinstance(value, Spread):
            record[key] = value.median
            record[f"{key}_iqr"] = value.iqr
        else:
            record[key] = value
    return record


def format_cell(value: object) -> str:
    """Return a value of a row in Markdown; "" for None."""
    if isinstance(value, Spread):
        return f"{value.median:.3g} ± {value.iqr:.2g}"
    if isinstance(value, float):
        return f"{value:.2f}"
    return "" if value is None else str(value)
