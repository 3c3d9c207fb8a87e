"""Effects beyond single variants: factors of a factorial study, and changes between two studies.

A factorial study has variants with names like `residual=full,zz=with`. The reference level of each
axis is that of the baseline.
"""

import itertools
import operator
import statistics
from collections.abc import Iterable
from functools import reduce
from typing import NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from lit_attn.report import stats
from lit_attn.report.columns import STAR, format_difference, format_number, format_p
from lit_attn.report.comparison import ALPHA
from lit_attn.report.formats import Cell, Table, named_table
from lit_attn.report.read import StudyRecord


class Effect(NamedTuple):
    """Effect of a level, or the interaction of two: mean, 95 % interval and corrected p.

    `kind` is "main effect" or "interaction", `combinations` the number of combinations of the other
    axes behind it, and `by_seed` its value with each seed.
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

    The main effect of a level is the mean difference from the reference level over all combinations
    of the other axes; an interaction is the difference of two such differences. Combinations and
    seeds that lack results are left out. p is corrected for all effects (joint sign-flip test).
    The list is empty unless two axes vary.
    """
    reference = _levels(study.plan.baseline)
    values = {
        tuple(levels.values()): study.values(variant.name)
        for variant in study.plan.variants
        if (levels := _levels(variant.name)).keys() == reference.keys()
        and study.values(variant.name)
    }
    if len(reference) < 2 or not values:
        return []
    index = pd.MultiIndex.from_tuples(list(values), names=list(reference))
    frame = pd.DataFrame(list(values.values()), index=index, dtype=float).dropna(axis=1)
    changes = [
        {axis: str(level)}
        for axis in reference
        for level in index.unique(axis)
        if level != reference[axis]
    ]
    pairs = (first | second for first, second in itertools.combinations(changes, 2))
    chosen = [*changes, *(pair for pair in pairs if len(pair) == 2)]
    rows = [_contrast(frame, changed, reference) for changed in chosen]
    estimated = [(changed, row) for changed, row in zip(chosen, rows, strict=True) if row.size]
    if len({axis for change in changes for axis in change}) < 2 or not estimated:
        return []
    p_values = stats.joint_sign_flip(np.array([row.mean(axis=0) for _, row in estimated]))
    return [
        Effect(
            " and ".join(f"{axis}={level}" for axis, level in changed.items()),
            "main effect" if len(changed) == 1 else "interaction",
            len(row),
            *_describe(row.mean(axis=0)),
            p,
            row.mean(axis=0).tolist(),
        )
        for (changed, row), p in zip(estimated, p_values, strict=True)
    ]


def _contrast(
    frame: pd.DataFrame, changed: dict[str, str], reference: dict[str, str]
) -> NDArray[np.float64]:
    """Return the effect of the `changed` levels for each combination of the other axes and seed.

    It sums the values with every subset of the changes, with the sign of the number of levels left
    at their reference.
    """
    others = [axis for axis in reference if axis not in changed]
    signed = []
    for levels in itertools.product(*((level, reference[axis]) for axis, level in changed.items())):
        is_chosen = pd.Series(True, index=frame.index)
        for axis, level in zip(changed, levels, strict=True):
            is_chosen &= frame.index.get_level_values(axis) == level
        part = frame[is_chosen]
        part = part.droplevel(list(changed)) if others else part.reset_index(drop=True)
        left = sum(level == reference[axis] for axis, level in zip(changed, levels, strict=True))
        signed.append((-1) ** left * part)
    # Combinations that lack a level become missing values.
    return reduce(operator.add, signed).dropna().to_numpy()


def make_effects_table(effects: list[Effect], study: StudyRecord, digits: int) -> Table:
    """Return the effects of a factorial study as a table."""
    rows = [
        [
            Cell(effect.effect),
            Cell(effect.kind),
            Cell(format_difference(effect.difference, effect.low, effect.high, digits)),
            Cell(format_p(effect.p), mark=STAR if effect.p <= ALPHA else ""),
            Cell(str(effect.combinations)),
        ]
        for effect in effects
    ]
    plan, count = study.plan, len(effects)
    return named_table(
        "effects", rows, label=plan.metric.label, baseline=plan.baseline, count=count
    )


def make_contrast_table(study: StudyRecord, other: StudyRecord, digits: int) -> Table:
    """Return how each variant's lead over the baseline differs from its lead in another study.

    With the same seeds in both studies the change is paired by seed, otherwise its interval is
    Welch's.
    """
    rows = []
    for variant in study.plan.variants:
        lead, other_lead = (_lead(record, variant.name) for record in (study, other))
        if variant.name == study.plan.baseline or lead.empty or other_lead.empty:
            continue
        if set(lead.index) == set(other_lead.index):
            change, low, high = _describe(lead - other_lead)
        else:
            change, (low, high) = (
                lead.mean() - other_lead.mean(),
                stats.welch_interval(lead.tolist(), other_lead.tolist()),
            )
        leads = [
            f"{format_number(x.mean(), f'+.{digits}f')} ({len(x)})" for x in (other_lead, lead)
        ]
        texts = [variant.name, *leads, format_difference(change, low, high, digits)]
        rows.append([Cell(text) for text in texts])
    return named_table("contrast", rows, other=other.plan.study, study=study.plan.study)


def _lead(study: StudyRecord, variant: str) -> "pd.Series[float]":
    """Return the differences of a variant to the baseline by seed."""
    values, baseline = (
        pd.Series(study.values(v), dtype=float) for v in (variant, study.plan.baseline)
    )
    return (values - baseline).dropna()


def _levels(name: str) -> dict[str, str]:
    """Return the level of each axis that a variant's name states, or nothing for other names."""
    terms = [term.partition("=") for term in name.split(",")]
    return {axis: level for axis, _, level in terms} if all(t[1] for t in terms) else {}


def _describe(differences: Iterable[float]) -> tuple[float, float | None, float | None]:
    """Return the mean of the differences of all seeds and its interval."""
    values = list(differences)
    interval = stats.paired_interval(values)
    low, high = (interval.low, interval.high) if interval else (None, None)
    return statistics.fmean(values), low, high
