"""Scaling of a size axis (`compare_within`): power laws, and the compute that a lead is worth.

For every seed, the line log L = a - b log C is fitted to the sizes of a variant: L is the study's
metric and C the training FLOPs, three forward passes for every training sample. A variant at one
size reaches its L with C; the baseline's line reaches the same L with C'. The compute multiplier is
C' / C (DCMHA, arXiv:2405.08553, section 4.1, Figure 3).
"""

import math
import statistics
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pandas as pd

from lit_attn.cells.records import Plan
from lit_attn.files import write_atomic
from lit_attn.report import drawing, formats, stats
from lit_attn.report.columns import NOTHING, format_number
from lit_attn.report.formats import Cell, Table, named_table, read_asset
from lit_attn.report.page import Section, render_page
from lit_attn.report.read import StudyRecord
from lit_attn.report.results import describe_setup

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Point(NamedTuple):
    """A finished cell: its training FLOPs, and the study's metric in printed units."""

    variant: str
    level: str
    seed: int
    flops: float
    value: float


Lines = dict[int, tuple[float, float]]  # Exponent b and intercept a by seed.


def read_points(studies: list[StudyRecord]) -> list[Point]:
    """Return the finished cells with a positive value and a batch size, smallest levels first."""
    points = []
    for study, cell in ((record, cell) for record in studies for cell in record.finished_cells()):
        numbers = cell.measurements
        if numbers.get("batch_size") and cell.value is not None and cell.value > 0:
            cost = 3.0 * numbers["flops"] * numbers["batch_size"] * numbers["steps"]
            points.append(Point(cell.variant, study.plan.level, cell.seed, cost, cell.value))
    smallest = {x.level: x.flops for x in sorted(points, key=lambda x: -x.flops)}
    return sorted(points, key=lambda point: smallest[point.level])


def fit_lines(points: list[Point]) -> Lines:
    """Fit a line to the logarithms of each seed of a variant.

    Seeds that lack a level, and variants with a single level, have no line.
    """
    count = len({point.level for point in points})
    lines = {}
    for seed in {point.seed: None for point in points}:
        cells = [point for point in points if point.seed == seed]
        if len(cells) == count > 1:
            costs, values = np.log([cell.flops for cell in cells]), [cell.value for cell in cells]
            slope, intercept = np.polyfit(costs, np.log(values), 1)
            lines[seed] = (-float(slope), float(intercept))
    return lines


def make_scaling_table(points: list[Point], plan: Plan) -> Table:
    """Return exponent, misfit, and the compute multiplier at every level of each variant."""
    levels = list(dict.fromkeys(point.level for point in points))
    rows = []
    for variant in plan.variants:
        cells = [point for point in points if point.variant == variant.name]
        lines = fit_lines(cells)
        fitted = [(cell, lines[cell.seed]) for cell in cells if cell.seed in lines]
        misfits = [abs(math.exp(a - b * math.log(x.flops)) / x.value - 1) for x, (b, a) in fitted]
        misfit = f"{100 * max(misfits):.2g}" if misfits else NOTHING
        texts = [variant.name, _describe([b for b, _ in lines.values()], ".4f"), misfit]
        for level in levels:
            multipliers = find_multipliers(points, plan, variant.name, level).values()
            texts.append(_describe([*map(math.log, multipliers)], ".2f", is_log=True))
        rows.append([Cell(text) for text in texts])
    counts = Counter((point.variant, point.level) for point in points).values()
    few, most = min(counts), max(counts)
    return named_table(
        "scaling",
        rows,
        ["variant", "exponent [95 %]", "misfit (%)", *(f"compute at {x}" for x in levels)],
        family=plan.family,
        label=plan.metric.label,
        baseline=plan.baseline,
        seeds=str(few) if few == most else f"{few} to {most}",
        levels=", ".join(levels),
    )


def find_multipliers(points: list[Point], plan: Plan, variant: str, level: str) -> dict[int, float]:
    """Return the compute multiplier of each seed of a variant if the baseline's line falls."""
    baseline = fit_lines([point for point in points if point.variant == plan.baseline])
    cells = [x for x in points if x.level == level and x.variant == variant != plan.baseline]
    lines = [(x, *baseline[x.seed]) for x in cells if baseline.get(x.seed, (0.0, 0.0))[0] > 0]
    return {x.seed: math.exp((a - math.log(x.value)) / b - math.log(x.flops)) for x, b, a in lines}


def _describe(values: list[float], form: str, is_log: bool = False) -> str:
    """Return the mean with Student's 95 % interval over seeds; `is_log` takes the exponential."""
    if not values:
        return NOTHING
    numbers = [statistics.fmean(values), *(stats.paired_interval(values) or ())[1:]]
    mean, *ends = (format_number(math.exp(x) if is_log else x, form) for x in numbers)
    return f"{mean} [{', '.join(ends)}]" if ends else mean


def draw_scaling(points: list[Point], plan: Plan) -> "Figure":
    """Draw the metric of every variant over its training FLOPs, with the fitted lines."""
    figure = drawing.new_figure(3.4)
    axes = figure.subplots()
    pairs = zip(plan.variants, drawing.COLOURS, strict=False)
    key: drawing.Key = {variant.name: (colour, "-") for variant, colour in pairs}
    for name, (colour, _) in key.items():
        cells = [point for point in points if point.variant == name]
        groups = pd.DataFrame(cells, columns=Point._fields).groupby("level", sort=False)
        costs, values = groups["flops"].mean(), groups["value"]
        style = {"color": colour, "fmt": "o", "ms": 3.5, "elinewidth": 0.8}
        means = (costs, values.mean(), values.std())
        drawing.draw_points(axes, means, name, costs.map("{:.4g}".format), **style)
        if lines := fit_lines(cells).values():
            exponent, intercept = (statistics.fmean(part) for part in zip(*lines, strict=True))
            (line,) = axes.plot(costs, math.e**intercept * costs**-exponent, color=colour, lw=1)
            drawing.name_values(line, name)
    for axis in ("x", "y"):
        drawing.use_log_scale(axes, axis)
    axes.set_xlabel("training FLOPs")
    axes.set_ylabel(plan.metric.label)
    drawing.add_legend(figure, key)
    return figure


def write_scaling(studies: list[StudyRecord], reports: Path) -> None:
    """Write the page of the scaling of levels of one study, and its files, as scaling.*.

    Writes nothing for a metric whose higher values are better, and with fewer than two levels that
    have results: no line can be fitted.
    """
    points, plan = read_points(studies), studies[0].plan
    if plan.metric.goal == "max" or len({point.level for point in points}) < 2:
        return
    table = make_scaling_table(points, plan)
    setup = describe_setup(plan)
    table.notes.extend(setup)
    with drawing.appearance():
        image = drawing.render(draw_scaling(points, plan))
    files: dict[str, str | bytes] = {
        "scaling.csv": formats.to_csv(pd.DataFrame(points), studies[0].names),
        "scaling.md": formats.to_markdown(table),
        "scaling.tex": formats.to_latex(table, f"{plan.family}-scaling"),
        **{f"scaling.{kind}": content for kind, content in image.items()},
    }
    caption = " ".join([read_asset("tables.yaml")["scaling"]["figure"], *setup])
    values = {"captions": {"scaling": caption}, "images": {"scaling": image}, "name": plan.family}
    sections = [Section(figures=["scaling"], tables=[table])]
    values["links"] = list(files)
    files["scaling.html"] = render_page(table.title.rstrip("."), sections, [], **values)
    for name, content in files.items():
        write_atomic(reports / plan.family / name, content)
