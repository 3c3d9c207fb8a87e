"""Figures and CSV tables of recorded attention diagnostics (docs/diagnostics.md), over all seeds.

Shapes: S samples, H heads, n tokens.
"""

import itertools
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from lit_attn.cells.rows import DiagnosticRow, read_diagnostics
from lit_attn.report.figures import drawing
from lit_attn.report.figures.drawing import COLOURS, GREY
from lit_attn.report.records.skipped import Arrays, read_arrays, read_or_skip
from lit_attn.report.records.study_record import StudyRecord

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Floats = NDArray[np.float64]
Matrices = dict[str, dict[int, NDArray[Any]]]
"""Matrices (H, rows, columns) by variant and layer."""

RANK_LAYERS = 4  # Layers in the figure of ranks.
MAP_LAYERS = 3  # Layers in the figure of maps.
MAP_HEADS = 4  # Heads for each layer of maps.


class Diagnostics(NamedTuple):
    """Recorded diagnostics of a study.

    `values` has a row for each value of each seed: variant, step, layer, head (missing for a
    whole layer), name, value. `arrays` has, by variant, the arrays of each seed's last
    evaluation: `rank.1` (S, H), `map.1`, `keys.1` and `key-weights.1` (matrices) for layer 1.
    """

    values: pd.DataFrame
    arrays: dict[str, list[Arrays]]


def read_study_diagnostics(study: StudyRecord) -> Diagnostics:
    """Read the diagnostics of all finished cells in the order of the plan."""
    rows: list[tuple[Any, ...]] = []
    arrays: dict[str, list[Arrays]] = {}
    for variant in study.plan.variants:
        for cell in study.finished_cells(variant.name):
            if cell.folder is None:
                continue
            recorded = read_or_skip(read_diagnostics, cell.folder, "diagnostics.csv") or ()
            rows += [(variant.name, *row) for row in recorded]
            content = read_arrays(cell.folder / "attention.npz")
            if content:
                arrays.setdefault(variant.name, []).append(content)
    values = pd.DataFrame(rows, columns=["variant", *DiagnosticRow._fields])
    return Diagnostics(values.astype({"head": "Int64"}), arrays)


def make_values_table(diagnostics: Diagnostics) -> pd.DataFrame:
    """Return one row for each recorded value: mean and standard deviation (ddof 1) over n seeds."""
    keys = ["variant", "step", "layer", "head", "name"]
    groups = diagnostics.values.groupby(keys, sort=False, dropna=False)["value"]
    return groups.agg(mean="mean", sd="std", n="count").reset_index()


def make_ranks_table(diagnostics: Diagnostics) -> pd.DataFrame:
    """Return the number of attention matrices of each rank over all seeds, by variant and layer."""
    rows: list[tuple[str, int, int, int]] = []
    for variant, seeds in diagnostics.arrays.items():
        for name in dict.fromkeys(name for arrays in seeds for name in arrays):
            if "rank." not in name:
                continue
            layer = int(name.removeprefix("rank."))
            recorded = [arrays[name].ravel() for arrays in seeds if name in arrays]
            ranks, counts = np.unique(np.concatenate(recorded), return_counts=True)
            for rank, count in zip(ranks.tolist(), counts.tolist(), strict=True):
                rows.append((variant, layer, int(rank), count))
    return pd.DataFrame(rows, columns=["variant", "layer", "rank", "matrices"])


def _draw_over_training(
    diagnostics: Diagnostics, name: str, label: str, place: str = ""
) -> "Figure | None":
    """Draw a panel for each variant with a colour for each layer: MH solid, Δ dashed.

    The values are means over all tokens, or with the `place` "@1" those of the first token.
    """
    from matplotlib import colormaps

    dashes = {f"{name}-mh{place}": "-", f"{name}-delta{place}": "--"}
    values = diagnostics.values[diagnostics.values["name"].isin(dashes)]
    layers = sorted(values["layer"].unique())
    # Colours from dark to light, which the eye reads as an order.
    shades = colormaps["viridis"](np.linspace(0.3, 0.85, len(layers)))
    colours = dict(zip(layers, shades, strict=True))
    curves: dict[str, list[drawing.Curve]] = {}
    for variant, part in values.groupby("variant", sort=False):
        bands = []
        for (layer, quantity), rows in part.groupby(["layer", "name"]):
            by_step = rows.set_index("step")["value"]
            bands.append((by_step, colours[layer], dashes[str(quantity)]))
        curves[str(variant)] = bands
    # The legend names at most 8 layers.
    key = {f"layer {i}": (colours[i], "-") for i in drawing.pick_evenly(layers, 8)}
    key |= {"MH": ("black", "-"), "Δ": ("black", "--")}
    return drawing.draw_panels(curves, "step", label, key)


def _draw_ranks(diagnostics: Diagnostics) -> "Figure | None":
    """Draw a panel for each of some layers: a histogram of ranks, with its mean, by variant."""
    table = make_ranks_table(diagnostics)
    totals = table.groupby("rank")["matrices"].sum()
    if not 0.99 * totals.sum() > totals.max():
        # Ranks that are nearly all equal need no figure; ranks.csv has them.
        return None
    variants = list(table["variant"].unique()[: drawing.MOST_ROWS])
    layers = drawing.pick_evenly(sorted(table["layer"].unique()), RANK_LAYERS)
    figure = drawing.new_figure(0.26 * len(variants) + 0.75)
    panels = figure.subplots(1, len(layers), sharey=True, squeeze=False)[0]
    edges = _rank_edges(table["rank"])
    for axes, layer in zip(panels, layers, strict=True):
        in_layer = table[table["layer"] == layer]
        for variant, rows in in_layer.groupby("variant", sort=False):
            if variant in variants:
                _draw_rank_histogram(axes, variants.index(variant), rows, edges)
        axes.set_title(f"layer {layer}")
        axes.set_xlim(edges[0], edges[-1])
        axes.locator_params(axis="x", nbins=4, integer=True)
    panels[0].set_yticks(range(len(variants)), drawing.short_names(variants, 36))
    panels[0].set_ylim(len(variants) - 0.5, -0.5)
    figure.supxlabel("rank", fontsize=8)
    return figure


def _rank_edges(ranks: "pd.Series[int]") -> Floats:
    """Return the edges of at most 40 bins, which are equally wide and contain all ranks."""
    low = ranks.min()
    high = ranks.max()
    step = max(1, math.ceil((high - low + 1) / 40))
    return np.arange(low, high + step + 1, step, dtype=np.float64) - 0.5


def _draw_rank_histogram(axes: "Axes", row: int, rows: pd.DataFrame, edges: Floats) -> None:
    """Draw the ranks of one variant and layer as a histogram around y = `row`, with its mean."""
    ranks = rows["rank"]
    counts = rows["matrices"]
    heights, _ = np.histogram(ranks, edges, weights=counts)
    # The axis points down, and each histogram takes 0.8 of the height of its row.
    bottom = row + 0.4
    tops = bottom - 0.8 * heights / heights.max()
    axes.stairs(tops, edges, baseline=bottom, fill=True, color=COLOURS[0], alpha=0.5)
    mean = np.average(ranks, weights=counts)
    axes.vlines(mean, bottom - 0.8, bottom, color="black", linewidth=0.7)


def _draw_matrices(diagnostics: Diagnostics, name: str, letter: str) -> "Figure | None":
    """Draw the matrices `name` of some layers, at most MAP_HEADS each, one row for each variant.

    White is zero in weights of attention, and matrices of keys have blue negative values. The
    `letter` names the matrices of a layer.
    """
    shown = _read_matrices(diagnostics, name)
    if not shown:
        return None
    grid = _make_grid(shown)
    picture = _paint_matrices(shown, grid, is_negative_hidden=name == "map")
    names = drawing.short_names(shown, 36)
    # The matrices have the width that the names leave.
    longest_name = max(len(text) for text in names)
    free = drawing.WIDTH - 0.2 - drawing.LETTER_WIDTH * longest_name
    ratio = picture.shape[0] / picture.shape[1]
    # Keys have far fewer coordinates than tokens: their pixels need not be squares.
    tallest = math.inf if name == "map" else 1.5 * len(shown)
    figure = drawing.new_figure(min(free * ratio, tallest) + 0.3)
    axes = figure.subplots()
    if name == "map":
        axes.imshow(picture, "Greys", vmin=0, vmax=1, interpolation="antialiased")
        axes.set_aspect("equal")
    else:
        axes.imshow(picture, "RdBu_r", vmin=-1, vmax=1, interpolation="antialiased")
        axes.set_aspect("auto")
    middles = [(grid.height - 1) / 2 + grid.row_distance * row for row in range(len(shown))]
    axes.set_yticks(middles, names)
    centres = []
    headings = []
    for place, (layer, head) in enumerate(grid.columns):
        centres.append((grid.width - 1) / 2 + grid.column_distance * place)
        headings.append(f"L{layer} {letter}{head + 1}")
    axes.set_xticks(centres, headings)
    axes.tick_params(length=0, labeltop=True, labelbottom=False)
    axes.grid(False)
    axes.spines[:].set_visible(False)
    return figure


class Grid(NamedTuple):
    """Arrangement of matrices in a picture: layer and head of each column, and sizes in pixels.

    `height` and `width` are those of the largest matrix, `gap` is the space between two matrices.
    """

    columns: list[tuple[int, int]]
    height: int
    width: int
    gap: int

    @property
    def row_distance(self) -> int:
        """Pixels from the top of one row of matrices to the top of the next one."""
        return self.height + self.gap

    @property
    def column_distance(self) -> int:
        """Pixels from the left end of one column of matrices to that of the next one."""
        return self.width + self.gap


def _make_grid(shown: Matrices) -> Grid:
    """Return the arrangement of some layers and heads of all variants."""
    recorded_layers: set[int] = set()
    shapes = []
    for by_layer in shown.values():
        recorded_layers |= by_layer.keys()
        shapes += [matrices.shape for matrices in by_layer.values()]
    layers = drawing.pick_evenly(sorted(recorded_layers), MAP_LAYERS)
    heads, height, width = np.max(shapes, axis=0).tolist()
    columns = list(itertools.product(layers, range(min(MAP_HEADS, heads))))
    gap = max(1, max(height, width) // 12)
    return Grid(columns, height, width, gap)


def _paint_matrices(shown: Matrices, grid: Grid, is_negative_hidden: bool) -> Floats:
    """Return the picture of all matrices, in which pixels without a value are NaN.

    Each matrix is divided by its own largest magnitude.
    """
    rows = len(shown) * grid.row_distance
    columns = len(grid.columns) * grid.column_distance
    picture = np.full((rows, columns), np.nan)
    for down, by_layer in enumerate(shown.values()):
        for across, (layer, head) in enumerate(grid.columns):
            if head >= len(by_layer.get(layer, ())):
                continue
            weights = by_layer[layer][head]
            if is_negative_hidden:
                weights = weights.clip(0)
            top = down * grid.row_distance
            left = across * grid.column_distance
            height, width = weights.shape
            largest = max(float(np.abs(weights).max()), 1e-30)
            picture[top : top + height, left : left + width] = weights / largest
    return picture


def _read_matrices(diagnostics: Diagnostics, name: str) -> Matrices:
    """Return the matrices `name` (H, rows, columns) of the first seed, by variant and layer.

    At most MOST_PANELS variants have a row of a figure.
    """
    matrices: Matrices = {}
    for variant, seeds in diagnostics.arrays.items():
        by_layer = {}
        for key, array in seeds[0].items():
            if key.startswith(f"{name}."):
                layer = int(key.rpartition(".")[2])
                by_layer[layer] = array
        if by_layer and len(matrices) < drawing.MOST_PANELS:
            matrices[variant] = by_layer
    return matrices


def _draw_heads(diagnostics: Diagnostics, baseline: str) -> "Figure | None":
    """Draw a panel for each variant: captured variance by layer, with the baseline's in grey."""
    circuits = {"captured-qk": (COLOURS[0], "-"), "captured-ov": (COLOURS[1], "--")}
    values = diagnostics.values[diagnostics.values["name"].isin(circuits)]
    keys = ["variant", "layer", "head", "name"]
    last_steps = values.groupby(keys, dropna=False)["step"].transform("max")
    last = values[values["step"] == last_steps]
    curves = {}
    for key, rows in last.groupby(["variant", "name"], sort=False):
        curves[key] = rows.set_index("layer")["value"]
    variants = list(values["variant"].unique())
    panels: dict[str, list[drawing.Curve]] = {}
    for variant in variants:
        if variant == baseline and len(variants) > 1:
            continue
        bands = []
        for name, (colour, dash) in circuits.items():
            for line in dict.fromkeys((baseline, variant)):
                if (line, name) in curves:
                    shown = colour if line == variant else GREY
                    bands.append((curves[line, name], shown, dash))
        panels[variant] = bands
    legend: drawing.Key = {"QK": circuits["captured-qk"], "OV": circuits["captured-ov"]}
    if baseline not in panels:
        legend[baseline] = (GREY, "-")
    return drawing.draw_panels(panels, "layer", "captured variance", legend)


DRAWERS: "dict[str, Callable[[Diagnostics, str], Figure | None]]" = {
    "norms": lambda recorded, _: _draw_over_training(recorded, "norm", "‖MH‖, ‖Δ‖"),
    "angles": lambda recorded, _: _draw_over_training(recorded, "cos", "cosine of the angle to X"),
    "ranks": lambda recorded, _: _draw_ranks(recorded),
    "maps": lambda recorded, _: _draw_matrices(recorded, "map", "H"),
    "key-weights": lambda recorded, _: _draw_matrices(recorded, "key-weights", "K"),
    "keys": lambda recorded, _: _draw_matrices(recorded, "keys", "K"),
    "heads": _draw_heads,
}
"""Drawing function of each figure, for the records of a study and the name of its baseline.

A function returns None if nothing was recorded for its figure.
"""

PAPER_DRAWERS: "dict[str, Callable[[Diagnostics, str], Figure | None]]" = DRAWERS | {
    "first-norms": lambda recorded, _: _draw_over_training(
        recorded, "norm", "‖MH‖, ‖Δ‖ of token 0", "@1"
    ),
    "first-angles": lambda recorded, _: _draw_over_training(
        recorded, "cos", "cosine to X of token 0", "@1"
    ),
}
"""Drawing function of each figure that a page of a paper can have."""
