"""What cells recorded of their attention layers (docs/diagnostics.md), over the seeds.

Shapes: S samples, H heads, n tokens.
"""

import statistics
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from lit_attn.cells.records import DiagnosticRow, read_diagnostics
from lit_attn.report.read import StudyRecord
from lit_attn.report.style import Curve, sd

Arrays = dict[str, NDArray[Any]]


class Place(NamedTuple):
    """Which value of a variant: `head` is None where it is a whole layer's."""

    layer: int
    head: int | None
    name: str


@dataclass(frozen=True)
class Recorded:
    """One variant: a value over training for each place, all seeds'; and each seed's arrays.

    Arrays are `rank.1` (S, H) and `map.1` (H, n, n) for layer 1, of the last look.
    """

    curves: dict[Place, Curve] = field(default_factory=dict)
    arrays: list[Arrays] = field(default_factory=list)

    @property
    def layers(self) -> list[int]:
        """The layers that something was recorded of."""
        return sorted({place.layer for place in self.curves})

    def last(self, place: Place) -> list[float]:
        """All seeds' values after the last step; none where there are none."""
        curve = self.curves.get(place, {})
        return curve[max(curve)] if curve else []


def read_recorded(study: StudyRecord) -> dict[str, Recorded]:
    """Every variant's records, in the plan's order; of finished cells, and those that have some."""
    found = {}
    for variant in study.plan.variants:
        folders = [cell.folder for cell in study.of(variant.name) if cell.result is not None]
        rows = [row for folder in folders for row in read_diagnostics(folder / "diagnostics.csv")]
        arrays = [_arrays(folder / "attention.npz") for folder in folders]
        if rows:
            found[variant.name] = Recorded(_curves(rows), [one for one in arrays if one])
    return found


def values_table(recorded: dict[str, Recorded]) -> pd.DataFrame:
    """A row for each value: mean and standard deviation (ddof 1) over the n seeds."""
    rows: list[tuple[Any, ...]] = []
    for name, one in recorded.items():
        for place, curve in one.curves.items():
            for step, values in curve.items():
                spread = sd(values) if len(values) > 1 else None
                rows.append((name, step, *place, statistics.fmean(values), spread, len(values)))
    frame = pd.DataFrame(
        rows, columns=["variant", "step", "layer", "head", "name", "mean", "sd", "n"]
    )
    return frame.astype({"head": "Int64"})


def ranks_table(recorded: dict[str, Recorded]) -> pd.DataFrame:
    """How many attention matrices of each layer have which rank, all seeds together."""
    rows = []
    for name, one in recorded.items():
        for layer in one.layers:
            counts = np.unique(ranks(one, layer), return_counts=True)
            rows += [(name, layer, int(r), int(many)) for r, many in zip(*counts, strict=True)]
    return pd.DataFrame(rows, columns=["variant", "layer", "rank", "matrices"])


def ranks(one: Recorded, layer: int) -> NDArray[Any]:
    """The ranks of a layer's attention matrices, over samples, heads and seeds: flat."""
    found = [arrays[f"rank.{layer}"] for arrays in one.arrays if f"rank.{layer}" in arrays]
    return np.concatenate([array.ravel() for array in found]) if found else np.zeros(0, int)


def maps_of(arrays: Arrays) -> dict[int, NDArray[Any]]:
    """The attention matrices (H, n, n) of every layer that has them."""
    return {
        int(name.removeprefix("map.")): array
        for name, array in arrays.items()
        if name.startswith("map.")
    }


def _curves(rows: Iterable[DiagnosticRow]) -> dict[Place, Curve]:
    curves: dict[Place, Curve] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        curves[Place(row.layer, row.head, row.name)][row.step].append(row.value)
    return {place: dict(sorted(curve.items())) for place, curve in curves.items()}


def _arrays(path: Path) -> Arrays:
    if not path.exists():
        return {}
    with np.load(path, allow_pickle=False) as arrays:
        return dict(arrays)
