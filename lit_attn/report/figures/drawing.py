"""Appearance and building blocks of every figure: size, colours, curves, panels, legends.

Equal records give equal bytes on every processor: coordinates in SVG files are rounded, ids are
hashes of rounded content, and files hold no dates.
"""

import hashlib
import io
import json
import math
import re
import textwrap
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from lit_attn.report.numbers import write_number
from lit_attn.report.tables.formats import read_text

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from lit_attn.cells.records import Metric, Plan

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
"""Palette of Okabe and Ito, which colour-blind readers can tell apart."""
GREY = "#8a8a8a"

WIDTH = 7.2  # Inches; a two-column page.
LINE_HEIGHT = 0.17  # Inches; a line of a legend.
LETTER_WIDTH = 0.07  # Inches.
VERTICAL_CHARACTERS = (
    28  # Characters in a line of a vertical label: two inches, as small panels have.
)

MOST_ROWS = 120  # Variants in a figure with a row for each variant.
MOST_PANELS = 24  # Variants in a figure with a panel for each variant.
MOST_COSTS = 16  # Variants in the figure of costs.
MOST_LINES = len(COLOURS)  # Variants with a line without a band in one panel.
MOST_BANDS = 4  # Variants with a band in one panel; more bands hide each other.

COORDINATE_DECIMALS = 3
"""Decimals of coordinates in SVG files, in points: 1e-3 is a hundredth of a printer's dot."""

GEOMETRY = re.compile(r' (?:d|x|y|width|height)="[^"]*"|translate\([^)]*\)')
"""Attributes and transformations of an SVG file that hold coordinates."""

LONG_DECIMAL = re.compile(rf"-?\d+\.\d{{{COORDINATE_DECIMALS + 1},}}")

DEFINITION = re.compile(
    r'<path id="(m[0-9a-f]{10})"([^>]*)>|<clipPath id="(p[0-9a-f]{10})">(.*?)</clipPath>', re.DOTALL
)
"""Markers and clipping areas, whose ids matplotlib derives from unrounded coordinates."""

DASHES = ("-", "--", ":", "-.")
MARKERS = "os^DvPX*"


class Style(NamedTuple):
    """Colour, line style and marker of a variant, the same in every figure of a study."""

    colour: str
    dash: str
    marker: str


Key = dict[str, tuple[Any, str]]  # Colour and line style by legend label.
Curve = tuple["pd.Series[float]", Any, str]  # Values by x, colour, line style.


def appearance() -> AbstractContextManager[None]:
    """Apply report.mplstyle in place of the user's matplotlibrc, which would change the bytes."""
    from matplotlib import style

    lines = read_text("report.mplstyle").splitlines()
    settings = dict(line.split(": ", 1) for line in lines if line and not line.startswith("#"))
    return style.context(settings, after_reset=True)


def render(figure: "Figure") -> dict[str, bytes]:
    """Return the figure as SVG and PNG files without dates, by kind."""
    svg = io.BytesIO()
    figure.savefig(svg, format="svg", dpi=200, metadata={"Date": None})
    # The layout takes half of the time, and is the same for both kinds.
    figure.set_layout_engine("none")
    png = io.BytesIO()
    figure.savefig(png, format="png", dpi=200, metadata={"Software": None})
    return {"svg": stabilise_svg(svg.getvalue().decode()).encode(), "png": png.getvalue()}


def stabilise_svg(svg: str) -> str:
    """Round the coordinates of an SVG file, and derive the ids of definitions from the result.

    The last digits of a coordinate differ between processors. Ids stay unique on a page with
    several figures, because they are hashes of the content of a definition.
    """
    rounded = GEOMETRY.sub(lambda part: LONG_DECIMAL.sub(_round_coordinate, part[0]), svg)
    names = {}
    for marker, attributes, area, content in DEFINITION.findall(rounded):
        name = marker or area
        digest = hashlib.sha256((attributes or content).encode()).hexdigest()
        names[name] = name[0] + digest[:10]
    pattern = r'(?<=id="|f="#|rl\(#)[mp][0-9a-f]{10}(?=["\)])'
    return re.sub(pattern, lambda match: names.get(match[0], match[0]), rounded)


def _round_coordinate(match: re.Match[str]) -> str:
    text = f"{float(match[0]):.{COORDINATE_DECIMALS}f}".rstrip("0").rstrip(".")
    return "0" if text == "-0" else text


def short(value: float) -> str:
    """Return a number with four significant digits, for the labels of points."""
    return write_number(value, ".4g")


def new_figure(height: float) -> "Figure":
    """Return an empty figure of WIDTH and `height` inches.

    It does not use pyplot, whose state belongs to the importing program.
    """
    from matplotlib.figure import Figure

    return Figure(figsize=(WIDTH, height), layout="constrained")


def assign_styles(plan: "Plan") -> dict[str, Style]:
    """Return the style of every variant by name: the baseline first, then the order of the plan.

    The criteria of `match` of one variant share its colour and marker, and each has a line style.
    The name of a variant without its criterion has the style of its first criterion.
    """
    baseline = next(variant for variant in plan.variants if variant.name == plan.baseline)
    others = [variant for variant in plan.variants if variant.name != plan.baseline]
    # Names of the variants' criteria, by the name without a criterion.
    criteria: dict[str, list[str]] = {}
    for variant in [baseline, *others]:
        criteria.setdefault(variant.variant or variant.name, []).append(variant.name)
    styles = {}
    for place, (base, names) in enumerate(criteria.items()):
        colour = COLOURS[place % len(COLOURS)]
        marker = MARKERS[place % len(MARKERS)]
        for number, name in enumerate(names):
            dash = DASHES[(place // len(COLOURS) + number) % len(DASHES)]
            styles[name] = Style(colour, dash, marker)
        styles.setdefault(base, styles[names[0]])
    return styles


def name_axis(label: str, goal: str, is_vertical: bool = False) -> str:
    """Return the label of an axis of a metric with an arrow towards better values."""
    if is_vertical:
        return wrap_vertical(f"{label}, {'better ↑' if goal == 'max' else 'better ↓'}")
    return f"{label}, {'better →' if goal == 'max' else '← better'}"


def wrap_vertical(label: str) -> str:
    """Return the label of a vertical axis in lines that fit the height of a small figure."""
    words = re.sub(" ([↑↓])", "\N{NO-BREAK SPACE}\\1", label)
    return "\n".join(textwrap.wrap(words, VERTICAL_CHARACTERS, break_on_hyphens=False))


def draw_panels(curves: dict[str, list[Curve]], x: str, y: str, key: Key) -> "Figure | None":
    """Draw a panel with the curves of each of at most MOST_PANELS variants."""
    shown = dict(list(curves.items())[:MOST_PANELS])
    if not shown:
        return None
    columns = min(4, len(shown))
    rows = math.ceil(len(shown) / columns)
    figure = new_figure(1.35 * rows + 0.55 + 2 * LINE_HEIGHT)
    panels = list(figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False).flat)
    titles = short_names(shown, 48)
    for axes, title, (variant, bands) in zip(panels, titles, shown.items(), strict=False):
        for values, colour, dash in bands:
            draw_band(axes, values, colour, dash, label=variant)
        # A title has at most two lines, broken at commas if possible.
        parts = textwrap.wrap(title.replace(",", ", "), 26, break_on_hyphens=False)[:2]
        axes.set_title("\n".join(parts).replace(", ", ","))
    for place, axes in enumerate(panels[len(shown) :], start=len(shown)):
        axes.set_visible(False)
        # The panel above is the lowest one of its column.
        panels[place - columns].tick_params(labelbottom=True)
    panels[0].locator_params(axis="x", nbins=4, integer=True)
    figure.supxlabel(x, fontsize=8)
    figure.supylabel(wrap_vertical(y), fontsize=8)
    add_legend(figure, key)
    return figure


def draw_band(axes: "Axes", curve: "pd.Series[float]", colour: Any, dash: str, label: str) -> None:
    """Draw the mean of a curve, which has the values of all seeds by time, in a band of one sd."""
    groups = curve.groupby(level=0)
    means = groups.mean()
    spreads = groups.std().fillna(0)
    if len(means) == 1:
        # A line of one point is invisible.
        style = {"fmt": ".", "color": colour, "elinewidth": 0.8}
        draw_points(axes, (means.index, means, spreads), label, means.index, **style)
    elif len(means):
        band = axes.fill_between(
            means.index, means - spreads, means + spreads, color=colour, alpha=0.1, linewidth=0
        )
        (line,) = axes.plot(means.index, means, color=colour, linestyle=dash, linewidth=1.1)
        name_values(band, label)
        pairs = zip(means.index, means, strict=True)
        name_values(line, label, (f"{short(mean)} at {short(x)}" for x, mean in pairs))


def draw_points(axes: Any, points: Any, label: str, at: Iterable[object], **style: Any) -> Any:
    """Draw points (x, y, sizes of the error bars) of a variant; the page names y and `at`."""
    drawn = axes.errorbar(*points, **style)
    line, _, bars = drawn.lines
    pairs = zip(np.atleast_1d(points[1]), at, strict=True)
    # The SVG file has no marker for a missing value.
    name_values(line, label, (f"{short(y)} at {x}" for y, x in pairs if not np.isnan(y)))
    name_values(bars[0], label)
    return drawn


def use_log_scale(axes: "Axes", name: str) -> None:
    """Make the axis `name` ("x" or "y") logarithmic; report.mplstyle prints no powers as text."""
    from matplotlib.ticker import LogFormatter

    getattr(axes, f"set_{name}scale")("log")
    axis = getattr(axes, f"{name}axis")
    axis.set_major_formatter(LogFormatter())
    axis.set_minor_formatter(LogFormatter())


def name_values(artist: "Artist", label: str, texts: Iterable[str] = ()) -> None:
    """Write the label of an artist and the text of each point into the SVG file, for the page."""
    artist.set_gid(json.dumps([label, *texts]))


def shorten(name: str, letters: int) -> str:
    """Return `name` with at most `letters` characters.

    Words are left out at the end of a longer name, or letters in the middle of a word or setting.
    """
    if len(name) <= letters:
        return name
    start, blank, _ = name[:letters].rpartition(" ")
    if blank and "=" not in name and len(start) >= letters // 2:
        return f"{start}…"
    head = (letters - 1) // 2
    return f"{name[:head]}…{name[head + 1 - letters :]}"


def short_names(names: Iterable[str], letters: int) -> list[str]:
    """Return the names, without what all long names have in common, shortened to `letters`.

    That are terms and, if this is not enough, the keys of terms `key=value`, then words between
    hyphens and the like. No two different names look the same.
    """
    written = list(names)
    names = list(dict.fromkeys(written))
    short = dict(zip(names, _shorten_different(names, letters), strict=True))
    return [short[name] for name in written]


def _shorten_different(names: list[str], letters: int) -> list[str]:
    """Return names, which are all different, shortened to `letters`."""
    # Commas in braces belong to a term.
    terms = [re.split(r",(?![^{]*})", name) for name in names]
    long_names = []
    for name, parts in zip(names, terms, strict=True):
        if len(name) > letters:
            long_names.append(set(parts))
    shared = set.intersection(*long_names) if len(long_names) > 1 else set()
    rests = [",".join(term for term in parts if term not in shared) for parts in terms]
    if "" not in rests and len(set(rests)) == len(set(names)):
        names = rests
    if max(map(len, names), default=0) > letters:
        names = _drop_keys(names, letters)
    if max(map(len, names), default=0) > letters:
        names = _drop_words(names, letters)
    labels = [shorten(name, letters) for name in names]
    for label in {label for label in labels if labels.count(label) > 1}:
        places = [place for place, other in enumerate(labels) if other == label]
        # The first and the last one in alphabetical order share only what all of them share.
        ordered = sorted(names[place] for place in places)
        start = _shared_length(ordered[0], ordered[-1])
        for place in places:
            labels[place] = f"…{shorten(names[place][start:], letters - 1)}"
    return _number_equal_labels(labels, names, letters)


def _number_equal_labels(labels: list[str], names: list[str], letters: int) -> list[str]:
    """Return the labels of names, of which equal ones end in the place of the name."""
    numbered = []
    for place, (label, name) in enumerate(zip(labels, names, strict=True), start=1):
        if labels.count(label) > 1:
            mark = f"#{place}"
            label = shorten(name, letters - len(mark)) + mark
        numbered.append(label)
    return numbered


def _drop_words(names: list[str], letters: int) -> list[str]:
    """Return long names without words that all of them have, with a … in each gap.

    Words stand between hyphens, underscores, slashes or blanks. Shared words stay where there is
    room, first those that follow a word that differs. Names with different numbers of words, and
    names that would be equal, stay.
    """
    words = {name: re.split(r"(?<=[-_/ ])", name) for name in names if len(name) > letters}
    if len(words) < 2 or len({len(parts) for parts in words.values()}) > 1:
        return names
    columns = list(zip(*words.values(), strict=True))
    kept = {place for place, column in enumerate(columns) if len(set(column)) > 1}
    first = min(kept, default=0)
    shortened = {name: _join_words(parts, kept) for name, parts in words.items()}
    for place in [*range(first, len(columns)), *range(first)]:
        longer = {name: _join_words(parts, kept | {place}) for name, parts in words.items()}
        if max(map(len, longer.values())) <= letters:
            kept.add(place)
            shortened = longer
    labels = [shortened.get(name, name) for name in names]
    return labels if len(set(labels)) == len(set(names)) else names


def _join_words(words: list[str], kept: set[int]) -> str:
    """Return the words at the `kept` places, with a … in each gap but the last one."""
    parts = [word if place in kept else "…" for place, word in enumerate(words)]
    return re.sub(r"[-_/ ]?…+", "…", "".join(parts)).rstrip("…")


def _drop_keys(names: list[str], letters: int) -> list[str]:
    """Return long names as their values alone, if these names have the same keys in one order."""
    found_keys = set()
    shortened = []
    for name in names:
        pairs = [term.partition("=") for term in re.split(r",(?![^{]*})", name)]
        has_keys = all(separator for _, separator, _ in pairs)
        if has_keys and len(pairs) > 1:
            shortened.append(",".join(value for _, _, value in pairs))
            found_keys.add(tuple(key for key, _, _ in pairs))
        elif len(name) > letters:
            return names
        else:
            shortened.append(name)
    is_product = len(found_keys) == 1 and len(names) > 1
    is_unique = len(set(shortened)) == len(set(names))
    return shortened if is_product and is_unique else names


def _shared_length(first: str, second: str) -> int:
    """Return the length of the start that two names share, up to the end of a word."""
    length = 0
    for place, (letter, other) in enumerate(zip(first, second, strict=False), start=1):
        if letter != other:
            break
        if letter in "-,+_ ":
            length = place
    return length


def add_legend(figure: "Figure", key: Key) -> None:
    """Put a legend of lines above the panels."""
    from matplotlib.lines import Line2D

    names = short_names(key, 40)
    handles = []
    for name, (colour, dash) in zip(names, key.values(), strict=True):
        handles.append(Line2D([], [], color=colour, ls=dash, label=name))
    columns = fit_columns(names)
    figure.legend(handles=handles, loc="outside upper center", ncols=columns)


def fit_columns(names: Sequence[str]) -> int:
    """Return the entries of a legend that fit side by side if all are as wide as the longest."""
    longest = max((len(name) for name in names), default=0)
    fitting = int(WIDTH / (0.5 + LETTER_WIDTH * longest))
    return max(1, min(6, len(names), fitting))


def pick_evenly(values: list[int], most: int) -> list[int]:
    """Return at most `most` values, evenly spaced from the first to the last."""
    places = np.linspace(0, len(values) - 1, min(most, len(values)))
    return [values[round(place)] for place in places]


def usual_range(values: list[float], decided: Sequence[float] = ()) -> tuple[float, float]:
    """Return the range of `values` with a margin, without far outliers (three quartile ranges).

    The values in `decided`, those of variants with a star, are never left out.
    """
    if not values:
        return 0.0, 1.0
    low, high = np.percentile(values, [25, 75])
    reach = 3 * (high - low)
    inside = values
    if reach:
        inside = [value for value in values if low - reach <= value <= high + reach]
    inside = [*inside, *decided]
    margin = 0.06 * (max(inside) - min(inside)) or 0.05 * abs(inside[0]) or 0.5
    return min(inside) - margin, max(inside) + margin


def end_at_best(ends: tuple[float, float], metric: "Metric") -> tuple[float, float]:
    """Return the ends of an axis that does not reach beyond the best possible value.

    A fiftieth of its length stays, so that a dot at the best value is drawn completely.
    """
    low, high = ends
    if metric.best is None or not low < metric.best < high:
        return ends
    if metric.goal == "max":
        return low, min(high, metric.best + 0.02 * (metric.best - low))
    return max(low, metric.best - 0.02 * (high - metric.best)), high
