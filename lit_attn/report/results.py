"""Table of a study's results: rows of printed cells, and a caption that defines each column."""

import re
import statistics
from collections.abc import Sequence
from typing import cast

import pandas as pd

from lit_attn.cells.records import Plan
from lit_attn.report import columns, stats
from lit_attn.report.comparison import ALPHA, Comparisons
from lit_attn.report.formats import Cell, Table, named_table, read_asset
from lit_attn.report.numbers import fill, round_number
from lit_attn.report.read import BUSY, StudyRecord, find_differences
from lit_attn.report.timing import TIME_MARK
from lit_attn.schema.errors import plural

SENTENCES: dict[str, str] = read_asset("sentences.yaml")  # Of the caption.
ALWAYS = ("variant", "value", "n")  # Columns that are printed also if they are empty.
LATEX_COLUMNS = ("variant", "value", "n", "difference", "p", "flops")
"""Columns of the LaTeX table, which fit the text of a one-column page (397 pt)."""


def make_results_table(
    study: StudyRecord, summary: pd.DataFrame, comparisons: Comparisons, keys: Sequence[str] = ()
) -> Table:
    """Return the table of `summary` with the columns `keys`, or with all that have a value."""
    plan, scale = study.plan, columns.make_scale(summary)
    records = cast("list[columns.Record]", summary.to_dict("records"))
    shown, cells = [], []
    for column in columns.COLUMNS:
        # Rows without their names would say nothing.
        if column.key in columns.PRINTERS and (not keys or column.key in ("variant", *keys)):
            printed = columns.make_cells(column, records, scale)
            if column.key in ALWAYS or any(cell.text != columns.NOTHING for cell in printed):
                shown.append(column)
                cells.append(printed)
    values = _template_values(study, summary, comparisons)
    names = {"label": plan.metric.label, "flops": scale.flops, "memory": scale.memory}
    notes = [*filter(None, (fill(column.note, **values).strip() for column in shown))]
    if any(cell.text == columns.BUSY_TEXT for printed in cells for cell in printed):
        notes.append(fill(SENTENCES["busy"], ratio=BUSY))
    if any(cell.mark == TIME_MARK for printed in cells for cell in printed):
        notes.append(_describe_time_faults(study))
    if summary["missing"].astype(bool).any():
        notes.append(SENTENCES["missing"])
    if (summary["planned"] > summary["n"] + summary["failed"]).any():
        notes.append(SENTENCES["interim"])
    if ties := int(summary["ties"].sum()):
        pairs = int(summary["pairs"].sum())
        notes.append(fill(SENTENCES["ties"], ties=ties, pairs=plural(pairs, "pair")))
    if not study.values(plan.baseline):
        notes.append(fill(SENTENCES["no_baseline"], baseline=plan.baseline))
    notes += _describe_plan(study, comparisons.level)
    provenance, warnings = describe_records(study)
    return Table(
        [fill(column.heading, **names) for column in shown],
        [list(row) for row in zip(*cells, strict=True)],
        # A YAML title can span lines.
        title=re.sub(r"(?<=[^.?!])\.*$", ".", " ".join(plan.title.split())),
        warnings=warnings,
        notes=[*notes, *provenance],
        kind="results",
    )


def _describe_time_faults(study: StudyRecord) -> str:
    """Return the sentence of the caption about times that cannot be compared."""
    names: dict[str, list[str]] = {}
    for faults in (study.step_time_faults, study.time_faults):
        for variant, fault in faults.items():
            if fault and variant not in names.setdefault(fault, []):
                names[fault].append(variant)
    parts = [f"{', '.join(variants)}: {fault}" for fault, variants in names.items()]
    return fill(SENTENCES["time_faults"], mark=TIME_MARK, faults="; ".join(parts))


def make_metrics_table(study: StudyRecord) -> Table:
    """Return the means of the split's other metrics, for the same weights as the study's metric.

    The IoU of each class has a table of its own.
    """
    metric, cells = study.plan.metric, study.finished_cells()
    prefix = f"metric {metric.name.partition('/')[0]}/{'averaged-' * metric.averaged}"
    pattern = re.compile(f"{re.escape(prefix)}(?!averaged-|IoU:)")
    recorded = dict.fromkeys(name for cell in cells for name in cell.measurements)
    names = [n for n in recorded if pattern.match(n) and n != f"metric {metric.name}"]
    rows = []
    for variant in dict.fromkeys(cell.variant for cell in cells if names):
        measured = (pd.Series(study.measurements(n, variant), dtype=float) for n in names)
        texts = (columns.format_spread(x.mean(), x.std(), 4) for x in measured)
        rows.append([Cell(variant), *map(Cell, texts)])
    return named_table("metrics", rows, [name.removeprefix("metric ") for name in names])


def make_class_frame(study: StudyRecord) -> pd.DataFrame:
    """Return mean and standard deviation (ddof 1) of the IoU in percent, by class and variant.

    The values belong to the split and the weights (trained or averaged) of the study's metric.
    """
    metric = study.plan.metric
    prefix = f"metric {metric.name.partition('/')[0]}/{'averaged-' * metric.averaged}IoU:"
    rows = [
        (name.removeprefix(prefix), cell.variant, 100 * value)
        for cell in study.finished_cells()
        for name, value in cell.measurements.items()
        if name.startswith(prefix)
    ]
    frame = pd.DataFrame(rows, columns=["class", "variant", "iou"]).astype({"iou": float})
    groups = frame.groupby(["class", "variant"], sort=False)["iou"]
    return groups.agg(mean="mean", sd="std", n="count").reset_index()


def make_class_table(classes: pd.DataFrame) -> Table:
    """Return the class frame as a table: classes down, variants across, best means bold."""
    variants = list(dict.fromkeys(classes["variant"]))
    rows = []
    for label, values in classes.set_index("variant").groupby("class", sort=False):
        # A mean over fewer seeds than another variant's is never the best one.
        best = values.loc[values["n"] == values["n"].max(), "mean"].max()
        measured = values[["mean", "sd"]].reindex(variants).itertuples(index=False)
        row = [Cell(str(label))]
        for mean, sd in measured:
            is_best = round_number(mean) == round_number(best)
            row.append(Cell(columns.format_spread(mean, sd, 2), is_best))
        rows.append(row)
    return named_table("classes", rows, variants)


def _template_values(
    study: StudyRecord, summary: pd.DataFrame, comparisons: Comparisons
) -> dict[str, object]:
    plan, metric = study.plan, study.plan.metric
    ends = {"last": "last epoch", "best-validation": "best epoch of the validation split"}
    measure = f"{metric.name} at the {ends[metric.selection]}"
    if not any(cell.folder for cell in study.cells):
        measure = f"the column '{metric.name}' of the table of results"
    # The step of a continuous metric is a rounding error, which needs no mention.
    is_coarse = study.resolution > 0.01 * max(summary["sd"].dropna(), default=float("inf"))
    pairs = max(comparisons.pairs, default=0)
    smallest_p = min(1.0, 2.0 ** (1 - pairs))
    floor = fill(SENTENCES["floor"], floor=smallest_p, pairs=plural(pairs, "pair"))
    has_different_seeds = len(set(comparisons.pairs)) > 1
    test = "joint_test_of_different_seeds" if has_different_seeds else "joint_test"
    comparison_count = plural(len(comparisons.pairs), "comparison")
    has_failed = summary["failed"].any()
    return {
        **{n: s if has_failed else "" for n, s in SENTENCES.items() if n.startswith("failed_")},
        "label": metric.label,
        "metric": metric.name,
        "measure": measure,
        "direction": "Higher" if metric.goal == "max" else "Lower",
        "planned": len(plan.seeds),
        "seeds": columns.format_seeds(plan.seeds),
        "baseline": plan.baseline,
        "resolution": fill(SENTENCES["resolution"], step=study.resolution) if is_coarse else "",
        "alpha": comparisons.level,
        "test": fill(SENTENCES[test], comparisons=comparison_count, floor=floor),
        "star": fill(SENTENCES["star"], seeds=stats.pairs_for_a_star(1, comparisons.level)),
        "units": f"{summary['units'].max():,}",
        "margin": metric.margin,
        "source": " ".join(plan.source.split()).rstrip(".") or "the study file",
        "step_time": "" if study.step_times else SENTENCES["step_time"],
    }


def _describe_plan(study: StudyRecord, level: float) -> list[str]:
    """Return the set-up, the tuning, how step times were measured, seal and changes."""
    notes = describe_setup(study.plan)
    if tuning := study.tuning:
        values = tuning.model_dump() | {"keys": " and ".join(tuning.keys)}
        notes.append(fill(SENTENCES["tuned"], label=tuning.select.label, **values))
    if times := study.step_times:
        names = {variant.variant or variant.name for variant in study.plan.variants}
        spreads = [(100 * e.spread, e.variant) for e in times.variants if e.variant in names]
        spread, name = max(spreads, default=(0.0, ""))
        missing = ", ".join(sorted(names - {e.variant for e in times.variants}))
        values = {"missing": f" (not for {missing})" if missing else "", "spread": spread}
        values |= {"noise": SENTENCES["noise"] if times.is_noisy else "", "name": name}
        notes.append(fill(SENTENCES["alone"], **values))
    if seals := study.seals:
        first = seals.entries[0]
        sentence = SENTENCES["sealed" if seals.is_before_results else "sealed_late"]
        notes.append(fill(sentence, hash=first.hash, time=first.time[:16], results=first.results))
        if seals.added_seeds:
            seeds = columns.format_seeds(list(sum(seals.added_seeds, ())))
            # `bound` is the sum of the levels of all looks.
            values = {"looks": 1 + len(seals.added_seeds), "bound": 1.5 * ALPHA - level}
            notes.append(fill(SENTENCES["looks"], seeds=seeds, level=level, **values))
        changes = [(key, ", ".join(names)) for key, names in seals.changes().items() if names]
        notes += [fill(SENTENCES[key], names=names) for key, names in changes]
    return notes


def describe_setup(plan: Plan) -> list[str]:
    """Return the recorded agreement with released code, and what is equal in all variants."""
    agreement, criteria = plan.parity.rstrip("."), plan.criteria
    notes = [fill(SENTENCES["parity"], words=agreement)] if agreement else []
    first = " without @" if len(criteria) > 1 else ""
    for number, name in enumerate(criteria if criteria not in (["parameters"], ["none"]) else []):
        mark = f" with @{name}" if number else first
        # A newer version may have other criteria.
        words = SENTENCES.get(f"equal_{name}", name)
        notes.append(fill(SENTENCES["equal"], mark=mark, words=words))
    return notes


def describe_origin(plan: Plan) -> str:
    """Return the name, title and set-up of a study, for captions."""
    return " ".join([f"{plan.study}: {plan.title.rstrip('.')}.", *describe_setup(plan)])


def find_chance_results(study: StudyRecord) -> list[str]:
    """Return the variants whose mean is no better than the mean of their chance levels."""
    sign = 1 if study.plan.metric.goal == "max" else -1
    variants = []
    for variant in study.plan.variants:
        levels = study.measurements("chance", variant.name)
        values = list(study.values(variant.name).values())
        # Results of earlier versions have no level.
        if levels and len(levels) == len(values):
            excess = statistics.fmean(values) - statistics.fmean(levels)
            if sign * excess <= 0:
                variants.append(variant.name)
    return variants


def describe_records(study: StudyRecord) -> tuple[list[str], list[str]]:
    """Return where the results come from, and warnings about results and unreadable files."""
    names = ["code", "data", "versions", "device"]
    distinct = {name: sorted(set(study.measurements(name))) for name in names}
    packages = sorted({name for text in distinct["versions"] for name in text.split("; ")})
    texts = {name: ", ".join(v) for name, v in (distinct | {"versions": packages}).items()}
    notes = [fill(SENTENCES["provenance"], **texts)] if distinct["device"] else []
    differences = find_differences(study.finished_cells())
    mixed = [f"{name} differs between runs ({', '.join(h)})" for name, h in differences.items()]
    warnings = [fill(SENTENCES["mixed"], hashes=" and ".join(mixed))] if mixed else []
    untrained = find_chance_results(study)
    if untrained:
        text = ", ".join(untrained)
        warnings.append(fill(SENTENCES["chance"], variants=text, metric=study.plan.metric.name))
    names = [name for name in ("versions", "device") if len(distinct[name]) > 1]
    names += study.unreadable
    return notes, [*warnings, *(SENTENCES[name] for name in names)]
