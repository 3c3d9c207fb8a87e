"""Measurements of a finished cell that are columns of per_seed.csv."""

import sys
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any

from lit_attn.cells import records

MEASUREMENTS = (
    "selected_epoch",
    "steps",
    "epochs",
    "batch_size",
    "parameters",
    "flops",
    "ffn_width",
    "peak_memory",
    "wall_time",
    "attempts",
    "finished",
)
"""Fields of a result that are columns of per_seed.csv."""

SIZES = ("parameters", "ffn_width", "flops", "cache_bytes", "peak_memory")
"""Measurements for which one step of training is enough."""


class Row(Mapping[str, Any]):
    """Mapping as small as a tuple: rows with the same keys share them."""

    __slots__ = ("_places", "_values")

    def __init__(self, content: Mapping[str, Any]) -> None:
        self._places = _number(tuple(content))
        self._values = tuple(content.values())

    def __getitem__(self, key: str) -> Any:
        return self._values[self._places[key]]

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._values)


@lru_cache(maxsize=1000)
def _number(keys: tuple[str, ...]) -> dict[str, int]:
    """Return the place of each key; rows with the same keys get the same dictionary."""
    return {key: place for place, key in enumerate(keys)}


def shorten_hashes(inputs: Mapping[str, str]) -> dict[str, str]:
    """Return the first digits of the hashes of the user's modules, by path.

    A hash with + has those of the code before and after a cell was continued.
    """
    modules = {}
    for name, stamp in inputs.items():
        if name.endswith(".py"):
            parts = [part[:12] for part in stamp.split("+")]
            modules[sys.intern(name)] = sys.intern("+".join(parts))
    return modules


def _waiting_share(step: records.Spread, wall: records.Spread) -> float:
    """Return the share of the wall time of a step in which the device waited, 0 to 1."""
    if wall.median <= 0:
        return 0.0
    return max(0.0, 1 - step.median / wall.median)


def _describe_devices(result: records.Result) -> str:
    """Return the devices of a cell and how they trained it, such as `8 x H100 (2 nodes, fsdp)`.

    Settings that cells usually have are left out.
    """
    device = result.device
    if result.devices > 1:
        device = f"{result.devices} x {device}"
    settings = []
    if result.nodes > 1:
        settings.append(f"{result.nodes} nodes")
    if result.strategy not in (None, "ddp"):
        settings.append(str(result.strategy))
    if result.recompute != "none":
        settings.append(f"recomputed {result.recompute}")
    return f"{device} ({', '.join(settings)})" if settings else device


def measure(result: records.Result, metric: records.Metric) -> Row:
    """Return the measurements of a finished cell, in the order of the columns of per_seed.csv."""
    measured = {name: getattr(result, name) for name in MEASUREMENTS}
    measured["step_time"] = result.step_time.median
    measured["step_time_iqr"] = result.step_time.iqr
    evaluation_time = result.evaluation_time
    measured["evaluation_time"] = evaluation_time and evaluation_time.median
    if result.diverged:
        measured["diverged"] = True
    if result.stopped_early:
        measured["stopped_early"] = True
    if result.replaced_layers != result.attention_layers or result.attention_layers == 0:
        measured["replaced_layers"] = f"{result.replaced_layers} of {result.attention_layers}"
    if result.cache_bytes is not None:
        measured["cache_bytes"] = result.cache_bytes
    chance = result.chance.get(metric.name)
    if chance is not None:
        measured["chance"] = chance * metric.scale
    if result.is_device_shared:
        measured["is_device_shared"] = True
    if result.step_wall_time is not None:
        measured["waiting"] = _waiting_share(result.step_time, result.step_wall_time)
    versions = [f"{package} {version}" for package, version in sorted(result.versions.items())]
    # Thousands of cells share these texts.
    measured["device"] = sys.intern(_describe_devices(result))
    measured["code"] = sys.intern(result.code)
    measured["data"] = sys.intern(result.data)
    measured["versions"] = sys.intern("; ".join(versions))
    for name, value in sorted(result.metrics.items()):
        measured[sys.intern(f"metric {name}")] = value
    return Row(measured)


def measure_size(result: records.Result) -> Row:
    """Return the measurements of a cell that has trained for one step only."""
    return Row({name: getattr(result, name) for name in SIZES})
