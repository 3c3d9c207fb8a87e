"""Figures and tables of the recorded attention diagnostics (docs/diagnostics.md), over all seeds.

Shapes: S samples, H heads, n tokens.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from lit_attn.cells.records import DiagnosticRow, read_diagnostics
from lit_attn.report import drawing
from lit_attn.report.columns import NOTHING, format_spread
from lit_attn.report.drawing import COLOURS, GREY, shorten
from lit_attn.report.formats import Cell, Table, named_table
from lit_attn.report.read import LOG, Arrays, StudyRecord, read_arrays

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Numbers of layers in the figures of ranks and maps, and of heads for each layer of maps.
RANK_LAYERS, MAP_LAYERS, MAP_HEADS = 4, 3, 4
NAMED_LAYERS = 8
"""Largest number of layers in a legend; with more layers only some of them are named."""


@dataclass(frozen=True)
class Diagnostics:
    """Recorded diagnostics of a study.

    `values` has a row for each value of each seed: variant, step, layer, head (missing for a
    whole layer), name, value. `arrays` has, by variant, the arrays of each seed's last
    evaluation: `rank.1` (S, H) and `map.1` (H, n, n) for layer 1.
    """

    values: pd.DataFrame
    arrays: dict[str, list[Arrays]]

    def select(self, *names: str) -> pd.DataFrame:
        """Return the values with one of these names."""
        return self.values[self.values["name"].isin(names)]

    def ranks(self, variant: str, layer: int) -> list[NDArray[Any]]:
        """Return each seed's ranks (S, H) of a layer's attention matrices."""
        name = f"rank.{layer}"
        return [arrays[name] for arrays in self.arrays.get(variant, []) if name in arrays]

    def maps(self, variant: str) -> dict[int, NDArray[Any]]:
        """Return the first seed's attention matrices (H, n, n) by layer."""
        arrays = next(iter(self.arrays.get(variant, [])), {})
        return {
            int(name.removeprefix("map.")): array
            for name, array in arrays.items()
            if name.startswith("map.")
        }


def read_study_diagnostics(study: StudyRecord) -> Diagnostics:
    """Read the diagnostics of all finished cells in the order of the plan.

    Unreadable files are skipped with one warning.
    """
    rows: list[tuple[Any, ...]] = []
    arrays: dict[str, list[Arrays]] = {}
    unreadable: list[Path] = []
    for variant in study.plan.variants:
        for folder in study.folders(variant.name):
            rows += [(variant.name, *row) for row in read_diagnostics(folder / "diagnostics.csv")]
            if content := read_arrays(folder / "attention.npz", unreadable):
                arrays.setdefault(variant.name, []).append(content)
    if unreadable:
        count, study_name = len(unreadable), study.plan.study
        LOG.warning(
            "%s: %d unreadable files are skipped, first %s", study_name, count, unreadable[0]
        )
    values = pd.DataFrame(rows, columns=["variant", *DiagnosticRow._fields])
    return Diagnostics(values.astype({"head": "Int64"}), arrays)


def make_values_table(diagnostics: Diagnostics) -> pd.DataFrame:
    """Return one row for each recorded value: mean and standard deviation (ddof 1) over n seeds."""
    keys = ["variant", "step", "layer", "head", "name"]
    groups = diagnostics.values.groupby(keys, sort=False, dropna=False)["value"]
    return groups.agg(mean="mean", sd="std", n="count").reset_index()


def make_ranks_table(diagnostics: Diagnostics) -> pd.DataFrame:
    """Return the number of attention matrices of each rank over all seeds, by variant and layer."""
    rows = []
    for (variant, layer), _ in diagnostics.values.groupby(["variant", "layer"], sort=False):
        if ranks := diagnostics.ranks(str(variant), int(str(layer))):
            flat = np.concatenate([array.ravel() for array in ranks])
            counts = zip(*np.unique(flat, return_counts=True), strict=True)
            rows += [(variant, layer, int(rank), int(count)) for rank, count in counts]
    return pd.DataFrame(rows, columns=["variant", "layer", "rank", "matrices"])


def make_drawers(
    diagnostics: Diagnostics, baseline: str
) -> "dict[str, Callable[[], Figure | None]]":
    """Map each figure of the section to its drawing function.

    A function returns None if nothing was recorded for its figure.
    """
    return {
        "norms": lambda: _draw_over_training(diagnostics, "norm", "‖MH‖, ‖Δ‖"),
        "angles": lambda: _draw_over_training(diagnostics, "cos", "cosine of the angle to X"),
        "ranks": lambda: _draw_ranks(diagnostics),
        "maps": lambda: _draw_maps(diagnostics),
        "heads": lambda: _draw_heads(diagnostics, baseline),
    }


def _draw_over_training(diagnostics: Diagnostics, name: str, label: str) -> "Figure | None":
    """Draw a panel for each variant with a colour for each layer: MH solid, Δ dashed."""
    dashes = {f"{name}-mh": "-", f"{name}-delta": "--"}
    values = diagnostics.select(*dashes)
    variants = list(values["variant"].unique()[: drawing.MOST_PANELS])
    if not variants:
        return None
    layers = sorted(values["layer"].unique())
    colours = dict(zip(layers, drawing.sequential_colours(len(layers)), strict=True))
    figure, panels = drawing.new_panels(len(variants), legend_lines=2)
    for axes, variant in zip(panels, variants, strict=True):
        for (layer, quantity), rows in values[values["variant"] == variant].groupby(
            ["layer", "name"]
        ):
            # The bands of several layers overlap, so each one is faint.
            curve = rows.set_index("step")["value"]
            drawing.draw_band(axes, curve, colours[layer], dashes[quantity], alpha=0.1)
        axes.set_title(drawing.panel_title(variant))
        if name == "cos":
            axes.axhline(0, color=GREY, linewidth=0.6, zorder=1)
    if name == "norm":
        panels[0].set_ylim(bottom=0)
    drawing.use_integer_ticks(panels[0])
    figure.supxlabel("step", fontsize=8)
    figure.supylabel(label, fontsize=8)
    named = drawing.pick_evenly(layers, NAMED_LAYERS)
    key = {f"layer {layer}": (colours[layer], "-") for layer in named}
    drawing.add_legend(figure, key | {"MH": ("black", "-"), "Δ": ("black", "--")})
    return figure


def _draw_ranks(diagnostics: Diagnostics) -> "Figure | None":
    """Draw a histogram strip of the attention matrices' ranks for each variant and layer."""
    table = make_ranks_table(diagnostics)
    if table["rank"].nunique() < 2:
        # Ranks that are all equal need no figure; ranks.csv has them.
        return None
    variants = list(table["variant"].unique()[: drawing.MOST_ROWS])
    layers = drawing.pick_evenly(sorted(table["layer"].unique()), RANK_LAYERS)
    figure = drawing.new_figure(0.26 * len(variants) + 0.75)
    panels = figure.subplots(1, len(layers), sharey=True, squeeze=False)[0]
    low, high = table["rank"].min(), table["rank"].max()
    step = max(1, -(-(high - low + 1) // 40))
    edges = np.arange(low, high + step + 1, step) - 0.5
    for axes, layer in zip(panels, layers, strict=True):
        for row, variant in enumerate(variants):
            ranks = diagnostics.ranks(variant, layer)
            if not ranks:
                continue
            counts, _ = np.histogram(np.concatenate([array.ravel() for array in ranks]), edges)
            bottom = row + 0.4
            heights = 0.8 * counts / counts.max()
            axes.bar(edges[:-1], -heights, step, bottom, align="edge", color=COLOURS[0], alpha=0.5)
            means = [array.mean() for array in ranks]
            axes.vlines(means, row - 0.4, bottom, color="black", linewidth=0.7)
        axes.set_title(f"layer {layer}")
        axes.set_xlim(edges[0], edges[-1])
        drawing.use_integer_ticks(axes)
    panels[0].set_yticks(range(len(variants)), [shorten(name, 36) for name in variants])
    panels[0].set_ylim(len(variants) - 0.5, -0.5)
    figure.supxlabel("rank", fontsize=8)
    return figure


def _draw_maps(diagnostics: Diagnostics) -> "Figure | None":
    """Draw the attention matrices of some heads of some layers, one row for each variant."""
    shown = {name: maps for name in diagnostics.arrays if (maps := diagnostics.maps(name))}
    shown = dict(list(shown.items())[: drawing.MOST_PANELS])
    if not shown:
        return None
    layers = drawing.pick_evenly(sorted({i for maps in shown.values() for i in maps}), MAP_LAYERS)
    matrices = [matrix for maps in shown.values() for matrix in maps.values()]
    heads = min(MAP_HEADS, max(map(len, matrices)))
    side = max(matrix.shape[-1] for matrix in matrices)
    pitch = side + max(1, side // 12)
    columns = [(layer, head) for layer in layers for head in range(heads)]
    picture = np.zeros((len(shown) * pitch, len(columns) * pitch))
    for down, maps in enumerate(shown.values()):
        for across, (layer, head) in enumerate(columns):
            if head < len(maps.get(layer, ())):
                weights = maps[layer][head].clip(0)
                rows = slice(down * pitch, down * pitch + len(weights))
                places = slice(across * pitch, across * pitch + len(weights))
                picture[rows, places] = weights / max(float(weights.max()), 1e-30)
    names = [shorten(name, 36) for name in shown]
    # The matrices have the width that the names and the colour bar leave.
    width = drawing.WIDTH - 0.9 - drawing.LETTER_WIDTH * max(map(len, names))
    figure = drawing.new_figure(width * len(shown) / len(columns) + 0.3)
    axes = figure.subplots()
    image = axes.imshow(picture, cmap="Greys", vmin=0, vmax=1, interpolation="antialiased")
    bar = figure.colorbar(image, ax=axes, aspect=40, fraction=0.02, pad=0.01)
    bar.set_label("weight / largest weight of the matrix", fontsize=7)
    middle = (side - 1) / 2
    axes.set_yticks([middle + pitch * i for i in range(len(shown))], names)
    titles = [f"L{layer} H{head + 1}" for layer, head in columns]
    axes.set_xticks([middle + pitch * i for i in range(len(columns))], titles)
    axes.tick_params(length=0, labeltop=True, labelbottom=False)
    axes.grid(False)
    axes.spines[:].set_visible(False)
    return figure


def _draw_heads(diagnostics: Diagnostics, baseline: str) -> "Figure | None":
    """Draw a panel for each variant: captured variance by layer, with the baseline's in grey."""
    circuits = {"captured-qk": (COLOURS[0], "-"), "captured-ov": (COLOURS[1], "--")}
    values = _final_values(diagnostics.select(*circuits))
    variants = [name for name in values["variant"].unique() if name != baseline]
    variants = (variants or list(values["variant"].unique()))[: drawing.MOST_PANELS]
    if not variants:
        return None
    figure, panels = drawing.new_panels(len(variants), legend_lines=1)
    for axes, variant in zip(panels, variants, strict=True):
        for name, (colour, dash) in circuits.items():
            curves = values[values["name"] == name].set_index(["variant", "layer"])["value"]
            if baseline in curves.index and variant != baseline:
                drawing.draw_band(axes, curves.loc[baseline], GREY, dash, alpha=0.1)
            if variant in curves.index:
                drawing.draw_band(axes, curves.loc[variant], colour, dash, alpha=0.1)
        axes.set_title(drawing.panel_title(variant))
    drawing.use_integer_ticks(panels[0])
    figure.supxlabel("layer", fontsize=8)
    figure.supylabel("captured variance", fontsize=8)
    key = {"QK": circuits["captured-qk"], "OV": circuits["captured-ov"]}
    drawing.add_legend(figure, key | ({baseline: (GREY, "-")} if baseline not in variants else {}))
    return figure


def _final_values(values: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of the last recorded step of each quantity."""
    groups = values.groupby(["variant", "layer", "head", "name"], dropna=False)
    return values[values["step"] == groups["step"].transform("max")]


def make_mixture_table(diagnostics: Diagnostics) -> Table:
    """Return the learned weights pi of every head and layer, without rows if there are none."""
    values = diagnostics.values
    values = _final_values(values[values["name"].str.match(r"pi-\d+$")])
    layers = sorted(values["layer"].unique())
    rows = []
    for (variant, head), weights in values.groupby(["variant", "head"], sort=False, dropna=False):
        texts = [_format_weights(weights[weights["layer"] == layer]) for layer in layers]
        rows.append(
            [Cell(text) for text in (str(variant), "all" if head is pd.NA else str(head), *texts)]
        )
    return named_table("mixture", rows, [f"layer {layer}" for layer in layers])


def _format_weights(weights: pd.DataFrame) -> str:
    groups = weights.groupby(weights["name"].str.removeprefix("pi-").astype(int))["value"]
    summary = groups.agg(["mean", "std"]).itertuples(index=False)
    return " / ".join(format_spread(mean, sd, 3) for mean, sd in summary) or NOTHING
