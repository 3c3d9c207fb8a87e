"""Effects of the factors of a study, beyond single variants."""

import itertools
from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lit_attn.report.records.study_record import StudyRecord
from lit_attn.report.statistics.significance_base import Levels, Values
from lit_attn.report.tables import columns
from lit_attn.report.tables.formats import Cell, Table, named_table


class Effect(NamedTuple):
    """A main effect of a level, or the interaction of two: mean, 95 % interval and corrected p.

    It is a mean over as many combinations of the other axes as `combinations` says. `effect` has
    the names of the levels, and `label` their texts in tables and figures.
    """

    effect: str
    label: str
    kind: str
    combinations: int
    difference: float
    low: float | None
    high: float | None
    p: float
    by_seed: list[float]

    @property
    def is_main(self) -> bool:
        """True for the effect of one level."""
        return self.kind == "main effect"


class Factors(NamedTuple):
    """Axes of a factorial study, and the values of its variants.

    `levels` has the levels of each axis, the baseline's first. `grid` has the row of the test
    (`SignificanceTest.list_rows`) by the level of each axis; NaN marks a combination without one.
    """

    levels: dict[str, list[str]]
    grid: NDArray[np.float64]


UNNAMED = "#"  # Beginning of the key of an axis whose name does not stand in variants' names.

Groups = dict[Levels, Values]  # Values by levels of all axes, and by seed.
Change = dict[int, int]  # Places of changed levels by the place of their axis.


def find_effects(study: StudyRecord) -> list[Effect]:
    """Return the main effects of a factorial study and the interactions of pairs of its axes.

    Its variants have names like `residual=full,zz=with,long`, and the baseline has the reference
    levels. Combinations and seeds that lack results are left out, and so is every criterion of
    `match` but the first. p is corrected for all effects by the test of the study. Empty
    unless two axes vary.
    """
    groups = _list_groups(study)
    rows = study.test.list_rows(groups)
    if not rows:
        return []
    factors = _arrange(study.plan.baseline, rows)
    changes: list[Change] = []
    contrasts: list[NDArray[np.float64]] = []
    for change in _list_changes(factors):
        contrast = _contrast(factors.grid, change)
        if contrast.size:
            changes.append(change)
            contrasts.append(contrast)
    if not changes:
        return []
    estimates = study.test.estimate_effects(groups, contrasts, study.resolution)
    effects = []
    for change, contrast, estimate in zip(changes, contrasts, estimates, strict=True):
        effect = Effect(
            effect=_name_change(factors, change, {}),
            label=_name_change(factors, change, study.plan.levels),
            kind="main effect" if len(change) == 1 else "interaction",
            combinations=len(contrast),
            difference=estimate.mean,
            low=estimate.low,
            high=estimate.high,
            p=estimate.p,
            by_seed=estimate.by_seed,
        )
        effects.append(effect)
    return effects


def _list_groups(study: StudyRecord) -> Groups:
    """Return the values of each combination of levels by seed; none for fewer than two axes."""
    reference = _levels(study.plan.baseline)
    groups: Groups = {}
    if len(reference) < 2:
        return groups
    for variant in study.plan.variants:
        levels = _levels(variant.name)
        by_seed = study.values(variant.name)
        if levels.keys() != reference.keys() or not by_seed:
            continue
        if study.plan.criteria and variant.criterion != study.plan.criteria[0]:
            continue
        groups[tuple(levels[axis] for axis in reference)] = by_seed
    return groups


def _arrange(baseline: str, rows: dict[Levels, list[float]]) -> Factors:
    """Return the levels of the axes, the baseline's first, and the rows of all combinations.

    A combination without a row has missing values.
    """
    axes: dict[str, list[str]] = {}
    for place, (axis, first) in enumerate(_levels(baseline).items()):
        further = [combination[place] for combination in rows]
        axes[axis] = list(dict.fromkeys([first, *further]))
    length = len(next(iter(rows.values())))
    grid = np.full([*map(len, axes.values()), length], np.nan)
    for combination, row in rows.items():
        places = []
        for axis_levels, level in zip(axes.values(), combination, strict=True):
            places.append(axis_levels.index(level))
        grid[tuple(places)] = row
    return Factors(axes, grid)


def _list_changes(factors: Factors) -> list[Change]:
    """Return the changes of one level, then those of two levels of different axes.

    Empty unless two axes vary.
    """
    single: list[Change] = []
    varying_axes = 0
    for axis, levels in enumerate(factors.levels.values()):
        # The reference is the first level.
        changes = [{axis: level} for level in range(1, len(levels))]
        single += changes
        if changes:
            varying_axes += 1
    if varying_axes < 2:
        return []
    double = []
    for first, second in itertools.combinations(single, 2):
        if first.keys() != second.keys():
            double.append(first | second)
    return single + double


def _name_change(factors: Factors, change: Change, labels: Mapping[str, str]) -> str:
    """Return the changed levels, as "residual=full and zz=with", or their labels."""
    axes = list(factors.levels)
    terms = []
    for place, level in change.items():
        axis = axes[place]
        name = factors.levels[axis][level]
        term = name if axis.startswith(UNNAMED) else f"{axis}={name}"
        terms.append(labels.get(term, term))
    return " and ".join(terms)


def _contrast(grid: NDArray[np.float64], change: Change) -> NDArray[np.float64]:
    """Return the effect of the changed levels in `grid`, (combinations, length of a row)."""
    # Each difference removes an axis, so the last axis is the first one to go.
    for axis, level in sorted(change.items(), reverse=True):
        grid = np.take(grid, level, axis) - np.take(grid, 0, axis)
    # Combinations that lack a level are missing values.
    rows = grid.reshape(-1, grid.shape[-1])
    return rows[~np.isnan(rows).any(axis=1)]


def make_effects_table(
    effects: list[Effect], study: StudyRecord, digits: int, level: float
) -> Table:
    """Return the effects of a factorial study as a table, with a star for p <= `level`."""
    rows = []
    for effect in effects:
        difference = columns.format_difference(
            effect.difference, effect.low, effect.high, f".{digits}f"
        )
        mark = columns.STAR if effect.p <= level else ""
        row = [
            Cell(effect.label),
            Cell(effect.kind),
            Cell(difference),
            Cell(columns.format_p(effect.p), mark=mark),
            Cell(str(effect.combinations)),
        ]
        rows.append(row)
    table = named_table(
        "effects",
        rows,
        pairs=study.test.pairs,
        count=len(effects),
        alpha=level,
        test=study.test.words["test"],
        label=study.plan.metric.label,
        baseline=study.plan.baseline,
    )
    # The effect, the difference and p are enough on a narrow screen.
    return replace(table, phone=(0, 2, 3))


def _levels(name: str) -> dict[str, str]:
    """Return the level of each axis that a variant's name states.

    A value of an axis of named changes has no axis in the name, as "long" in
    `residual=full,zz=with,long`. The place of the term stands for the axis.
    """
    levels = {}
    for place, term in enumerate(name.split(",")):
        axis, equals, level = term.partition("=")
        if equals:
            levels[axis] = level
        else:
            levels[_name_axis(place)] = term
    return levels


def _name_axis(place: int) -> str:
    """Return the key of an axis without a name; no axis of a study can have this name."""
    return f"{UNNAMED}{place}"
