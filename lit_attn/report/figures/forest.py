"""Differences of one variant in several studies, and their random-effects estimate."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pandas as pd

from lit_attn.cells.records import Metric
from lit_attn.report.figures import drawing
from lit_attn.report.figures.drawing import COLOURS, GREY
from lit_attn.report.statistics.stats import student_quantile
from lit_attn.report.tables.columns import NOTHING, choose_digits, format_difference, format_number
from lit_attn.report.tables.formats import Cell, Table, named_table

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class StudyEffect(NamedTuple):
    """Mean difference of a variant in a study, its 95 % interval and its standard error."""

    study: str
    mean: float
    low: float
    high: float
    error: float


class Combined(NamedTuple):
    """Random-effects estimate: mean, 95 % interval, and sd of the true differences of studies."""

    mean: float
    low: float
    high: float
    spread: float


def combine(effects: Sequence[StudyEffect]) -> Combined | None:
    """Return the random-effects estimate over studies, or None with fewer than two studies.

    The variance between studies is that of DerSimonian and Laird ("Meta-analysis in clinical
    trials", 1986). The interval is Hartung's and Knapp's, never narrower than with a factor of 1
    (IntHout et al., "The Hartung-Knapp-Sidik-Jonkman method", 2014; Roever et al. 2015).
    """
    count = len(effects)
    if count < 2 or min(effect.error for effect in effects) <= 0:
        return None
    means = np.array([effect.mean for effect in effects])
    variances = np.array([effect.error**2 for effect in effects])
    weights = 1 / variances
    fixed = float((weights * means).sum() / weights.sum())
    heterogeneity = float((weights * (means - fixed) ** 2).sum())
    scale = float(weights.sum() - (weights**2).sum() / weights.sum())
    between = max(0.0, (heterogeneity - (count - 1)) / scale)
    weights = 1 / (variances + between)
    mean = float((weights * means).sum() / weights.sum())
    factor = float((weights * (means - mean) ** 2).sum()) / (count - 1)
    error = math.sqrt(max(1.0, factor) / float(weights.sum()))
    half = student_quantile(count - 1, 0.975) * error
    return Combined(mean, mean - half, mean + half, math.sqrt(between))


def read_effects(frames: dict[str, pd.DataFrame]) -> dict[str, list[StudyEffect]]:
    """Return the differences of every variant that two or more studies share, by its name.

    `frames` has the frame of variants of each study (`make_variant_frame`), by variant. Each
    interval is Student's, so it gives the standard error back.
    """
    effects: dict[str, list[StudyEffect]] = {}
    for study, frame in frames.items():
        for variant, row in frame.iterrows():
            if pd.isna(row["low"]):
                continue
            half = (row["high"] - row["low"]) / 2
            error = half / student_quantile(int(row["pairs"]) - 1, 0.975)
            effect = StudyEffect(
                study, float(row["difference"]), float(row["low"]), float(row["high"]), error
            )
            effects.setdefault(str(variant), []).append(effect)
    return {variant: by_study for variant, by_study in effects.items() if len(by_study) > 1}


def make_forest_table(effects: dict[str, list[StudyEffect]], labels: dict[str, str]) -> Table:
    """Return the combined difference of each variant; no rows without a shared variant."""
    digits = _choose_digits(effects)
    rows = []
    for variant, by_study in effects.items():
        combined = combine(by_study)
        difference = NOTHING
        spread = NOTHING
        if combined is not None:
            difference = format_difference(
                combined.mean, combined.low, combined.high, f".{digits}f"
            )
            spread = format_number(combined.spread, f".{digits}f")
        texts = [labels.get(variant, variant), str(len(by_study)), difference, spread]
        rows.append([Cell(text) for text in texts])
    return named_table("forest", rows)


def _choose_digits(effects: dict[str, list[StudyEffect]]) -> int:
    """Return the decimals of differences from the spread of their errors."""
    errors = [effect.error for by_study in effects.values() for effect in by_study]
    means = [effect.mean for by_study in effects.values() for effect in by_study]
    return choose_digits(pd.Series(errors, dtype=float), pd.Series(means, dtype=float))


def draw_forest(
    effects: dict[str, list[StudyEffect]], labels: dict[str, str], metric: Metric
) -> "Figure":
    """Draw the difference of each study, and below them the combined one of the variant."""
    rows: list[tuple[str, StudyEffect | Combined | None]] = []
    for variant, by_study in effects.items():
        rows += [(variant, effect) for effect in by_study]
        rows.append((variant, combine(by_study)))
    rows = rows[: drawing.MOST_ROWS]
    figure = drawing.new_figure(0.26 * len(rows) + 0.75)
    axes = figure.subplots()
    axes.axvline(0.0, color=GREY, linewidth=0.8)
    names = []
    for place, (variant, effect) in enumerate(rows):
        label = labels.get(variant, variant)
        if effect is None:
            names.append(f"{label}: combined")
            continue
        is_combined = isinstance(effect, Combined)
        source = "combined" if isinstance(effect, Combined) else effect.study
        names.append(f"{label}: {source}")
        errors = [[effect.mean - effect.low], [effect.high - effect.mean]]
        style = {
            "fmt": "D" if is_combined else "o",
            "color": COLOURS[1] if is_combined else COLOURS[0],
            "ms": 5.0 if is_combined else 3.5,
            "elinewidth": 1.6 if is_combined else 0.9,
            "xerr": errors,
        }
        drawing.draw_points(axes, ([effect.mean], [place]), label, [names[-1]], **style)
    axes.set_yticks(range(len(rows)), drawing.short_names(names, 60))
    axes.set_ylim(len(rows) - 0.5, -0.5)
    arrow = "better →" if metric.goal == "max" else "← better"
    axes.set_xlabel(f"difference in {metric.label} to the baseline of each study, {arrow}")
    return figure
