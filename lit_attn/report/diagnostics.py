"""Figures and the table of what cells recorded of their attention layers (docs/diagnostics.md)."""

import html
import statistics
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from lit_attn.report.attention import Place, Recorded, maps_of, ranks
from lit_attn.report.style import COLOURS, GREY, Curve, band, new_figure, sd

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FIGURES = {
    "norms": "Length of what the heads attend to, MH (solid), and of what is left of it without "
    "its projection onto the tokens' own values V, Δ (dashed), of every layer over training: mean "
    "over tokens and samples, band of one standard deviation over seeds (BeliefFormer, Fig. 3).",
    "angles": "Cosine of the angle between a token X and what the layer would add to it: MH W "
    "(solid) and Δ W (dashed), of every layer over training; 0 is at right angles. Mean over "
    "tokens and samples, band of one standard deviation over seeds (BeliefFormer, Fig. 3).",
    "ranks": "Rank of the attention matrices after training: singular values of at least 1e-6. "
    "Each strip is the distribution over heads, samples and seeds, its highest bar as high as the "
    "strip; lines are the seeds' means (MGK, Fig. 2 and 7).",
    "maps": "Attention matrices of layers L and heads H after training, of one evaluation sample, "
    "first seed: queries down, keys across. The darkest is the largest weight of each matrix; "
    "negative weights, which composed heads may have, are white (MGK, Fig. 2 and 6).",
    "heads": "Captured variance of the heads' QK circuits (solid) and OV circuits (dashed), by "
    "layer after training: lower is more diverse. Mean and one standard deviation over seeds; the "
    "baseline in grey (DCMHA, Fig. 5).",
}

# Figure to the table of what it shows.
TABLES = {
    "norms": "diagnostics.csv",
    "angles": "diagnostics.csv",
    "ranks": "ranks.csv",
    "heads": "diagnostics.csv",
}

# A figure shows so many layers, from the first to the last, and so many heads of each.
LAYERS, MAP_LAYERS, HEADS = 4, 3, 4

TINY = 1e-30

# Layers told apart by colour in a legend; beyond, the first, the middle and the last.
NAMED_LAYERS = 8

SUBSCRIPTS = str.maketrans("0123456789", "₀₁₂₃₄₅₆₇₈₉")


def drawn(recorded: dict[str, Recorded], baseline: str) -> "dict[str, Callable[[], Figure | None]]":
    """What draws each of FIGURES; None comes back where there is no record of it."""
    return {
        "norms": lambda: _over_training(recorded, "norm", "‖MH‖, ‖Δ‖"),
        "angles": lambda: _over_training(recorded, "cos", "cosine of the angle to X"),
        "ranks": lambda: _ranks(recorded),
        "maps": lambda: _maps(recorded),
        "heads": lambda: _heads(recorded, baseline),
    }


def _over_training(recorded: dict[str, Recorded], what: str, label: str) -> "Figure | None":
    """A panel per variant, a colour per layer: of MH solid, of Delta dashed."""
    shown = {
        name: one for name, one in recorded.items() if _any_of(one, (f"{what}-mh", f"{what}-delta"))
    }
    if not shown:
        return None
    layers = sorted({layer for one in shown.values() for layer in one.layers})
    colours = dict(zip(layers, _scale(len(layers)), strict=True))
    figure, panels = _panels(len(shown), legend=2)
    for axes, (name, one) in zip(panels, shown.items(), strict=False):
        for layer in one.layers:
            for of, dash in (("mh", "-"), ("delta", "--")):
                curve = one.curves.get(Place(layer, None, f"{what}-{of}"), {})
                _line(axes, curve, colours[layer], dash)
        axes.set_title(name)
    if what == "norm":
        panels[0].set_ylim(bottom=0)
    else:
        for axes in panels:
            axes.axhline(0, color=GREY, linewidth=0.6, zorder=1)
    _whole_numbers(panels[0])
    figure.supxlabel("step", fontsize=8)
    figure.supylabel(label, fontsize=8)
    key = {f"layer {layer}": (colours[layer], "-") for layer in _some(layers, NAMED_LAYERS)}
    key |= {"MH": ("black", "-"), "Δ": ("black", "--")}
    _legend(figure, key)
    return figure


def _ranks(recorded: dict[str, Recorded]) -> "Figure | None":
    """A strip per variant and layer: how many of its attention matrices have which rank."""
    shown = {name: one for name, one in recorded.items() if any("rank.1" in a for a in one.arrays)}
    if not shown:
        return None
    layers = _some(sorted({layer for one in shown.values() for layer in one.layers}), LAYERS)
    figure = new_figure(0.26 * len(shown) + 0.75)
    panels = figure.subplots(1, len(layers), sharey=True, squeeze=False)[0]
    every = np.concatenate([ranks(one, layer) for one in shown.values() for layer in layers])
    low, high = int(every.min()), int(every.max())
    step = max(1, -(-(high - low + 1) // 40))
    edges = np.arange(low, high + step + 1, step) - 0.5
    for axes, layer in zip(panels, layers, strict=True):
        for place, one in enumerate(shown.values()):
            found = ranks(one, layer)
            if not len(found):
                continue
            counts, _ = np.histogram(found, edges)
            heights = 0.8 * counts / counts.max()
            bottom = place + 0.4
            axes.bar(edges[:-1], -heights, step, bottom, align="edge", color=COLOURS[0], alpha=0.5)
            for arrays in one.arrays:
                mean = arrays[f"rank.{layer}"].mean()
                axes.plot([mean, mean], [place - 0.4, bottom], color="black", linewidth=0.7)
        axes.set_title(f"layer {layer}")
        axes.set_xlim(edges[0], edges[-1])
        _whole_numbers(axes)
    panels[0].set_yticks(range(len(shown)), list(shown))
    panels[0].set_ylim(len(shown) - 0.5, -0.5)
    figure.supxlabel("rank", fontsize=8)
    return figure


def _maps(recorded: dict[str, Recorded]) -> "Figure | None":
    """A row per variant: some heads of some layers, all in one picture."""
    shown = {
        name: maps
        for name, one in recorded.items()
        if one.arrays and (maps := maps_of(one.arrays[0]))
    }
    if not shown:
        return None
    every = [layer_maps for maps in shown.values() for layer_maps in maps.values()]
    layers = _some(sorted({layer for maps in shown.values() for layer in maps}), MAP_LAYERS)
    heads = min(HEADS, max(len(layer_maps) for layer_maps in every))
    side = max(layer_maps.shape[-1] for layer_maps in every)
    pitch = side + max(1, side // 12)
    columns = [(layer, head) for layer in layers for head in range(heads)]
    picture = np.zeros((len(shown) * pitch, len(columns) * pitch))
    for down, maps in enumerate(shown.values()):
        for across, (layer, head) in enumerate(columns):
            if head < len(maps.get(layer, ())):
                weights = maps[layer][head].clip(0)
                rows = slice(down * pitch, down * pitch + len(weights))
                places = slice(across * pitch, across * pitch + len(weights))
                picture[rows, places] = weights / max(float(weights.max()), TINY)
    figure = new_figure(5.8 * len(shown) / len(columns) + 0.3)
    axes = figure.subplots()
    axes.imshow(picture, cmap="Greys", vmin=0, vmax=1, interpolation="antialiased")
    middle = (side - 1) / 2
    axes.set_yticks([middle + pitch * i for i in range(len(shown))], list(shown))
    titles = [f"L{layer} H{head + 1}" for layer, head in columns]
    axes.set_xticks([middle + pitch * i for i in range(len(columns))], titles)
    axes.tick_params(length=0, labeltop=True, labelbottom=False)
    axes.grid(False)
    axes.spines[:].set_visible(False)
    return figure


def _heads(recorded: dict[str, Recorded], baseline: str) -> "Figure | None":
    """A panel per variant: captured variance by layer, the baseline's behind it."""
    circuits = (("captured-qk", COLOURS[0], "-"), ("captured-ov", COLOURS[1], "--"))
    names = tuple(name for name, _, _ in circuits)
    shown = {name: one for name, one in recorded.items() if _any_of(one, names)}
    if len(shown) > 1:
        shown = {name: one for name, one in shown.items() if name != baseline}
    if not shown:
        return None
    figure, panels = _panels(len(shown), legend=1)
    for axes, (title, one) in zip(panels, shown.items(), strict=False):
        for name, colour, dash in circuits:
            if baseline in recorded and title != baseline:
                _line(axes, _by_layer(recorded[baseline], name), GREY, dash)
            _line(axes, _by_layer(one, name), colour, dash)
        axes.set_title(title)
    _whole_numbers(panels[0])
    figure.supxlabel("layer", fontsize=8)
    figure.supylabel("captured variance", fontsize=8)
    key = {"QK": (COLOURS[0], "-"), "OV": (COLOURS[1], "--")}
    _legend(figure, key | ({baseline: (GREY, "-")} if baseline not in shown else {}))
    return figure


def mixture_table(recorded: dict[str, Recorded]) -> str:
    """The learned pi of every head and layer as a `<table>`; empty where no variant has any."""
    rows = []
    layers = sorted({layer for one in recorded.values() for layer in one.layers})
    for variant, one in recorded.items():
        heads = {place.head for place in one.curves if place.name == "pi-1"}
        for head in sorted(heads, key=lambda of: of or 0):
            cells = "".join(f"<td>{_pi(one, layer, head)}</td>" for layer in layers)
            of = "all" if head is None else str(head)
            rows.append(f'<tr><th scope="row">{html.escape(variant)}</th><td>{of}</td>{cells}</tr>')
    if not rows:
        return ""
    titles = ["variant", "head", *(f"layer {layer}" for layer in layers)]
    columns = "".join(f'<th scope="col">{title}</th>' for title in titles)
    return (
        "<table>\n<caption><strong>Learned weights of the keys of a mixture, π₁ / π₂ / …</strong> "
        "After training, mean ± standard deviation over the seeds that finished (MGK, Table 8)."
        f"</caption>\n<thead><tr>{columns}</tr></thead>\n"
        "<tbody>\n" + "\n".join(rows) + "\n</tbody>\n</table>\n"
    )


def _pi(one: Recorded, layer: int, head: int | None) -> str:
    shown: list[str] = []
    while values := one.last(Place(layer, head, f"pi-{len(shown) + 1}")):
        spread = f" ± {sd(values):.3f}" if len(values) > 1 else ""
        shown.append(f"{statistics.fmean(values):.3f}{spread}")
    return " / ".join(shown) or "\N{EM DASH}"


def _by_layer(one: Recorded, name: str) -> Curve:
    found = {layer: one.last(Place(layer, None, name)) for layer in one.layers}
    return {layer: values for layer, values in found.items() if values}


def _any_of(one: Recorded, names: tuple[str, ...]) -> bool:
    return any(place.name in names for place in one.curves)


def _line(axes: "Axes", curve: Curve, colour: Any, dash: str) -> None:
    if curve:
        # Several lie over each other.
        band(axes, curve, colour, dash, alpha=0.1)
    if len(curve) == 1:
        # A line of one point is not to be seen.
        axes.plot(list(curve), [statistics.fmean(*curve.values())], ".", color=colour)


def _panels(count: int, legend: int) -> "tuple[Figure, list[Axes]]":
    """`count` panels with common axes, four in a row, and room for lines of a legend."""
    columns = min(4, count)
    lines = -(-count // columns)
    figure = new_figure(1.35 * lines + 0.55 + 0.17 * legend)
    panels = list(figure.subplots(lines, columns, sharex=True, sharey=True, squeeze=False).flat)
    for place, axes in enumerate(panels[count:], start=count):
        axes.set_visible(False)
        panels[place - columns].tick_params(labelbottom=True)
    return figure, panels


def _whole_numbers(axes: "Axes") -> None:
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(4, integer=True))


def _legend(figure: "Figure", key: dict[str, tuple[Any, str]]) -> None:
    from matplotlib.lines import Line2D

    handles = [
        Line2D([], [], color=colour, ls=dash, label=label) for label, (colour, dash) in key.items()
    ]
    figure.legend(handles=handles, loc="outside upper center", ncols=6)


def _some(values: list[int], most: int) -> list[int]:
    """At most so many, evenly from the first to the last."""
    if len(values) <= most:
        return values
    return [values[round(i * (len(values) - 1) / (most - 1))] for i in range(most)]


def _scale(count: int) -> list[Any]:
    """Colours in an order that the eye sees: dark is early."""
    from matplotlib import colormaps

    return [colormaps["viridis"](0.85 * i / max(1, count - 1)) for i in range(count)]
