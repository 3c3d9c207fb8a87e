"""Columns of other programs that are costs: they stand beside the values of a metric."""

from typing import NamedTuple


class Cost(NamedTuple):
    """Measurement of this project that a column has, and the factor from its unit."""

    measurement: str
    factor: float = 1.0


GIB = 2.0**30
MIB = 2.0**20

COSTS = {
    # Columns with the names of this project, in its units: seconds, bytes, counts.
    "parameters": Cost("parameters"),
    "ffn_width": Cost("ffn_width"),
    "flops": Cost("flops"),
    "cache_bytes": Cost("cache_bytes"),
    "step_time": Cost("step_time"),
    "evaluation_time": Cost("evaluation_time"),
    "peak_memory": Cost("peak_memory"),
    "wall_time": Cost("wall_time"),
    # Columns of other programs whose names have a unit, or whose unit is documented.
    "seconds": Cost("wall_time"),
    "training_seconds": Cost("wall_time"),
    "train_seconds": Cost("wall_time"),
    "total_seconds": Cost("wall_time"),
    "train_runtime": Cost("wall_time"),
    "runtime": Cost("wall_time"),
    "_runtime": Cost("wall_time"),
    "minutes": Cost("wall_time", 60),
    "hours": Cost("wall_time", 3600),
    "gpu_hours": Cost("wall_time", 3600),
    "train_time_ms": Cost("wall_time", 1e-3),
    "step_seconds": Cost("step_time"),
    "step_ms": Cost("step_time", 1e-3),
    "ms_per_step": Cost("step_time", 1e-3),
    "step_avg_ms": Cost("step_time", 1e-3),
    "memory_gb": Cost("peak_memory", GIB),
    "peak_memory_gb": Cost("peak_memory", GIB),
    "memory_mb": Cost("peak_memory", MIB),
    "peak_memory_mb": Cost("peak_memory", MIB),
    "peak_vram_mb": Cost("peak_memory", MIB),
    "params": Cost("parameters"),
    "num_params": Cost("parameters"),
    "n_params": Cost("parameters"),
    "num_params_m": Cost("parameters", 1e6),
    "gflops": Cost("flops", 1e9),
    "tflops": Cost("flops", 1e12),
}
"""Cost of a column, by its name in small letters with `_` for spaces and hyphens."""

COUNTS = ("parameters", "ffn_width", "flops", "cache_bytes", "peak_memory")
"""Measurements that are whole numbers."""


def find_cost(column: str) -> Cost | None:
    """Return the cost that a column has, None for any other column."""
    return COSTS.get(column.strip().lower().replace(" ", "_").replace("-", "_"))
