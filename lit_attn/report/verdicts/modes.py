"""The warning of a metric whose values fall in two groups: their shares, with an exact test."""

import itertools
from collections.abc import Mapping

from lit_attn.report.numbers import write_number
from lit_attn.report.records.study_record import StudyRecord
from lit_attn.report.statistics import stats
from lit_attn.report.statistics.modes import Group, find_groups
from lit_attn.report.statistics.shares import are_two_valued

MOST_NAMED = 6
"""Most variants whose share a warning gives."""


def warn_of_modes(study: StudyRecord) -> list[str]:
    """Return a warning with the share of each variant if the values of seeds fall in two groups.

    A metric with the values 0 and 1 needs none: its mean is the share, and its test is exact. Nor
    do medians: the values of seeds are not averaged.
    """
    if not study.test.has_means:
        return []
    values = {}
    for variant in study.plan.variants:
        by_seed = list(study.values(variant.name).values())
        if by_seed:
            values[variant.name] = by_seed
    metric = study.plan.metric
    all_values = list(itertools.chain(*values.values()))
    if not all_values or are_two_valued(all_values, metric.scale):
        return []
    groups = find_groups(values)
    if groups is None:
        return []
    numbers = {name: len(group) for name, group in values.items()}
    counts = groups.counts
    if metric.goal == "min":
        counts = {name: numbers[name] - count for name, count in counts.items()}
    better = groups.higher if metric.goal == "max" else groups.lower
    return [
        f"two groups of seeds: {metric.label} is {_name(groups.lower)} or {_name(groups.higher)},"
        " and never between. A mean of such values is that of no seed. With"
        f" {_name(better)} end {_describe_shares(study, counts, numbers)}.{_advise(study)}"
    ]


def _name(group: Group) -> str:
    """Return the values of a group in words."""
    low, high = write_number(group.low, ".4g"), write_number(group.high, ".4g")
    return low if low == high else f"{low} to {high}"


def _describe_shares(
    study: StudyRecord, counts: Mapping[str, int], numbers: Mapping[str, int]
) -> str:
    """Return the share of the baseline and of the variants that differ most from it, with p."""
    baseline = study.plan.baseline
    if baseline not in counts:
        texts = [f"{name} {counts[name]} of {numbers[name]}" for name in list(counts)[:MOST_NAMED]]
        return "; ".join(texts)
    p_values = compare_shares(baseline, counts, numbers)
    named = sorted(p_values, key=lambda name: p_values[name])[: MOST_NAMED - 1]
    texts = [f"{baseline} {counts[baseline]} of {numbers[baseline]}"]
    for name in named:
        p = write_number(p_values[name], ".2g")
        texts.append(f"{name} {counts[name]} of {numbers[name]} (p = {p})")
    left_out = len(p_values) - len(named)
    rest = f"; {left_out} more differ less" if left_out else ""
    return f"{'; '.join(texts)}{rest} (Fisher's exact test, corrected by Holm's method)"


def compare_shares(
    baseline: str, counts: Mapping[str, int], numbers: Mapping[str, int]
) -> dict[str, float]:
    """Return Fisher's p of each variant's share against the baseline's, corrected by Holm."""
    from scipy.stats import fisher_exact

    pairs = {name: (counts[name], numbers[name] - counts[name]) for name in counts}
    names = [name for name in pairs if name != baseline]
    p_values = [float(fisher_exact([pairs[name], pairs[baseline]]).pvalue) for name in names]
    return dict(zip(names, stats.holm(p_values), strict=True))


def _advise(study: StudyRecord) -> str:
    """Return the advice to compare a recorded metric that is 0 or 1, if the cells have one."""
    split = study.plan.metric.name.partition("/")[0]
    cells = study.finished_cells()
    # A dictionary keeps the order in which its keys were added.
    names = dict.fromkeys(itertools.chain(*(cell.measurements for cell in cells)))
    for name in names:
        if not name.startswith(f"metric {split}/"):
            continue
        recorded = study.measurements(name)
        if len(recorded) == len(cells) and set(recorded) == {0.0, 1.0}:
            return f" The metric {name.removeprefix('metric ')} of the same cells counts them."
    return " Compare a metric that is 1 for such a seed and 0 for the others (docs/statistics.md)."
