"""Table of a study's results: rows of printed cells, and a caption that defines each column."""

from collections.abc import Sequence

import pandas as pd

from lit_attn.report import stats
from lit_attn.report.columns import (
    COLUMNS,
    NOTHING,
    PRINTERS,
    Record,
    format_spread,
    make_cells,
    make_scale,
)
from lit_attn.report.comparison import Comparisons
from lit_attn.report.formats import Cell, Table, named_table, read_asset
from lit_attn.report.read import BUSY, StudyRecord

SENTENCES: dict[str, str] = read_asset("sentences.yaml")
"""Sentences of the caption."""

ALWAYS = ("variant", "value", "n")
"""Columns that are printed also if they are empty."""

LATEX_COLUMNS = ("variant", "value", "n", "difference", "p", "flops")
"""Columns of the LaTeX table, which fit the text of a one-column page (397 pt)."""


def make_results_table(
    study: StudyRecord,
    summary: pd.DataFrame,
    comparisons: Comparisons,
    keys: Sequence[str] | None = None,
) -> Table:
    """Return the table of `summary` with the columns `keys`, or with all that have a value."""
    plan, scale = study.plan, make_scale(summary)
    records: list[Record] = [{str(k): v for k, v in r.items()} for r in summary.to_dict("records")]
    columns, cells = [], []
    for column in COLUMNS:
        if column.key in PRINTERS and (keys is None or column.key in keys):
            printed = make_cells(column, records, scale)
            if column.key in ALWAYS or any(cell.text != NOTHING for cell in printed):
                columns.append(column)
                cells.append(printed)
    values = _template_values(study, summary, comparisons)
    names = {"label": plan.metric.label, "flops": scale.flops.prefix, "memory": scale.memory.prefix}
    notes = [column.note.format(**values) for column in columns if column.note]
    if summary["missing"].astype(bool).any():
        notes.append(SENTENCES["missing"])
    if ties := int(summary["ties"].sum()):
        pairs = int(summary["pairs"].sum())
        notes.append(SENTENCES["ties"].format(ties=ties, pairs=_plural(pairs, "pair")))
    if not study.values(plan.baseline):
        notes.append(SENTENCES["no_baseline"].format(baseline=plan.baseline))
    notes += _describe_plan(study, comparisons.level)
    return Table(
        [column.heading.format(**names) for column in columns],
        [list(row) for row in zip(*cells, strict=True)],
        # A YAML title can span lines.
        title=" ".join(plan.title.split()).rstrip(".") + ".",
        warnings=_warnings(study),
        notes=[*notes, *_provenance(study)],
        kind="results",
    )


def make_metrics_table(study: StudyRecord, seeds: pd.DataFrame) -> Table:
    """Return the means of the split's other metrics, for the same weights as the study's metric.

    `seeds` is the frame of all cells. The IoU of each class has a table of its own.
    """
    metric = study.plan.metric
    prefix = f"metric {metric.name.partition('/')[0]}/{'ema-' * metric.averaged}"
    names = [
        name
        for name in map(str, seeds)
        if name.startswith(prefix) and name != f"metric {metric.name}"
        if not name.removeprefix(prefix).startswith(("ema-", "IoU:"))
    ]
    groups = seeds[seeds["status"] == "done"].groupby("variant", sort=False)[names]
    rows = []
    for variant, values in groups if names else ():
        means, spreads = values.mean(), values.std()
        cells = (Cell(format_spread(means[name], spreads[name], 4)) for name in names)
        rows.append([Cell(str(variant)), *cells])
    headings = [name.removeprefix("metric ") for name in names]
    return named_table("metrics", rows, headings)


def _template_values(
    study: StudyRecord, summary: pd.DataFrame, comparisons: Comparisons
) -> dict[str, object]:
    """Return the values of the placeholders in the columns' notes."""
    plan, metric = study.plan, study.plan.metric
    devices = study.measurements("device")
    epoch = "at the last epoch"
    if metric.selection == "best-validation":
        epoch = "at the best epoch of the validation split"
    if not any(cell.folder for cell in study.cells):
        epoch = "as given in the table of results"
    peaks = []
    if any(device.endswith("CPU") for device in devices):
        peaks.append("the largest resident set of the process")
    if not all(device.endswith("CPU") for device in devices):
        peaks.append("the largest allocation of CUDA's allocator")
    ratios = pd.concat([summary["step_time_ratio"], summary["evaluation_time_ratio"]])
    is_busy = any(ratios.dropna() > BUSY)
    # The step of a continuous metric is a rounding error, which needs no mention.
    is_coarse = comparisons.resolution > 0.01 * max(summary["sd"].dropna(), default=0.0)
    step = SENTENCES["resolution"].format(step=comparisons.resolution)
    return {
        "label": metric.label,
        "metric": metric.name,
        "epoch": epoch,
        "direction": "Higher" if metric.goal == "max" else "Lower",
        "seeds": _numbers(plan.seeds),
        "baseline": plan.baseline,
        "resolution": step if is_coarse else "",
        "alpha": f"{comparisons.level:.3g}",
        "test": _describe_test(comparisons),
        "star": _describe_star(comparisons),
        "units": f"{summary['units'].max():,}",
        "margin": metric.margin,
        "source": " ".join(plan.source.split()).rstrip(".") or "the study file",
        "busy": SENTENCES["busy"].format(ratio=BUSY) if is_busy else "",
        "peaks": " or ".join(peaks) or "the peak memory of a run",
    }


def _describe_test(comparisons: Comparisons) -> str:
    floor = SENTENCES["floor"].format(
        floor=stats.sign_flip_floor(comparisons.pairs), pairs=_plural(comparisons.pairs, "pair")
    )
    number = _plural(comparisons.count, "comparison")
    sentence = SENTENCES["joint_test" if comparisons.is_joint else "holm_test"]
    return sentence.format(comparisons=number, floor=floor)


def _describe_star(comparisons: Comparisons) -> str:
    count = 1 if comparisons.is_joint else max(1, comparisons.count)
    needed = stats.pairs_for_a_star(count, comparisons.level)
    star = SENTENCES["star"].format(seeds=needed)
    return star + (SENTENCES["star_failures"] if comparisons.has_failures else "")


def _describe_plan(study: StudyRecord, level: float) -> list[str]:
    """Return when the plan was sealed, what changed later, and how step times were measured."""
    notes = []
    if times := study.step_times:
        notes.append(SENTENCES["noisy_alone" if times.is_noisy else "alone"])
    if seals := study.seals:
        first = seals.entries[0]
        sentence = SENTENCES["sealed" if seals.is_before_results else "sealed_late"]
        notes.append(sentence.format(hash=first.hash, time=first.time[:16], results=first.results))
        if seals.added_seeds:
            seeds = ", ".join(str(seed) for added in seals.added_seeds for seed in added)
            looks = 1 + len(seals.added_seeds)
            notes.append(SENTENCES["looks"].format(seeds=seeds, looks=looks, level=level))
        keys = ("added_variants", "removed_variants", "changed_decisions")
        changes = [(key, ", ".join(getattr(seals, key))) for key in keys]
        notes += [SENTENCES[key].format(names=names) for key, names in changes if names]
    return notes


def _provenance(study: StudyRecord) -> list[str]:
    """Return the device, versions and hashes of the results."""
    if not study.measurements("device"):
        return []
    devices = ", ".join(_distinct(study, "device"))
    packages = {name for versions in _distinct(study, "versions") for name in versions.split("; ")}
    code, data = (_few(_distinct(study, name)) for name in ("code", "data"))
    versions = ", ".join(sorted(packages))
    return [
        SENTENCES["provenance"].format(devices=devices, versions=versions, code=code, data=data)
    ]


def _warnings(study: StudyRecord) -> list[str]:
    """Return the differences between records that make them incomparable."""
    warnings = []
    mixed = [
        f"{name} differs between runs ({_few(hashes)})"
        for name in ("code", "data")
        if len(hashes := _distinct(study, name)) > 1
    ]
    if mixed:
        warnings.append(SENTENCES["mixed"].format(hashes=" and ".join(mixed)))
    if len(_distinct(study, "versions")) > 1:
        warnings.append(SENTENCES["versions"])
    if len(_distinct(study, "device")) > 1:
        warnings.append(SENTENCES["devices"])
    return warnings


def _distinct(study: StudyRecord, name: str) -> list[str]:
    return sorted(set(study.measurements(name)))


def _few(hashes: list[str]) -> str:
    """Return up to three hashes, or the first one and the number of others."""
    return ", ".join(hashes) if len(hashes) <= 3 else f"{hashes[0]} and {len(hashes) - 1} others"


def _numbers(values: list[int]) -> str:
    if len(values) > 2 and values == list(range(values[0], values[-1] + 1)):
        return f"{values[0]} to {values[-1]}"
    shown = ", ".join(str(value) for value in values[:8])
    return shown if len(values) <= 8 else f"{shown}, … {values[-1]}"


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}{'s' * (count != 1)}"
