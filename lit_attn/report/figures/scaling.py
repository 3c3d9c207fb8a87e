"""Scaling of sizes (`compare_within`): power laws, and the compute of a lead.

L is the study's metric and C the training FLOPs: three forward passes for every training sample. A
variant at one size reaches its L with C; the baseline's law reaches the same L with C'. The compute
multiplier is C' / C (DCMHA, arXiv:2405.08553, section 4.1, Figure 3).

The law passes through the baseline's point (C0, L0) of the same size and seed, so that a variant
that equals the baseline has the multiplier 1 however the law is curved:

    log((L - E) / (L0 - E)) = -b log(C' / C0)

b is fitted to the baseline's sizes of the same seed. The asymptote E is 0 with fewer than
SIZES_FOR_ASYMPTOTE sizes; otherwise one E is fitted to all seeds of the baseline.
docs/simulations.md has the simulated coverage of the intervals.
"""

import math
import statistics
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pandas as pd

from lit_attn.cells.records import Plan
from lit_attn.report.figures import drawing
from lit_attn.report.figures.speedup import draw_speedups, find_speedups, make_speedup_table
from lit_attn.report.numbers import fill, write_number
from lit_attn.report.pages.page import Section, render_page
from lit_attn.report.records.study_record import StudyRecord
from lit_attn.report.statistics import stats
from lit_attn.report.statistics.power_laws import SIZES_FOR_ASYMPTOTE, fit_asymptote, fit_lines
from lit_attn.report.tables import formats
from lit_attn.report.tables.columns import NOTHING, format_number
from lit_attn.report.tables.formats import Cell, Table, named_table, read_asset
from lit_attn.report.tables.results import describe_setup

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LARGEST_MULTIPLIER = 1e6
"""Largest multiplier, and inverse of the smallest one, that is printed.

A baseline whose losses at several sizes are nearly equal has no law that could be extrapolated.
"""


class Point(NamedTuple):
    """A finished cell: its training FLOPs, and the study's metric in printed units."""

    variant: str
    level: str
    seed: int
    flops: float
    value: float


class Line(NamedTuple):
    """Power law of one seed: log(L - E) = intercept - exponent log C."""

    exponent: float
    intercept: float

    def predict(self, flops: float, asymptote: float) -> float:
        """Return L at C training FLOPs."""
        return asymptote + math.exp(self.intercept - self.exponent * math.log(flops))


class Law(NamedTuple):
    """Power laws of a variant by seed, with the asymptote E that all seeds share."""

    asymptote: float
    lines: dict[int, Line]


def read_points(studies: list[StudyRecord]) -> list[Point]:
    """Return the finished cells with positive FLOPs and a positive value, smallest levels first."""
    points = []
    for study in studies:
        for cell in study.finished_cells():
            numbers = cell.measurements
            samples = (numbers.get("batch_size") or 0) * numbers.get("steps", 0)
            flops = 3.0 * numbers.get("flops", 0) * samples
            if flops > 0 and cell.value is not None and cell.value > 0:
                points.append(Point(cell.variant, study.plan.level, cell.seed, flops, cell.value))
    smallest: dict[str, float] = {}
    for point in points:
        smallest[point.level] = min(point.flops, smallest.get(point.level, math.inf))
    return sorted(points, key=lambda point: smallest[point.level])


def fit_law(points: list[Point], limit: float | None = None) -> Law:
    """Fit power laws to a variant: a line for each seed, and an asymptote if `limit` allows it.

    The asymptote lies below `limit`, the smallest loss of all variants; it is 0 with None and with
    fewer than SIZES_FOR_ASYMPTOTE levels. Seeds that lack a level, and variants with a single
    level, have no line.
    """
    levels = {point.level for point in points}
    by_seed: dict[int, list[Point]] = {}
    for point in points:
        by_seed.setdefault(point.seed, []).append(point)
    complete = {seed: cells for seed, cells in by_seed.items() if len(cells) == len(levels) > 1}
    if not complete:
        return Law(0.0, {})
    costs = np.array([[cell.flops for cell in cells] for cells in complete.values()])
    losses = np.array([[cell.value for cell in cells] for cells in complete.values()])
    asymptote = 0.0
    if limit is not None and len(levels) >= SIZES_FOR_ASYMPTOTE:
        asymptote = fit_asymptote(costs, losses, limit)
    exponents, intercepts, _ = fit_lines(costs, losses, np.array([asymptote]))
    pairs = zip(exponents[0].tolist(), intercepts[0].tolist(), strict=True)
    lines = [Line(exponent, intercept) for exponent, intercept in pairs]
    return Law(asymptote, dict(zip(complete, lines, strict=True)))


def fit_baseline(points: list[Point], plan: Plan) -> Law:
    """Return the baseline's law. Its asymptote lies below the losses of all variants."""
    baseline = [point for point in points if point.variant == plan.baseline]
    return fit_law(baseline, min((point.value for point in points), default=None))


def find_multipliers(
    points: list[Point], plan: Plan, variant: str, level: str, law: Law | None = None
) -> dict[int, float]:
    """Return the compute multiplier of each seed of a variant at a level.

    `law` is the baseline's (default: fitted to `points`). Empty for the baseline, and if the
    baseline does not improve with compute in one of the seeds: leaving out such seeds would select
    among the others.
    """
    if variant == plan.baseline:
        return {}
    law = law or fit_baseline(points, plan)
    at_level = [point for point in points if point.level == level]
    baseline = {point.seed: point for point in at_level if point.variant == plan.baseline}
    multipliers = {}
    for point in at_level:
        if point.variant != variant or point.seed not in law.lines or point.seed not in baseline:
            continue
        exponent = law.lines[point.seed].exponent
        start = baseline[point.seed]
        lead = math.log((start.value - law.asymptote) / (point.value - law.asymptote))
        largest = exponent * math.log(LARGEST_MULTIPLIER)
        if exponent <= 0 or abs(lead) > largest:
            return {}
        multipliers[point.seed] = math.exp(lead / exponent) * start.flops / point.flops
    return multipliers


def make_scaling_table(points: list[Point], plan: Plan) -> Table:
    """Return exponent, misfit, and the compute multiplier at every level of each variant."""
    levels = list(dict.fromkeys(point.level for point in points))
    baseline_law = fit_baseline(points, plan)
    rows = []
    for variant in plan.variants:
        cells = [point for point in points if point.variant == variant.name]
        law = fit_law(cells)
        exponents = [line.exponent for line in law.lines.values()]
        texts = [variant.name, _describe(exponents, ".4f"), _describe_misfit(cells, law)]
        for level in levels:
            multipliers = find_multipliers(points, plan, variant.name, level, baseline_law)
            logarithms = [math.log(multiplier) for multiplier in multipliers.values()]
            texts.append(_describe(logarithms, ".2f", is_log=True))
        rows.append([Cell(text) for text in texts])
    counts = Counter((point.variant, point.level) for point in points).values()
    few, most = min(counts), max(counts)
    table = named_table(
        "scaling",
        rows,
        ["variant", "exponent [95 %]", "misfit (%)", *(f"compute at {x}" for x in levels)],
        family=plan.family,
        label=plan.metric.label,
        baseline=plan.baseline,
        seeds=str(few) if few == most else f"{few} to {most}",
        levels=", ".join(levels),
    )
    # The brief table has the largest sizes.
    count = len(table.headings)
    table = replace(table, shown=(0, *range(max(1, count - formats.MOST_COLUMNS + 1), count)))
    if baseline_law.lines:
        table.notes.append(_describe_asymptote(points, plan, baseline_law, len(levels)))
    return table


def _describe_asymptote(points: list[Point], plan: Plan, law: Law, level_count: int) -> str:
    """Return the sentence of the caption about the asymptote of the baseline's law."""
    texts = read_asset("tables.yaml")["scaling"]
    if level_count < SIZES_FOR_ASYMPTOTE:
        return fill(texts["no_asymptote"], sizes=SIZES_FOR_ASYMPTOTE)
    baseline = [point for point in points if point.variant == plan.baseline]
    misfit = _describe_misfit(baseline, law)
    return fill(texts["asymptote"], asymptote=law.asymptote, baseline=plan.baseline, misfit=misfit)


def _describe_misfit(points: list[Point], law: Law) -> str:
    """Return the largest deviation of a value from the line of its seed, in percent."""
    misfits = []
    for point in points:
        if point.seed in law.lines:
            predicted = law.lines[point.seed].predict(point.flops, law.asymptote)
            misfits.append(abs(predicted / point.value - 1))
    return write_number(100 * max(misfits), ".2g") if misfits else NOTHING


def _describe(values: list[float], form: str, is_log: bool = False) -> str:
    """Return the mean with Student's 95 % interval over seeds; `is_log` takes the exponential."""
    if not values:
        return NOTHING
    numbers = [statistics.fmean(values)]
    interval = stats.paired_interval(values)
    if interval:
        numbers += [interval.low, interval.high]
    if is_log:
        numbers = [math.exp(number) if number < 700 else math.inf for number in numbers]
    mean, *ends = [format_number(number, form) for number in numbers]
    return f"{mean} [{', '.join(ends)}]" if ends else mean


def draw_scaling(points: list[Point], plan: Plan) -> "Figure":
    """Draw the metric of every variant over its training FLOPs, with the fitted lines."""
    figure = drawing.new_figure(3.4)
    axes = figure.subplots()
    styles = drawing.assign_styles(plan)
    shown = [variant.name for variant in plan.variants][: len(drawing.COLOURS)]
    key: drawing.Key = {name: (styles[name].colour, styles[name].dash) for name in shown}
    for name, (colour, dash) in key.items():
        cells = [point for point in points if point.variant == name]
        groups = pd.DataFrame(cells, columns=Point._fields).groupby("level", sort=False)
        costs, values = groups["flops"].mean(), groups["value"]
        style = {"color": colour, "fmt": "o", "ms": 3.5, "elinewidth": 0.8}
        means = (costs, values.mean(), values.std())
        drawing.draw_points(axes, means, name, costs.map(drawing.short), **style)
        lines = fit_law(cells).lines.values()
        if lines:
            exponent = statistics.fmean(line.exponent for line in lines)
            intercept = statistics.fmean(line.intercept for line in lines)
            fitted = np.exp(intercept - exponent * np.log(costs))
            (curve,) = axes.plot(costs, fitted, dash, color=colour, lw=1)
            drawing.name_values(curve, name)
    for axis in ("x", "y"):
        drawing.use_log_scale(axes, axis)
    axes.set_xlabel("training FLOPs")
    axes.set_ylabel(drawing.wrap_vertical(plan.metric.label))
    drawing.add_legend(figure, key)
    return figure


def _list_multipliers(points: list[Point], plan: Plan) -> dict[tuple[str, str], dict[int, float]]:
    """Return the compute multipliers of each seed, by variant and level."""
    law = fit_baseline(points, plan)
    multipliers = {}
    for variant in plan.variants:
        for level in dict.fromkeys(point.level for point in points):
            by_seed = find_multipliers(points, plan, variant.name, level, law)
            multipliers[variant.name, level] = by_seed
    return multipliers


def make_scaling_files(studies: list[StudyRecord]) -> dict[str, str | bytes]:
    """Return the page of the scaling of levels of one study, and its files, as scaling.*.

    There are none for a metric whose higher values are better, and with fewer than two levels that
    have results: no line can be fitted.
    """
    points, plan = read_points(studies), studies[0].plan
    if plan.metric.goal == "max" or len({point.level for point in points}) < 2:
        return {}
    table = make_scaling_table(points, plan)
    setup = describe_setup(plan)
    table.notes.extend(setup)
    # The order of the points is that of the sizes.
    levels = list(dict.fromkeys(point.level for point in points))
    ordered = [study for level in levels for study in studies if study.plan.level == level]
    speedups = find_speedups(ordered, _list_multipliers(points, plan))
    with drawing.appearance():
        images = {"scaling": drawing.render(draw_scaling(points, plan))}
        figure = draw_speedups(speedups, drawing.assign_styles(plan))
        if figure is not None:
            images["speedup"] = drawing.render(figure)
    files: dict[str, str | bytes] = {
        "scaling.csv": formats.to_csv(pd.DataFrame(points), studies[0].names),
        **formats.make_markdown_files(table, "scaling"),
        "scaling.tex": formats.to_latex(table, f"{plan.family}-scaling", "scaling.full.md"),
    }
    tables = [table]
    if speedups:
        tables.append(make_speedup_table(speedups, plan))
        files["speedup.csv"] = formats.to_csv(pd.DataFrame(speedups), studies[0].names)
    captions = {}
    for name, image in images.items():
        captions[name] = " ".join([read_asset("tables.yaml")[name]["figure"], *setup])
        for kind, content in image.items():
            files[f"{name}.{kind}"] = content
    values = {"captions": captions, "images": images, "name": plan.family}
    sections = [Section(figures=list(images), tables=tables)]
    values["links"] = list(files)
    files["scaling.html"] = render_page(table.title.rstrip("."), sections, [], **values)
    return files
