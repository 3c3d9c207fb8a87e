"""Table of a study's results: rows of printed cells, and a caption that defines each column."""

import itertools
import math
import re
from collections.abc import Sequence
from typing import cast

import pandas as pd

from lit_attn.cells.decisions import Seals
from lit_attn.cells.records import Metric, Plan, StepTimes, Tuning
from lit_attn.report.numbers import fill
from lit_attn.report.records.study_record import BUSY_RATIO, StudyRecord
from lit_attn.report.records.timing import TIME_MARK
from lit_attn.report.statistics import stats
from lit_attn.report.statistics.designs import EFFECT
from lit_attn.report.statistics.times import Censored, count_events, find_median, has_event
from lit_attn.report.tables import brief, columns
from lit_attn.report.tables.brief import choose_places
from lit_attn.report.tables.formats import Cell, Table, named_table
from lit_attn.report.tables.labels import find_blocks
from lit_attn.report.tables.provenance import SENTENCES, describe_records
from lit_attn.report.tables.screening import find_words, make_screened_out_rows
from lit_attn.report.verdicts.comparison import Comparisons, find_verdict
from lit_attn.report.verdicts.floors import is_below_floor, make_floor_row, warn_of_floor
from lit_attn.report.verdicts.modes import warn_of_modes
from lit_attn.report.verdicts.spreads import warn_of_spreads
from lit_attn.schema.errors import plural

ALWAYS = ("variant", "value", "n")  # Columns that are printed also if they are empty.


def make_results_table(
    study: StudyRecord, summary: pd.DataFrame, comparisons: Comparisons, keys: Sequence[str] = ()
) -> Table:
    """Return the table of `summary` with all columns that have a value.

    Its brief form has the columns `keys`, or else those that the study chooses, or else six.
    """
    plan = study.plan
    scale = columns.make_scale(summary)
    records = cast("list[columns.Record]", summary.to_dict("records"))
    is_below = is_below_floor(study)
    for record in records:
        record["decision"] = find_verdict(record, plan, is_below_floor=is_below)
        record["is_below_floor"] = is_below
        record["test"] = study.test
    shown: list[columns.Column] = []
    cells: list[list[Cell]] = []
    for column in columns.COLUMNS:
        if column.key not in columns.PRINTERS:
            continue
        column = column.describe(study.test.pairs)
        printed = columns.make_cells(column, records, scale)
        is_filled = any(cell.text != columns.NOTHING or cell.mark for cell in printed)
        is_always_shown = column.key in ALWAYS and not plan.is_smoke
        if is_filled or is_always_shown:
            shown.append(column)
            cells.append(printed)
    headings = []
    for column in shown:
        heading = fill(
            column.heading,
            label=plan.metric.label,
            event=plan.metric.event,
            flops=scale.flops,
            memory=scale.memory,
        )
        headings.append(heading)
    values = _template_values(study, summary, comparisons)
    notes = []
    for column in shown:
        note = fill(column.note, **values).strip()
        if note:
            notes.append(note)
    notes += _describe_marks(study, cells)
    if not plan.is_smoke:
        notes += _describe_rows(study, summary)
        notes += _describe_intervals(summary, values, comparisons.level)
        notes += _describe_rules(study, comparisons)
    notes += _describe_plan(study, comparisons.level)
    provenance, warnings = describe_records(study)
    doubts = [*warn_of_spreads(study), *warn_of_modes(study)]
    warnings = [*warn_of_floor(study), *warnings, *doubts]
    shown_keys = [column.key for column in shown]
    usual = brief.TIME_COLUMNS if plan.metric.event else brief.VALUE_COLUMNS
    chosen = keys or plan.columns or usual
    if plan.is_smoke:
        # Its few columns are sizes, which no study chooses.
        chosen = shown_keys
    places = choose_places(shown_keys, chosen)
    brief_caption = brief.write_brief_caption(
        study,
        summary,
        [shown[place] for place in places],
        [cells[place] for place in places],
        values,
    )
    rows = [list(row) for row in zip(*cells, strict=True)]
    floor_row = make_floor_row(study, shown_keys, scale.digits)
    if floor_row is not None:
        names = [record["variant"] for record in records]
        rows.insert(names.index(plan.baseline) + 1, floor_row)
        notes.append(SENTENCES["best_floor"])
    screened_out = make_screened_out_rows(study, shown_keys, scale.digits)
    rows += screened_out
    has_differences = "difference" in shown_keys
    headings_of_blocks = find_blocks(plan)
    blocks = [headings_of_blocks.get(row[0].text, "") for row in rows]
    # A YAML title can span lines.
    title = " ".join(plan.title.split())
    return Table(
        headings,
        rows,
        title=re.sub(r"(?<=[^.?!])\.*$", ".", title),
        warnings=warnings,
        notes=[*notes, *provenance],
        kind="results",
        shown=places,
        phone=choose_places(
            shown_keys, brief.PHONE if has_differences else brief.VALUE_COLUMNS[:3]
        ),
        summary=brief_caption,
        screened_out=len(screened_out),
        blocks=blocks if any(blocks) else (),
    )


def _describe_marks(study: StudyRecord, cells: list[list[Cell]]) -> list[str]:
    """Return the sentences of the caption about busy machines and incomparable times."""
    notes = []
    all_cells = list(itertools.chain.from_iterable(cells))
    if any(cell.mark == columns.BUSY_MARK for cell in all_cells):
        notes.append(fill(SENTENCES["busy"], mark=columns.BUSY_MARK, ratio=BUSY_RATIO))
    if any(cell.mark == TIME_MARK for cell in all_cells):
        notes.append(_describe_time_faults(study))
    return notes


def _describe_rows(study: StudyRecord, summary: pd.DataFrame) -> list[str]:
    """Return the sentences of the caption about missing seeds, ties and the baseline."""
    notes = []
    if summary["missing"].astype(bool).any() and study.test.missing:
        notes.append(study.test.missing)
    ties = int(summary["ties"].sum())
    if ties:
        pairs = int(summary["pairs"].sum())
        notes.append(fill(SENTENCES["ties"], ties=ties, pairs=plural(pairs, "pair")))
    if study.is_two_valued:
        notes.append(study.test_words["shares"])
    baseline = study.plan.baseline
    if not study.values(baseline):
        notes.append(fill(SENTENCES["no_baseline"], baseline=baseline))
    room = find_room(study)
    if room is not None:
        # Power is that of an effect of two standard deviations.
        sentence = SENTENCES["room" if room >= EFFECT else "little_room"]
        best = study.plan.metric.best
        notes.append(fill(sentence, baseline=baseline, best=best, room=room, effect=EFFECT))
    return notes


def find_room(study: StudyRecord) -> float | None:
    """Return the distance of the baseline's mean to the best possible value, in its deviations.

    It is None if the metric declares no best value, and if the baseline has no mean or no spread.
    """
    best = study.plan.metric.best
    values = list(study.values(study.plan.baseline).values())
    if best is None or len(values) < 2 or not study.test.has_means:
        return None
    mean, variance = stats.find_moments(values)
    if mean == best:
        return 0.0
    return abs(best - mean) / math.sqrt(variance) if variance > 0 else None


def _describe_intervals(
    summary: pd.DataFrame, values: dict[str, object], level: float
) -> list[str]:
    """Return the sentence about intervals that exclude zero beside a p without a star.

    `values` fill the templates of the columns.
    """
    excludes_zero = (summary["low"] > 0) | (summary["high"] < 0)
    has_large_p = summary["p_adjusted"] > level
    # A missing interval or p is no contradiction.
    names = summary["variant"][(excludes_zero & has_large_p).fillna(False)]
    if names.empty:
        return []
    return [fill(SENTENCES["excludes_zero"], **values, variants=", ".join(names))]


def _describe_rules(study: StudyRecord, comparisons: Comparisons) -> list[str]:
    """Return the sentences about the screening and about looks at a running study."""
    notes = []
    screening = study.screening
    if screening is not None and screening.kept is None:
        notes.append(fill(SENTENCES["screening_open"], **find_words(study)))
    if screening is not None and screening.kept:
        notes.append(fill(SENTENCES["design"], **find_words(study)))
    if screening is not None and screening.screened_out:
        notes.append(fill(SENTENCES["screened_out"], label=screening.select.label))
    planned = len(study.plan.seeds)
    if any(cell.is_open for cell in study.cells):
        bounds = []
        for count, level in comparisons.interim.items():
            bounds.append(f"after {count} {study.test_words['done']} a star needs p ≤ {level:.2g}")
        words = "; ".join(bounds) or "no variant has a pair of seeds"
        notes.append(fill(SENTENCES["interim"], bounds=words))
    elif study.looks is not None and study.looks.has_any(planned):
        notes.append(fill(SENTENCES["watched"], level=comparisons.level))
    return notes


def _describe_time_faults(study: StudyRecord) -> str:
    """Return the sentence of the caption about times that cannot be compared."""
    by_fault: dict[str, list[str]] = {}
    for faults in (study.step_time_faults, study.time_faults):
        for variant, fault in faults.items():
            if not fault:
                continue
            variants = by_fault.setdefault(fault, [])
            if variant not in variants:
                variants.append(variant)
    parts = [f"{', '.join(variants)}: {fault}" for fault, variants in by_fault.items()]
    return fill(SENTENCES["time_faults"], mark=TIME_MARK, faults="; ".join(parts))


def make_metrics_table(study: StudyRecord) -> Table:
    """Return the means of the split's other metrics, for the same weights as the study's metric.

    A time until an event has its median. The IoU of each class has a table of its own.
    """
    metric = study.plan.metric
    events = study.plan.events
    cells = study.finished_cells()
    # Other weights of the split, and the classes, are left out.
    pattern = re.compile(f"{re.escape(_metric_prefix(metric))}(?!averaged-|IoU:)")
    recorded = dict.fromkeys(name for cell in cells for name in cell.measurements)
    shown = f"metric {metric.name}"
    names = [name for name in recorded if pattern.match(name) and name != shown]
    if not names:
        return named_table("metrics", [])
    headings = [name.removeprefix("metric ") for name in names]
    rows = []
    for variant in dict.fromkeys(cell.variant for cell in cells):
        row = [Cell(variant)]
        for name, heading in zip(names, headings, strict=True):
            if heading in events:
                row.append(Cell(_print_times(study, name, variant)))
            else:
                values = pd.Series(study.measurements(name, variant), dtype=float)
                row.append(Cell(columns.format_spread(values.mean(), values.std(), 4)))
        rows.append(row)
    table = named_table("metrics", rows, headings)
    if any(heading in events for heading in headings):
        table.notes.append(SENTENCES["medians"])
    return table


def _print_times(study: StudyRecord, name: str, variant: str) -> str:
    """Return the median of a measured time until an event, and its runs, as "160 (11 of 12)"."""
    times = []
    for cell in study.finished_cells(variant):
        time, steps = cell.measurements.get(name), cell.measurements["steps"]
        if time is not None:
            times.append(time if has_event(time, steps) else Censored(steps))
    median = columns.format_median(find_median(times), len(times))
    return f"{median} ({count_events(times)} of {len(times)})"


def _metric_prefix(metric: Metric) -> str:
    """Return the start of all measurements with the split and the weights of `metric`."""
    split = metric.name.partition("/")[0]
    weights = "averaged-" if metric.averaged else ""
    return f"metric {split}/{weights}"


def make_class_frame(study: StudyRecord) -> pd.DataFrame:
    """Return mean and standard deviation (ddof 1) of the IoU in percent, by class and variant.

    The values belong to the split and the weights (trained or averaged) of the study's metric.
    """
    prefix = f"{_metric_prefix(study.plan.metric)}IoU:"
    rows = []
    for cell in study.finished_cells():
        for name, value in cell.measurements.items():
            if name.startswith(prefix):
                rows.append((name.removeprefix(prefix), cell.variant, 100 * value))
    frame = pd.DataFrame(rows, columns=["class", "variant", "iou"]).astype({"iou": float})
    groups = frame.groupby(["class", "variant"], sort=False)["iou"]
    return groups.agg(mean="mean", sd="std", n="count").reset_index()


def make_class_table(classes: pd.DataFrame) -> Table:
    """Return the class frame as a table: classes down, variants across."""
    variants = list(dict.fromkeys(classes["variant"]))
    rows = []
    for label, values in classes.set_index("variant").groupby("class", sort=False):
        measured = values[["mean", "sd"]].reindex(variants).itertuples(index=False)
        row = [Cell(str(label))]
        for mean, sd in measured:
            row.append(Cell(columns.format_spread(mean, sd, 2)))
        rows.append(row)
    return named_table("classes", rows, variants)


def _template_values(
    study: StudyRecord, summary: pd.DataFrame, comparisons: Comparisons
) -> dict[str, object]:
    """Return the values of the placeholders in the notes of columns.yaml."""
    plan = study.plan
    metric = plan.metric
    has_failed = summary["failed"].any()
    rule = "verdict_by_star" if metric.margin is None else "verdict_by_margin"
    if not study.test.has_means:
        rule = "verdict_without_interval"
    words = study.test_words
    failures = {}
    for name, sentence in SENTENCES.items():
        if name.startswith("failed_"):
            failures[name] = fill(sentence, **words) if has_failed else ""
    comparison_count = plural(len(comparisons.pairs), "comparison")
    fewest = study.test.find_fewest(comparisons.level)
    return {
        **words,
        **failures,
        "label": metric.label,
        "event": metric.event,
        "metric": metric.name,
        "measure": _describe_measure(study),
        "direction": "Higher" if metric.goal == "max" else "Lower",
        "better": "higher" if metric.goal == "max" else "lower",
        "comparisons": comparison_count,
        "brief_step_time": SENTENCES["brief_alone" if study.step_times else "step_time"],
        "verdict_rule": fill(SENTENCES[rule], margin=metric.margin),
        "planned": len(plan.seeds),
        "seeds": columns.format_seeds(plan.seeds),
        "baseline": plan.baseline,
        "resolution": _describe_resolution(study, summary),
        "alpha": comparisons.level,
        "test_sentence": study.test.define(comparison_count, comparisons.pairs),
        "star": fill(SENTENCES["star"], seeds=fewest, **words),
        "units": f"{summary['units'].max():,}",
        "margin": metric.margin,
        "source": " ".join(plan.source.split()).rstrip(".") or "the study file",
        "step_time": "" if study.step_times else SENTENCES["step_time"],
    }


def _describe_measure(study: StudyRecord) -> str:
    """Return the metric and the epoch of its values, or the column of a table of results."""
    metric = study.plan.metric
    has_folders = any(cell.folder for cell in study.cells)
    if not has_folders:
        return f"the column '{metric.name}' of the table of results"
    ends = {"last": "last epoch", "best-validation": "best epoch of the validation split"}
    return f"{metric.name} at the {ends[metric.selection]}"


def _describe_resolution(study: StudyRecord, summary: pd.DataFrame) -> str:
    """Return the sentence about the step of the metric, or nothing for a continuous metric."""
    largest_sd = max(summary["sd"].dropna(), default=float("inf"))
    if study.is_two_valued:
        return ""
    # The step of a continuous metric is a rounding error, which needs no mention.
    if study.resolution <= 0.01 * largest_sd:
        return ""
    return fill(SENTENCES["resolution"], step=study.resolution)


def _describe_plan(study: StudyRecord, level: float) -> list[str]:
    """Return the set-up, the tuning, how step times were measured, seal and changes."""
    notes = describe_setup(study.plan)
    if study.tuning:
        notes.append(_describe_tuning(study.tuning))
    if study.step_times:
        notes.append(_describe_step_times(study.plan, study.step_times))
    if study.seals:
        notes += _describe_seals(study.seals, level)
    return notes


def _describe_tuning(tuning: Tuning) -> str:
    """Return the sentence of the caption about the values that were tuned."""
    values = tuning.model_dump()
    values["keys"] = " and ".join(tuning.keys)
    return fill(SENTENCES["tuned"], label=tuning.select.label, **values)


def _describe_step_times(plan: Plan, times: StepTimes) -> str:
    """Return the sentence of the caption about step times that were measured alone."""
    names = {variant.variant or variant.name for variant in plan.variants}
    timed = [entry for entry in times.variants if entry.variant in names]
    spreads = [(100 * entry.spread, entry.variant) for entry in timed]
    spread, name = max(spreads, default=(0.0, ""))
    untimed = sorted(names - {entry.variant for entry in timed})
    return fill(
        SENTENCES["alone"],
        missing=f" (not for {', '.join(untimed)})" if untimed else "",
        spread=spread,
        noise=SENTENCES["noise"] if times.is_noisy else "",
        name=name,
    )


def _describe_seals(seals: Seals, level: float) -> list[str]:
    """Return the sentences of the caption about the seal, added seeds and changes."""
    first = seals.entries[0]
    sentence = SENTENCES["sealed" if seals.is_before_results else "sealed_late"]
    notes = [fill(sentence, hash=first.hash, time=first.time[:16], results=first.results)]
    if seals.added_seeds:
        added = list(itertools.chain.from_iterable(seals.added_seeds))
        looks = fill(
            SENTENCES["looks"],
            seeds=columns.format_seeds(added),
            level=level,
            looks=1 + len(seals.added_seeds),
            # The sum of the levels of all looks.
            bound=1.5 * stats.ALPHA - level,
        )
        notes.append(looks)
    for key, names in seals.changes().items():
        if names:
            notes.append(fill(SENTENCES[key], names=", ".join(names)))
    return notes


def describe_setup(plan: Plan) -> list[str]:
    """Return the recorded agreement with released code, and what is equal in all variants."""
    notes = []
    agreement = plan.parity.rstrip(".")
    if agreement:
        notes.append(fill(SENTENCES["parity"], words=agreement))
    # The default criterion and the lack of one need no sentence.
    if plan.criteria in (["parameters"], ["none"]):
        return notes
    first = " without @" if len(plan.criteria) > 1 else ""
    for number, criterion in enumerate(plan.criteria):
        mark = f" with @{criterion}" if number else first
        # A newer version may have other criteria.
        words = SENTENCES.get(f"equal_{criterion}", criterion)
        notes.append(fill(SENTENCES["equal"], mark=mark, words=words))
    return notes


def describe_origin(plan: Plan) -> str:
    """Return the name, title and set-up of a study, for captions."""
    return " ".join([f"{plan.study}: {plan.title.rstrip('.')}.", *describe_setup(plan)])
