"""How figures look: sizes, colours, bands; and what they have in common."""

import statistics
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe & Ito's colours, told apart by colour-blind readers, and markers that repeat the message.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
GREY = "#8a8a8a"

# Typed by matplotlib as a dictionary of its hundreds of literal keys.
SETTINGS: Any = {
    "text.parse_math": False,  # a dollar sign in a name is one
    "svg.hashsalt": "lit_attn",
    "svg.fonttype": "path",
    "font.size": 8,
    "axes.titlesize": 8,
    "axes.linewidth": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e6e6e6",
    "grid.linewidth": 0.6,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "legend.frameon": False,
}

# Time in training (epochs or steps) to the values of all seeds.
Curve = dict[int, list[float]]

WIDTH = 7.2  # inches: the text of a two-column page


def new_figure(height: float) -> "Figure":
    """As wide as the text and `height` inches high.

    Without pyplot, whose figures and back end are the importing program's own business.
    """
    from matplotlib.figure import Figure

    return Figure(figsize=(WIDTH, height), layout="constrained")


def band(axes: "Axes", curve: Curve, colour: str, dash: str, alpha: float = 0.2) -> None:
    """The mean over training, in a band of one standard deviation; `alpha` is the band's."""
    means = [statistics.fmean(values) for values in curve.values()]
    low = [mean - sd(values) for mean, values in zip(means, curve.values(), strict=True)]
    high = [mean + sd(values) for mean, values in zip(means, curve.values(), strict=True)]
    axes.fill_between(list(curve), low, high, color=colour, alpha=alpha, linewidth=0)
    axes.plot(list(curve), means, color=colour, linestyle=dash, linewidth=1.1)


def sd(values: list[float]) -> float:
    """Standard deviation (ddof 1), 0 of one value."""
    return statistics.stdev(values) if len(values) > 1 else 0.0
