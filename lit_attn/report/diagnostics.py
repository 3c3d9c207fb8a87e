"""Figures and tables of the recorded attention diagnostics (docs/diagnostics.md), over all seeds.

Shapes: S samples, H heads, n tokens.
"""

import html
import statistics
import zipfile
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from lit_attn.cells.records import read_diagnostics
from lit_attn.report.drawing import (
    COLOURS,
    GREY,
    LETTER_WIDTH,
    MOST_PANELS,
    MOST_ROWS,
    WIDTH,
    Curve,
    add_legend,
    draw_band,
    new_figure,
    new_panels,
    panel_title,
    pick_evenly,
    sd,
    sequential_colours,
    shorten,
    use_integer_ticks,
)
from lit_attn.report.formats import html_table
from lit_attn.report.read import LOG, StudyRecord

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TEXTS = {
    "norms": "Norm of the concatenated head outputs MH (solid) and of their residual Δ after "
    "projection onto the token's own values V (dashed), for every layer over training: mean over "
    "tokens and samples, band of one standard deviation over seeds (BeliefFormer, Fig. 3).",
    "angles": "Cosine of the angle between a token X and the update of the layer, MH W (solid) or "
    "Δ W (dashed), for every layer over training. Mean over tokens and samples, band of one "
    "standard deviation over seeds (BeliefFormer, Fig. 3).",
    "ranks": "Rank of the attention matrices after training (number of singular values of at least "
    "1e-6). Each strip is the distribution over heads, samples and seeds, scaled to its highest "
    "bar; vertical lines are the means of the seeds (MGK, Fig. 2 and 7).",
    "maps": "Attention matrices of layers L and heads H after training, for one evaluation sample "
    "of the first seed (rows are queries, columns are keys). Each matrix is scaled to its largest "
    "weight; the negative weights of composed heads are white (MGK, Fig. 2 and 6).",
    "heads": "Captured variance of the QK circuits (solid) and OV circuits (dashed) of all heads "
    "by layer after training; lower means more diverse heads. Mean and one standard deviation over "
    "seeds; the baseline is grey (DCMHA, Fig. 5).",
}
CAPTIONS = {
    name: f"{caption} At most {MOST_ROWS if name == 'ranks' else MOST_PANELS} variants are shown."
    for name, caption in TEXTS.items()
}
"""Caption of each figure."""

TABLES = {
    "norms": "diagnostics.csv",
    "angles": "diagnostics.csv",
    "ranks": "ranks.csv",
    "heads": "diagnostics.csv",
}
"""File with the numbers behind each figure."""

# Numbers of layers in the figures of ranks and maps, and of heads for each layer of maps.
RANK_LAYERS, MAP_LAYERS, MAP_HEADS = 4, 3, 4
NAMED_LAYERS = 8
"""Largest number of layers in a legend; with more layers only some of them are named."""

Arrays = dict[str, NDArray[Any]]
UNREADABLE = (OSError, ValueError, EOFError, KeyError, zipfile.BadZipFile)


class Quantity(NamedTuple):
    """Name of a recorded value with its layer and head; `head` is None for a whole layer."""

    layer: int
    head: int | None
    name: str


@dataclass(frozen=True)
class Diagnostics:
    """Recorded diagnostics of one variant.

    `curves` has the values of all seeds over training. `arrays` has, for each seed, the arrays of
    the last evaluation: `rank.1` (S, H) and `map.1` (H, n, n) for layer 1.
    """

    curves: dict[Quantity, Curve] = field(default_factory=dict)
    arrays: list[Arrays] = field(default_factory=list)

    @property
    def layers(self) -> list[int]:
        """Layers with any recorded value."""
        return sorted({quantity.layer for quantity in self.curves})

    def final_values(self, quantity: Quantity) -> list[float]:
        """Return all seeds' values after the last step, or an empty list."""
        curve = self.curves.get(quantity, {})
        return curve[max(curve)] if curve else []

    def has_any(self, names: tuple[str, ...]) -> bool:
        """Return True if a value with one of these names was recorded."""
        return any(quantity.name in names for quantity in self.curves)

    def ranks(self, layer: int) -> NDArray[Any]:
        """Return the ranks of a layer's attention matrices over samples, heads and seeds, flat."""
        ranks = [arrays[f"rank.{layer}"] for arrays in self.arrays if f"rank.{layer}" in arrays]
        return np.concatenate([array.ravel() for array in ranks]) if ranks else np.zeros(0, int)

    def maps(self) -> dict[int, NDArray[Any]]:
        """Return the first seed's attention matrices (H, n, n) by layer."""
        arrays = self.arrays[0] if self.arrays else {}
        return {
            int(name.removeprefix("map.")): array
            for name, array in arrays.items()
            if name.startswith("map.")
        }


def read_study_diagnostics(study: StudyRecord) -> dict[str, Diagnostics]:
    """Read the diagnostics of all finished cells, by variant in the order of the plan.

    Variants without diagnostics are left out. Unreadable files are skipped with one warning.
    """
    diagnostics = {}
    unreadable: list[Path] = []
    for variant in study.plan.variants:
        folders = study.folders(variant.name)
        curves: dict[Quantity, Curve] = defaultdict(lambda: defaultdict(list))
        for folder in folders:
            for row in read_diagnostics(folder / "diagnostics.csv"):
                quantity = Quantity(row.layer, row.head, row.name)
                curves[quantity][row.step].append(row.value)
        if curves:
            arrays = [_read_arrays(folder / "attention.npz", unreadable) for folder in folders]
            ordered = {quantity: dict(sorted(curve.items())) for quantity, curve in curves.items()}
            diagnostics[variant.name] = Diagnostics(ordered, [a for a in arrays if a])
    if unreadable:
        LOG.warning(
            "%s: %d unreadable files are skipped, first %s",
            study.plan.study,
            len(unreadable),
            unreadable[0],
        )
    return diagnostics


def _read_arrays(path: Path, unreadable: list[Path]) -> Arrays:
    if not path.exists():
        return {}
    try:
        with path.open("rb") as stream, np.load(stream, allow_pickle=False) as arrays:
            return dict(arrays)
    except UNREADABLE:
        unreadable.append(path)
        return {}


def make_values_table(diagnostics: dict[str, Diagnostics]) -> pd.DataFrame:
    """Return one row for each recorded value: mean and standard deviation (ddof 1) over n seeds."""
    rows: list[tuple[Any, ...]] = []
    for name, variant in diagnostics.items():
        for quantity, curve in variant.curves.items():
            for step, values in curve.items():
                spread = sd(values) if len(values) > 1 else None
                rows.append((name, step, *quantity, statistics.fmean(values), spread, len(values)))
    columns = ["variant", "step", "layer", "head", "name", "mean", "sd", "n"]
    return pd.DataFrame(rows, columns=columns).astype({"head": "Int64"})


def make_ranks_table(diagnostics: dict[str, Diagnostics]) -> pd.DataFrame:
    """Return the number of attention matrices of each rank over all seeds, by variant and layer."""
    rows = []
    for name, variant in diagnostics.items():
        for layer in variant.layers:
            counts = np.unique(variant.ranks(layer), return_counts=True)
            rows += [(name, layer, int(r), int(count)) for r, count in zip(*counts, strict=True)]
    return pd.DataFrame(rows, columns=["variant", "layer", "rank", "matrices"])


def make_drawers(
    diagnostics: dict[str, Diagnostics], baseline: str
) -> "dict[str, Callable[[], Figure | None]]":
    """Map each figure of CAPTIONS to its drawing function.

    A function returns None if nothing was recorded for its figure.
    """
    return {
        "norms": lambda: _draw_over_training(diagnostics, "norm", "‖MH‖, ‖Δ‖"),
        "angles": lambda: _draw_over_training(diagnostics, "cos", "cosine of the angle to X"),
        "ranks": lambda: _draw_ranks(diagnostics),
        "maps": lambda: _draw_maps(diagnostics),
        "heads": lambda: _draw_heads(diagnostics, baseline),
    }


def _draw_over_training(
    diagnostics: dict[str, Diagnostics], name: str, label: str
) -> "Figure | None":
    """Draw a panel for each variant with a colour for each layer: MH solid, Δ dashed."""
    dashes = {f"{name}-mh": "-", f"{name}-delta": "--"}
    shown = _select(diagnostics, lambda d: d.has_any(tuple(dashes)), MOST_PANELS)
    if not shown:
        return None
    layers = _all_layers(shown.values())
    colours = dict(zip(layers, sequential_colours(len(layers)), strict=True))
    figure, panels = new_panels(len(shown), legend_lines=2)
    for axes, (variant, recorded) in zip(panels, shown.items(), strict=True):
        for layer in recorded.layers:
            for quantity, dash in dashes.items():
                curve = recorded.curves.get(Quantity(layer, None, quantity), {})
                # The bands of several layers overlap, so each one is faint.
                draw_band(axes, curve, colours[layer], dash, alpha=0.1)
        axes.set_title(panel_title(variant))
        if name == "cos":
            axes.axhline(0, color=GREY, linewidth=0.6, zorder=1)
    if name == "norm":
        panels[0].set_ylim(bottom=0)
    use_integer_ticks(panels[0])
    figure.supxlabel("step", fontsize=8)
    figure.supylabel(label, fontsize=8)
    key = {f"layer {layer}": (colours[layer], "-") for layer in pick_evenly(layers, NAMED_LAYERS)}
    add_legend(figure, key | {"MH": ("black", "-"), "Δ": ("black", "--")})
    return figure


def _draw_ranks(diagnostics: dict[str, Diagnostics]) -> "Figure | None":
    """Draw a histogram strip of the attention matrices' ranks for each variant and layer."""
    shown = _select(diagnostics, lambda d: any("rank.1" in a for a in d.arrays), MOST_ROWS)
    layers = pick_evenly(_all_layers(shown.values()), RANK_LAYERS)
    ranks = [rank for d in shown.values() for layer in layers for rank in d.ranks(layer).tolist()]
    if len(set(ranks)) < 2:
        # Ranks that are all equal need no figure; ranks.csv has them.
        return None
    figure = new_figure(0.26 * len(shown) + 0.75)
    panels = figure.subplots(1, len(layers), sharey=True, squeeze=False)[0]
    low, high = min(ranks), max(ranks)
    step = max(1, -(-(high - low + 1) // 40))
    edges = np.arange(low, high + step + 1, step) - 0.5
    for axes, layer in zip(panels, layers, strict=True):
        for row, recorded in enumerate(shown.values()):
            counts, _ = np.histogram(recorded.ranks(layer), edges)
            if not counts.any():
                continue
            heights = 0.8 * counts / counts.max()
            bottom = row + 0.4
            axes.bar(edges[:-1], -heights, step, bottom, align="edge", color=COLOURS[0], alpha=0.5)
            for arrays in recorded.arrays:
                if f"rank.{layer}" in arrays:
                    mean = arrays[f"rank.{layer}"].mean()
                    axes.plot([mean, mean], [row - 0.4, bottom], color="black", linewidth=0.7)
        axes.set_title(f"layer {layer}")
        axes.set_xlim(edges[0], edges[-1])
        use_integer_ticks(axes)
    panels[0].set_yticks(range(len(shown)), [shorten(name, 36) for name in shown])
    panels[0].set_ylim(len(shown) - 0.5, -0.5)
    figure.supxlabel("rank", fontsize=8)
    return figure


def _draw_maps(diagnostics: dict[str, Diagnostics]) -> "Figure | None":
    """Draw the attention matrices of some heads of some layers, one row for each variant."""
    selected = _select(diagnostics, lambda d: bool(d.maps()), MOST_PANELS)
    shown = {variant: recorded.maps() for variant, recorded in selected.items()}
    if not shown:
        return None
    layers = pick_evenly(sorted({layer for maps in shown.values() for layer in maps}), MAP_LAYERS)
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
    width = WIDTH - 0.9 - LETTER_WIDTH * max(map(len, names))
    figure = new_figure(width * len(shown) / len(columns) + 0.3)
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


def _draw_heads(diagnostics: dict[str, Diagnostics], baseline: str) -> "Figure | None":
    """Draw a panel for each variant: captured variance by layer, with the baseline's in grey."""
    circuits = (("captured-qk", COLOURS[0], "-"), ("captured-ov", COLOURS[1], "--"))
    names = tuple(name for name, _, _ in circuits)
    others = {v: d for v, d in diagnostics.items() if v != baseline}
    shown = _select(others, lambda d: d.has_any(names), MOST_PANELS)
    shown = shown or _select(diagnostics, lambda d: d.has_any(names), 1)
    if not shown:
        return None
    figure, panels = new_panels(len(shown), legend_lines=1)
    for axes, (variant, recorded) in zip(panels, shown.items(), strict=True):
        for name, colour, dash in circuits:
            if baseline in diagnostics and variant != baseline:
                draw_band(axes, _by_layer(diagnostics[baseline], name), GREY, dash, alpha=0.1)
            draw_band(axes, _by_layer(recorded, name), colour, dash, alpha=0.1)
        axes.set_title(panel_title(variant))
    use_integer_ticks(panels[0])
    figure.supxlabel("layer", fontsize=8)
    figure.supylabel("captured variance", fontsize=8)
    key = {"QK": (COLOURS[0], "-"), "OV": (COLOURS[1], "--")}
    add_legend(figure, key | ({baseline: (GREY, "-")} if baseline not in shown else {}))
    return figure


def _select(
    diagnostics: dict[str, Diagnostics], is_shown: Callable[[Diagnostics], bool], most: int
) -> dict[str, Diagnostics]:
    """Return the first `most` variants that have something to show."""
    names = [name for name, recorded in diagnostics.items() if is_shown(recorded)]
    return {name: diagnostics[name] for name in names[:most]}


def _by_layer(recorded: Diagnostics, name: str) -> Curve:
    values = {
        layer: recorded.final_values(Quantity(layer, None, name)) for layer in recorded.layers
    }
    return {layer: of_layer for layer, of_layer in values.items() if of_layer}


def _all_layers(diagnostics: Iterable[Diagnostics]) -> list[int]:
    return sorted({layer for recorded in diagnostics for layer in recorded.layers})


def make_mixture_table(diagnostics: dict[str, Diagnostics]) -> str:
    """Return the learned weights pi of every head and layer as an HTML table, or nothing."""
    rows = []
    layers = _all_layers(diagnostics.values())
    for variant, recorded in diagnostics.items():
        heads = {quantity.head for quantity in recorded.curves if quantity.name == "pi-1"}
        for head in sorted(heads, key=lambda head: head or 0):
            weights = (_format_weights(recorded, layer, head) for layer in layers)
            cells = "".join(
                f"<td>{text}</td>" for text in ("all" if head is None else head, *weights)
            )
            rows.append(f'<tr><th scope="row">{html.escape(variant)}</th>{cells}</tr>')
    if not rows:
        return ""
    sentence = (
        "<strong>Learned weights of the keys of a mixture, π₁ / π₂ / …</strong> After training, "
        "mean ± standard deviation over the seeds that finished (MGK, Table 8)."
    )
    return html_table(
        ["variant", "head", *(f"layer {layer}" for layer in layers)], rows, [sentence]
    )


def _format_weights(recorded: Diagnostics, layer: int, head: int | None) -> str:
    weights: list[str] = []
    while values := recorded.final_values(Quantity(layer, head, f"pi-{len(weights) + 1}")):
        spread = f" ± {sd(values):.3f}" if len(values) > 1 else ""
        weights.append(f"{statistics.fmean(values):.3f}{spread}")
    return " / ".join(weights) or "\N{EM DASH}"
