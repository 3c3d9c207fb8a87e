"""Drawings of a composition of heads, as in Figures 7 and 8 of DCMHA (head_analysis.py)."""

from typing import TYPE_CHECKING, Any

import numpy as np

from lit_attn.report.figures import drawing

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_PARTS = 4  # Largest number of dynamic weights in Figure 8, which shows several rows only.
MOST_TOKENS = 32  # Largest number of the last tokens in Figure 8.


def draw_breakdown(
    columns: dict[str, list[float]], parts: dict[str, list[list[float]]], place: int
) -> "Figure":
    """Draw the terms of the weights of each head side by side, and the maps of the token `place`.

    `columns` has the values of the heads by term. `parts` has the dynamic weights (tokens, heads)
    by name; those of the query have one token.
    """
    heads = len(columns["after"])
    figure = drawing.new_figure(max(2.0, 0.13 * heads + 1.2))
    left, right = figure.subplots(1, 2, width_ratios=(len(columns), max(1, len(parts))))
    _draw_matrix(left, np.array(list(columns.values())).T, list(columns), "weights")
    maps = []
    for values in parts.values():
        token = place if len(values) > 1 else 0
        maps.append(values[token])
    if maps:
        _draw_matrix(right, np.array(maps).T, list(parts), "dynamic weights")
    right.set_visible(bool(maps))
    left.set_yticks(range(1, heads + 1))
    right.set_yticks([])
    left.set_ylabel("head")
    return figure


def draw_distributions(
    weights: dict[str, list[list[float]]], parts: dict[str, list[list[float]]], tokens: list[str]
) -> "Figure":
    """Draw the dynamic weights along the sequence, and the weights of the heads below them.

    `weights` has (heads, tokens) by name. At most MOST_TOKENS tokens are shown, the last ones.
    """
    panels: dict[str, np.ndarray[Any, Any]] = {}
    for name, values in parts.items():
        if len(values) > 1 and len(panels) < MOST_PARTS:
            panels[name] = np.array(values).T
    for name, rows in weights.items():
        panels[f"weights {name} composition"] = np.array(rows)
    heads = len(next(iter(weights.values())))
    figure = drawing.new_figure((0.09 * heads + 0.45) * len(panels) + 0.6)
    all_axes = figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
    for axes, (name, matrix) in zip(all_axes, panels.items(), strict=True):
        _draw_matrix(axes, matrix[:, -MOST_TOKENS:], [], name)
        axes.set_ylabel("head")
        axes.locator_params(axis="y", integer=True)
    # A line feed or a dollar sign would change the layout of a label.
    labels = []
    for token in tokens[-MOST_TOKENS:]:
        escaped = repr(token)[1:-1]
        labels.append(escaped.replace("$", "\\$"))
    all_axes[-1].set_xticks(range(len(labels)), labels, rotation=90)
    return figure


def _draw_matrix(
    axes: "Axes", values: "np.ndarray[Any, Any]", names: list[str], title: str
) -> None:
    """Draw a matrix with zero in white, positive values in red and negative ones in blue."""
    largest = float(np.abs(values).max()) or 1.0
    # Heads are numbered from 1.
    extent = (-0.5, values.shape[1] - 0.5, len(values) + 0.5, 0.5)
    axes.imshow(values, "RdBu_r", aspect="auto", vmin=-largest, vmax=largest, extent=extent)
    axes.set_xticks(range(len(names)), names, rotation=60, ha="right")
    axes.set_title(f"{title} (up to {largest:.2g})")
    axes.grid(False)
