"""Figures of a study's results: differences of every seed, learning curves, costs."""

import math
import textwrap
from collections import defaultdict
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter

from lit_attn.cells.records import Metric
from lit_attn.report.figures import drawing
from lit_attn.report.figures.drawing import COLOURS, GREY
from lit_attn.report.records.study_record import BUSY_RATIO, StudyRecord
from lit_attn.report.tables.columns import STAR
from lit_attn.report.tables.effects import Effect
from lit_attn.report.tables.labels import find_blocks
from lit_attn.report.verdicts.comparison import Comparisons

EFFECT_LETTERS = 48  # Letters of a line of an effect's name.
STACK = 0.4  # Height of the dots of equal values, in rows.


class Difference(NamedTuple):
    """A row of a forest plot: its value with every seed, its interval, mean and star."""

    row: int
    name: str
    by_seed: list[float]
    low: float | None
    mean: float
    high: float | None
    is_starred: bool


def draw_seeds(study: StudyRecord, comparisons: Comparisons) -> Figure:
    """Draw a forest plot: the value and difference of every seed, and the margin as a band.

    Independent runs have a value each, and no differences but that of the means.
    """
    metric = study.plan.metric
    word = "mean" if study.test.has_means else "median"
    baseline = study.values(study.plan.baseline)
    names = _order_blocks(study, order_variants(study, comparisons))[: drawing.MOST_ROWS]
    places, headings = _place_rows(study, names)
    row_count = len(names) + len(headings)
    figure = drawing.new_figure(0.26 * row_count + 0.75)
    # A baseline alone has no differences.
    panel_count = 1 if len(names) == 1 else 2
    panels = figure.subplots(1, panel_count, sharey=True, squeeze=False)[0]
    left = panels[0]
    all_values: list[float] = []
    decided_values: list[float] = []
    for name in names:
        all_values += study.values(name).values()
        if comparisons.records[name].get("significant"):
            decided_values += study.values(name).values()
    ends = drawing.usual_range(all_values, decided_values)
    left.set_xlim(drawing.end_at_best(ends, metric))
    differences: list[Difference] = []
    labels = dict(headings)
    for name, label in zip(names, drawing.short_names(names, 36), strict=True):
        row = places[name]
        values = study.values(name)
        mean = study.center(name)
        _draw_dots(left, row, list(values.values()), name, mean, word)
        if mean is not None:
            bars = left.plot(mean, row, "|", color="black", markersize=13)
            drawing.name_values(bars[0], name, [f"{word} {drawing.short(mean)}"])
        record = comparisons.records[name]
        if name != study.plan.baseline and record.get("difference") is not None:
            difference = Difference(
                row=row,
                name=name,
                by_seed=study.test.list_differences(values, baseline),
                low=record.get("low"),
                mean=record["difference"],
                high=record.get("high"),
                is_starred=record["significant"],
            )
            differences.append(difference)
        planned = len(study.variant_cells(name))
        is_complete = len(values) == planned
        labels[row] = label if is_complete else f"{label} ({len(values)}/{planned})"
    left.set_yticks(range(row_count), [labels[row] for row in range(row_count)])
    for row in headings:
        left.get_yticklabels()[row].set_fontstyle("italic")
    label = drawing.name_axis(metric.label, metric.goal)
    left.set(xlabel=label, ylim=(row_count - 0.5, -0.5))
    if panel_count == 2:
        right = panels[1]
        _draw_differences(right, differences, word, metric.margin or 0.0)
        right.locator_params(axis="x", nbins=5)
        right.set_xlabel(drawing.name_axis("difference to the first row", metric.goal))
    return figure


def draw_effects(effects: list[Effect], metric: Metric, level: float) -> Figure | None:
    """Draw the effects of a factorial study as a forest plot, with a star for p <= `level`."""
    effects = effects[: drawing.MOST_ROWS]
    if not effects:
        return None
    # A long name has two lines.
    names = drawing.short_names([effect.label for effect in effects], 2 * EFFECT_LETTERS)
    lines = [textwrap.fill(name, EFFECT_LETTERS, break_on_hyphens=False) for name in names]
    row_height = 0.3 if any("\n" in line for line in lines) else 0.26
    figure = drawing.new_figure(row_height * len(effects) + 0.75)
    axes = figure.subplots()
    rows = []
    for place, effect in enumerate(effects):
        row = Difference(
            row=place,
            name=effect.label,
            by_seed=effect.by_seed,
            low=effect.low,
            mean=effect.difference,
            high=effect.high,
            is_starred=effect.p <= level,
        )
        rows.append(row)
    _draw_differences(axes, rows, "mean")
    axes.set_yticks(range(len(effects)), lines)
    axes.set_ylim(len(effects) - 0.5, -0.5)
    axes.set_xlabel(drawing.name_axis(f"effect on {metric.label}", metric.goal))
    return figure


def _draw_differences(axes: Axes, rows: list[Difference], word: str, margin: float = 0.0) -> None:
    """Draw the values of each row, below them the interval with a bar at the mean, and a band.

    A row without values and interval is its mean alone, which `word` names.
    """
    ends: list[float] = []
    decided_ends: list[float] = []
    for difference in rows:
        interval = [end for end in (difference.low, difference.high) if end is not None]
        row_ends = [*difference.by_seed, *interval] or [0.0, difference.mean]
        ends += row_ends
        if difference.is_starred:
            decided_ends += row_ends
    left, right = drawing.usual_range(ends, decided_ends)
    # Coordinates of a wider band leave the range of floating point.
    margin = min(margin, 1e6 * (right - left))
    axes.set_xlim(min(left, -1.1 * margin), max(right, 1.1 * margin))
    axes.axvspan(-margin, margin, color=GREY, alpha=0.18, linewidth=0)
    axes.axvline(0, color=GREY, linewidth=0.8)
    beside = axes.get_yaxis_transform()
    for row, name, by_seed, low, mean, high, is_starred in rows:
        _draw_dots(axes, row, by_seed, name, mean, word)
        if low is not None and high is not None:
            (line,) = axes.plot([low, high], [row + 0.24] * 2, color="black", linewidth=1)
            texts = [f"lower end {drawing.short(low)}", f"upper end {drawing.short(high)}"]
            drawing.name_values(line, name, texts)
        (bar,) = axes.plot(mean, row + 0.24, "|", color="black", markersize=6)
        drawing.name_values(bar, name, [f"{word} {drawing.short(mean)}"])
        if is_starred:
            star = axes.text(1.025, row, STAR, transform=beside, va="center", fontsize=11)
            drawing.name_values(star, name)


def order_variants(study: StudyRecord, comparisons: Comparisons) -> list[str]:
    """Return the baseline, then the other variants from the best to the worst difference."""
    sign = -1 if study.plan.metric.goal == "max" else 1

    def rank(name: str) -> tuple[bool, float]:
        difference = comparisons.records[name].get("difference")
        # A variant without results comes last.
        loss = math.inf if difference is None else sign * difference
        return name != study.plan.baseline, loss

    return sorted(comparisons.records, key=rank)


def _order_blocks(study: StudyRecord, names: list[str]) -> list[str]:
    """Return the baseline, then the variants of one criterion after those of another."""
    headings = find_blocks(study.plan)
    order = list(dict.fromkeys(headings.values()))

    def find_block(name: str) -> int:
        return order.index(headings[name]) if name in headings else -1

    return sorted(names, key=find_block)


def _place_rows(study: StudyRecord, names: list[str]) -> tuple[dict[str, int], dict[int, str]]:
    """Return the row of each variant, and the heading of each block by its row."""
    headings = find_blocks(study.plan)
    places: dict[str, int] = {}
    rows: dict[int, str] = {}
    for name in names:
        heading = headings.get(name)
        if heading is not None and heading not in rows.values():
            rows[len(places) + len(rows)] = heading
        places[name] = len(places) + len(rows)
    return places, rows


def _draw_dots(
    axes: Axes, row: int, values: list[float], name: str, mean: float | None, word: str
) -> None:
    """Draw one dot for each value; equal values are stacked, far outliers marked at the edge.

    A mean, or median, outside the axis is printed at its edge after its `word`.
    """
    low, high = axes.get_xlim()
    stacks: dict[int, list[float]] = defaultdict(list)
    for value in sorted(values):
        if low <= value <= high:
            stacks[round(100 * (value - low) / (high - low))].append(value)
    tallest = max(map(len, stacks.values()), default=0)
    # A high stack is compressed: it stays within its row.
    step = min(0.09, STACK / max(1, tallest - 1))
    x: list[float] = []
    y: list[float] = []
    for stack in stacks.values():
        x += stack
        y += [row - step * place for place in range(len(stack))]
    (line,) = axes.plot(x, y, "o", color=COLOURS[0], markersize=4, alpha=0.55, mew=0)
    drawing.name_values(line, name, map(drawing.short, x))
    below = [value for value in values if value < low]
    below_mean = mean if mean is not None and mean < low else None
    below_text = None if below_mean is None else f"{word} {drawing.short(below_mean)}"
    _mark_outliers(axes, row, below, below_text, name, edge=low, marker="<", align="left")
    above = [value for value in values if value > high]
    above_mean = mean if mean is not None and mean > high else None
    above_text = None if above_mean is None else f"{word} {drawing.short(above_mean)}"
    _mark_outliers(axes, row, above, above_text, name, edge=high, marker=">", align="right")


def _mark_outliers(
    axes: Axes,
    row: int,
    outliers: list[float],
    mean_text: str | None,
    name: str,
    edge: float,
    marker: str,
    align: str,
) -> None:
    """Draw a mark at an edge of the axes, with the range of the values and the mean beyond it."""
    if not outliers and mean_text is None:
        return
    parts = []
    if outliers:
        ends = [drawing.short(min(outliers)), drawing.short(max(outliers))]
        parts.append(" to ".join(dict.fromkeys(ends)))
    if mean_text is not None:
        parts.append(mean_text)
    text_of_values = ", ".join(parts)
    (line,) = axes.plot(edge, row, marker, color=COLOURS[1], markersize=5, clip_on=False)
    drawing.name_values(line, name, [text_of_values])
    style: dict[str, Any] = {"ha": align, "va": "bottom", "fontsize": 6.5}
    text = axes.text(edge, row - 0.1, f"  {text_of_values}  ", color=COLOURS[1], **style)
    drawing.name_values(text, name)


def draw_progress(study: StudyRecord, comparisons: Comparisons) -> Figure | None:
    """Draw metric and paired difference against steps, training FLOPs and seconds of training.

    The difference is that to the baseline with the same seed at the same (interpolated) cost.
    Returns None for times until an event, which `draw_events` shows.
    """
    if study.plan.metric.event:
        return None
    best = order_variants(study, comparisons)[: drawing.MOST_BANDS]
    names = _order_blocks(study, best)
    values = study.curves.pivot_table(index="step", columns=["variant", "seed"], values="value")
    shown = [name for name in names if name in values and len(values[name].dropna()) > 2]
    if len(shown) < 2 or shown[0] != study.plan.baseline:
        return None
    axes_of_cost = _known_costs(study, shown)
    figure = drawing.new_figure(4.2)
    grid = figure.subplots(2, len(axes_of_cost), sharex="col", sharey="row", squeeze=False)
    styles = drawing.assign_styles(study.plan)
    key: drawing.Key = {name: (styles[name].colour, styles[name].dash) for name in shown}
    panels = zip(grid[0], grid[1], axes_of_cost.items(), strict=True)
    for top, bottom, (label, step_costs) in panels:
        curves = {}
        for name, step_cost in step_costs.items():
            rows = values[name].dropna()
            rows.index = rows.index * step_cost
            curves[name] = rows
        baseline = curves[study.plan.baseline]
        for name, rows in curves.items():
            colour, dash = key[name]
            drawing.draw_band(top, rows.stack().droplevel(1), colour, dash, label=name)
            differences = _interpolate_differences(rows, baseline)
            if name != study.plan.baseline and differences:
                drawing.draw_band(bottom, pd.concat(differences), colour, dash, label=name)
        bottom.axhline(0, color=GREY, linewidth=0.8)
        bottom.set_xlabel(label)
        if label == FLOPS:
            # An exponent beside the axis would stand in its label.
            bottom.xaxis.set_major_formatter(EngFormatter(sep=""))
    metric = study.plan.metric
    grid[0][0].set_ylabel(drawing.name_axis(metric.label, metric.goal, is_vertical=True))
    difference = f"difference to {drawing.short_names(shown, 20)[0]}"
    grid[1][0].set_ylabel(drawing.name_axis(difference, metric.goal, is_vertical=True))
    drawing.add_legend(figure, key)
    return figure


def _known_costs(study: StudyRecord, variants: list[str]) -> dict[str, dict[str, float]]:
    """Return the cost of one step by label of the cost and variant.

    A cost that is zero or unknown for one of the variants is left out.
    """
    costs: dict[str, dict[str, float]] = {"step": dict.fromkeys(variants, 1.0)}
    for label, measure in STEP_COSTS.items():
        step_costs = {}
        for name in variants:
            step_cost = measure(study, name)
            if step_cost:
                step_costs[name] = step_cost
        if len(step_costs) == len(variants):
            costs[label] = step_costs
    return costs


def _interpolate_differences(rows: Any, baseline: Any) -> list["pd.Series[float]"]:
    """Return the differences of a variant's curves to the baseline's, by common seed.

    Both frames are (costs, seeds). The baseline is interpolated at the costs of the variant, as far
    as it reaches.
    """
    inside = rows[rows.index <= baseline.index.max()]
    differences = []
    for seed in inside.columns.intersection(baseline.columns):
        reference = np.interp(inside.index, baseline.index, baseline[seed])
        differences.append(inside[seed] - reference)
    return differences


def _comparable_step_time(study: StudyRecord, variant: str) -> float | None:
    """Return the step time of a variant that was measured in turns with the baseline."""
    if study.step_time_faults.get(variant):
        return None
    return study.step_time(variant)


def _step_flops(study: StudyRecord, variant: str) -> float | None:
    """Return the FLOPs of a training step: counted, or three forward passes of a batch."""
    planned = next(entry for entry in study.plan.variants if entry.name == variant)
    if planned.step_flops:
        return planned.step_flops
    passes = study.measurements("flops", variant)
    batches = study.measurements("batch_size", variant)
    if not passes or not batches:
        return None
    return 3.0 * passes[0] * batches[0]


FLOPS = "training FLOPs"
STEP_COSTS = {FLOPS: _step_flops, "seconds of training": _comparable_step_time}
"""Function that returns the cost of one step of a variant, by the label of its axis."""


COSTS = {
    "parameters": ("parameters", ""),
    "flops": ("FLOPs per sample, forward", ""),
    "step_time": ("time per training step", "s"),
}
"""Label and unit by measurement."""
LONGEST_BESIDE = 16
"""Most letters of a name in a legend beside the panels of costs."""


def draw_cost(study: StudyRecord, summary: pd.DataFrame) -> Figure | None:
    """Draw means of the best variants against each cost that differs by more than one percent.

    Step times are drawn only for variants whose seeds agree on them, and that were measured in
    turns with the baseline. The legend orders the variants by their means. Returns None if all
    costs are equal or unknown, and for values that have no mean.
    """
    if not study.test.has_means:
        return None
    frame = _select_costs(study, summary)
    costs = [cost for cost in COSTS if _has_range(frame[cost])]
    if not costs:
        return None
    labels = drawing.short_names(frame["variant"], 34)
    # Long names beside the panels would leave no room for them.
    is_below = max(map(len, labels)) > LONGEST_BESIDE
    height = max(2.5, 0.15 * len(frame) + 0.7)
    if is_below:
        height = 2.5 + drawing.LINE_HEIGHT * math.ceil(len(labels) / drawing.fit_columns(labels))
    figure = drawing.new_figure(height)
    panels = figure.subplots(1, len(costs), sharey=True, squeeze=False)[0]
    ends = [frame["mean"] - frame["sd"], frame["mean"] + frame["sd"]]
    # Every other mean is read against the baseline's, so its interval is never cut off.
    is_kept = frame["significant"].astype(bool) | (frame["variant"] == study.plan.baseline)
    decided = [end for values in ends for end in values[is_kept]]
    low, high = drawing.usual_range(pd.concat(ends).tolist(), decided)
    # Artist and label by variant.
    legend: dict[str, tuple[Any, str]] = {}
    styles = drawing.assign_styles(study.plan)
    # The criteria of a variant share its colour and marker, and the first one has empty markers.
    further = study.plan.criteria[1:]
    filled = {entry.name for entry in study.plan.variants if entry.criterion in further}
    for label, row in zip(labels, frame.to_dict("records"), strict=True):
        name = row["variant"]
        mean = row["mean"]
        spread = row["sd"]
        is_far = not low <= mean <= high
        style = {
            "fmt": styles[name].marker,
            "color": styles[name].colour,
            "ms": 4.5,
            "elinewidth": 0.8,
            # Points of equal cost lie above each other, and none hides another one.
            "mfc": styles[name].colour if name in filled else "none",
            "clip_on": not is_far,
        }
        if is_far:
            # The legend and the page say where a far outlier is; its error bar would lie elsewhere.
            label = f"{label} ({drawing.short(mean)})"
            spread = 0.0
        height = min(max(mean, low), high)
        for axes, cost in zip(panels, costs, strict=True):
            if math.isnan(row[cost]):
                continue
            at = drawing.short(row[cost])
            point = (row[cost], height, spread)
            drawn = drawing.draw_points(axes, point, name, [at], **style)
            drawing.name_values(drawn.lines[0], name, [f"{drawing.short(mean)} at {at}"])
            legend[name] = (drawn, label)
    for axes, cost in zip(panels, costs, strict=True):
        axes.set_ylim(low, high)
        cheapest, dearest = frame[cost].min(), frame[cost].max()
        margin = 0.1 * (dearest - cheapest)
        axes.set_xlim(cheapest - margin, dearest + margin)
        _label_cost(axes, cost)
    metric = study.plan.metric
    panels[0].set_ylabel(drawing.name_axis(metric.label, metric.goal, is_vertical=True))
    artists = [artist for artist, _ in legend.values()]
    texts = [label for _, label in legend.values()]
    if is_below:
        columns = drawing.fit_columns(texts)
        figure.legend(artists, texts, fontsize=6.5, loc="outside lower center", ncols=columns)
    else:
        figure.legend(artists, texts, fontsize=6.5, loc="outside right center")
    return figure


def _has_range(values: "pd.Series[float]") -> bool:
    """Return True if the largest value exceeds the smallest one by more than one percent."""
    return bool(values.count() > 1 and values.max() > 1.01 * values.min())


def _label_cost(axes: Axes, cost: str) -> None:
    """Name a cost below its panel, with prefixes of its unit at a few ticks."""
    description, unit = COSTS[cost]
    axes.set_xlabel(description)
    axes.xaxis.set_major_formatter(EngFormatter(unit, sep=" " if unit else ""))
    axes.locator_params(axis="x", nbins=4)


def _select_costs(study: StudyRecord, summary: pd.DataFrame) -> pd.DataFrame:
    """Return means and costs of the baseline and the best variants, from the best to the worst.

    A step time is missing if seeds do not agree on it, and if it cannot be compared.
    """
    is_ascending = study.plan.metric.goal == "min"
    frame = summary[summary["n"] > 0].sort_values("mean", ascending=is_ascending, kind="stable")
    is_baseline = frame["variant"] == study.plan.baseline
    place_of_others = (~is_baseline).cumsum()
    frame = frame[is_baseline | (place_of_others < drawing.MOST_COSTS)].fillna({"sd": 0.0})
    frame = frame.astype(dict.fromkeys(("mean", "sd", *COSTS), float))
    is_busy = (frame["step_time_ratio"] > BUSY_RATIO).fillna(False)
    has_fault = frame["step_time_fault"].fillna("").astype(bool)
    frame["step_time"] = frame["step_time"].mask(is_busy | has_fault)
    return frame
