"""Short benchmark of a block with each preset, relative to the block with the standard layer."""

import torch

from lit_attn.bench.attention import Row, Shape, run
from lit_attn.bench.measure import Setup
from lit_attn.doctor.verdict import Speed

ROUNDS = 5
SHAPES = {"cpu": Shape(batch=8), "cuda": Shape(batch=128)}
"""The block of the CIFAR studies, with fewer samples on a CPU."""


def measure_presets(names: list[str], device: torch.device) -> dict[str, Speed]:
    """Return time and memory of the presets in float32, uncompiled, measured in turn."""
    setup = Setup(device.type, torch.float32, ROUNDS)
    rows = run(names, SHAPES[device.type], ["eager"], setup)
    by_name: dict[str, Row] = {row.name: row for row in rows}
    return {name: _speed(by_name[name]) for name in names}


def _speed(row: Row) -> Speed:
    """Return the row of the benchmark in the units of the table."""
    return Speed(
        milliseconds=row.seconds.median * 1e3,
        spread=row.seconds.iqr * 1e3,
        time_ratio=row.ratio.median,
        bytes=row.peak,
        memory_ratio=row.peak_ratio,
    )
