"""Comparisons beyond single variants: factorial effects, two studies, equal cost."""

import itertools
import statistics
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from lit_attn.cells.records import Plan
from lit_attn.report import columns, stats
from lit_attn.report.formats import Cell, Table, named_table
from lit_attn.report.read import StudyRecord


class Effect(NamedTuple):
    """A main effect of a level, or the interaction of two: mean, 95 % interval and corrected p.

    It is a mean over as many combinations of the other axes as `combinations` says.
    """

    effect: str
    kind: str
    combinations: int
    difference: float
    low: float | None
    high: float | None
    p: float
    by_seed: list[float]


def find_effects(study: StudyRecord) -> list[Effect]:
    """Return the main effects of a factorial study and the interactions of pairs of its axes.

    Its variants have names like `residual=full,zz=with`; the baseline has the reference levels.
    Combinations and seeds that lack results are left out, and so is every criterion of `match` but
    the first. p is corrected for all effects (joint sign-flip test). Empty unless two axes vary.
    """
    reference, criteria = _levels(study.plan.baseline), study.plan.criteria[:1]
    values = {
        tuple(levels[axis] for axis in reference): study.values(variant.name)
        for variant in study.plan.variants
        if (levels := _levels(variant.name)).keys() == reference.keys()
        and study.values(variant.name)
        and (variant.criterion in criteria or not criteria)
    }
    if len(reference) < 2 or not values:
        return []
    seeds = sorted(set.intersection(*(set(by_seed) for by_seed in values.values())))
    # The reference is the first level of each axis.
    axes = [list(dict.fromkeys(names)) for names in zip(reference.values(), *values, strict=True)]
    grid = np.full([*map(len, axes), len(seeds)], np.nan)
    for names, by_seed in values.items():
        grid[tuple(map(list.index, axes, names))] = [by_seed[seed] for seed in seeds]
    changes = [{axis: i} for axis, names in enumerate(axes) for i in range(1, len(names))]
    both = (first | second for first, second in itertools.combinations(changes, 2))
    chosen = [*changes, *(pair for pair in both if len(pair) == 2)]
    contrasts = [(changed, _contrast(grid, changed)) for changed in chosen]
    estimated = [(changed, rows) for changed, rows in contrasts if rows.size]
    if len({axis for change in changes for axis in change}) < 2 or not estimated:
        return []
    means = np.array([rows.mean(axis=0) for _, rows in estimated])
    effects = []
    p_values = stats.joint_sign_flip(means)
    for (changed, rows), mean, p in zip(estimated, means.tolist(), p_values, strict=True):
        terms = [f"{list(reference)[axis]}={axes[axis][i]}" for axis, i in changed.items()]
        name = " and ".join(terms)
        kind = "main effect" if len(changed) == 1 else "interaction"
        interval = describe_pairs(mean, study.resolution)
        effects.append(Effect(name, kind, len(rows), *interval, p, mean))
    return effects


def _contrast(grid: NDArray[np.float64], changed: dict[int, int]) -> NDArray[np.float64]:
    """Return the effect of the levels `changed`, by axis of `grid`, (combinations, seeds)."""
    for axis, level in sorted(changed.items(), reverse=True):
        grid = np.take(grid, level, axis) - np.take(grid, 0, axis)
    # Combinations that lack a level are missing values.
    rows = grid.reshape(-1, grid.shape[-1])
    return rows[~np.isnan(rows).any(axis=1)]


def make_effects_table(effects: list[Effect], plan: Plan, digits: int, level: float) -> Table:
    """Return the effects of a factorial study as a table, with a star for p <= `level`."""
    rows = []
    for effect in effects:
        interval = (effect.difference, effect.low, effect.high)
        texts = (effect.effect, effect.kind, columns.format_difference(*interval, digits))
        p = Cell(columns.format_p(effect.p), mark=columns.STAR if effect.p <= level else "")
        rows.append([*map(Cell, texts), p, Cell(str(effect.combinations))])
    names = {"label": plan.metric.label, "baseline": plan.baseline}
    return named_table("effects", rows, count=len(effects), alpha=level, **names)


def make_contrast_table(study: StudyRecord, other: StudyRecord, digits: int) -> Table:
    """Return how each variant's lead over the baseline differs from its lead in another study."""
    rows = []
    for variant in study.plan.variants:
        lead, other_lead = (_lead(record, variant.name) for record in (study, other))
        if variant.name == study.plan.baseline or lead.empty or other_lead.empty:
            continue
        change = lead.mean() - other_lead.mean()
        low, high = stats.welch_interval(lead.tolist(), other_lead.tolist())
        if set(lead.index) == set(other_lead.index):
            change, low, high = describe_pairs(lead - other_lead, study.resolution)
        form, both = f"+.{digits}f", (other_lead, lead)
        leads = [f"{columns.format_number(x.mean(), form)} ({len(x)})" for x in both]
        texts = [variant.name, *leads, columns.format_difference(change, low, high, digits)]
        rows.append([Cell(text) for text in texts])
    return named_table("contrast", rows, other=other.plan.study, study=study.plan.study)


def make_criteria_table(study: StudyRecord, summary: pd.DataFrame, digits: int) -> Table:
    """Return value and difference of every variant under each criterion of `match`, side by side.

    The table has no rows for a study with one criterion.
    """
    plan, rows = study.plan, summary.set_index("variant").to_dict("index")
    criteria = plan.criteria if len(plan.criteria) > 1 else []
    names = (plan.metric.label, "difference")
    headings = [f"{x} (equal {'steps' if c == 'none' else c})" for c in criteria for x in names]
    planned = {(v.variant or v.name, v.criterion): v.name for v in plan.variants}
    cells = []
    for name in dict.fromkeys(v.variant or v.name for v in plan.variants if criteria):
        line = [Cell(name)]
        for criterion in criteria:
            # The baseline belongs to every criterion.
            row = rows.get(name if name == plan.baseline else planned.get((name, criterion)), {})
            mean, sd, *interval = map(row.get, ("mean", "sd", "difference", "low", "high"))
            text = columns.format_difference(interval[0], interval[1], interval[2], digits)
            mark = columns.STAR if row.get("significant") else ""
            line += [Cell(columns.format_spread(mean, sd, digits)), Cell(text, mark=mark)]
        cells.append(line)
    return named_table("criteria", cells, headings, baseline=plan.baseline)


def _lead(study: StudyRecord, variant: str) -> "pd.Series[float]":
    names = (variant, study.plan.baseline)
    values, baseline = (pd.Series(study.values(name), dtype=float) for name in names)
    return (values - baseline).dropna()


def _levels(name: str) -> dict[str, str]:
    """Return the level of each axis that a variant's name states, or nothing for other names."""
    terms = [term.partition("=") for term in name.split(",")]
    return {axis: level for axis, _, level in terms} if all(t[1] for t in terms) else {}


def describe_pairs(
    differences: Iterable[float], resolution: float = 0.0
) -> tuple[float, float | None, float | None]:
    """Return the mean of the differences of all seeds and its interval."""
    values = list(differences)
    interval = stats.paired_interval(values, resolution=resolution)
    return interval or (statistics.fmean(values), None, None)
