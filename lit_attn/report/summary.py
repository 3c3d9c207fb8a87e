"""Rows of one study: for each cell, for each variant, and for each differing setting.

Values are in printed units (an accuracy in percent), times in seconds, memory in bytes.
"""

import itertools
import json
import math
import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import pandas as pd

from lit_attn.cells.records import PlannedVariant
from lit_attn.report.columns import COLUMNS, NOTHING, Record
from lit_attn.report.comparison import Comparisons
from lit_attn.report.numbers import round_number
from lit_attn.report.read import StudyRecord
from lit_attn.report.samples import measure_test_errors
from lit_attn.schema.limits import parse_yaml
from lit_attn.schema.publish import hide_private

TIMES = ("step_time", "evaluation_time")


def list_cells(study: StudyRecord) -> Iterator[Sequence[Any]]:
    """Yield the heading, then every planned cell with status, value and all its measurements.

    If variants have labels, each name is followed by the label.
    """
    names = dict.fromkeys(itertools.chain.from_iterable(c.measurements for c in study.cells))
    label = ["label"] if study.names else []
    yield "variant", *label, "seed", "status", "value", *names, "identity"
    for cell in study.cells:
        variant = [cell.variant]
        if study.names:
            variant = [study.names[cell.variant], cell.variant]
        measured = (cell.measurements.get(name) for name in names)
        yield *variant, cell.seed, cell.status, cell.value, *measured, cell.identity


def make_variant_frame(study: StudyRecord, comparisons: Comparisons) -> pd.DataFrame:
    """Return value, comparison with the baseline and costs of every variant, in the plan's order.

    Only a variant with a value for every planned seed can be the best one.
    """
    best_epochs = _measure_best_epochs(study) if study.plan.best_test_epoch else {}
    measured = (measure_test_errors(study), _measure_targets(study), best_epochs)
    sources = (comparisons.records, *measured)
    records, has_stopped = [], bool(study.measurements("stopped_early"))
    for variant in study.plan.variants:
        record = _variant_record(study, variant, has_stopped)
        for source in sources:
            record |= source.get(variant.name, {})
        records.append(record)
    means = [record["mean"] for record in records if 0 < record["planned"] == record["n"]]
    if means:
        best = max(means) if study.plan.metric.goal == "max" else min(means)
        for record in records:
            record["best"] = record["planned"] == record["n"] and record["mean"] == best
    types = {name: kind for column in COLUMNS for name, kind in column.fields.items()}
    return pd.DataFrame(records, columns=list(types)).astype(types)


def _measure_targets(study: StudyRecord) -> dict[str, Record]:
    """Return the steps and seconds after which mean curves reach the baseline's final value."""
    final_values = list(study.values(study.plan.baseline).values())
    records: dict[str, Record] = {}
    if not final_values:
        return records
    sign = 1 if study.plan.metric.goal == "max" else -1
    # The curve of the baseline ends at the target, up to the last digits.
    target = round_number(sign * statistics.fmean(final_values))
    for name, rows in study.curves.groupby("variant"):
        means = sign * rows.groupby("step")["value"].mean()
        reached = means.index[means.map(round_number) >= target]
        if len(reached) and len(means) > 2:
            steps = int(reached.min())
            time = study.step_time(str(name))
            seconds = None if time is None else steps * time
            records[str(name)] = {"target_steps": steps, "target_seconds": seconds}
    return records


def _measure_best_epochs(study: StudyRecord) -> dict[str, Record]:
    metric = study.plan.metric
    best = max if metric.goal == "max" else min
    records: dict[str, Record] = {}
    for variant in study.plan.variants:
        cells = study.finished_cells(variant.name)
        curves = [[r.value for r in c.curve(metric) if math.isfinite(r.value)] for c in cells]
        # A damaged metrics.csv has no rows, and a mean of fewer seeds is another one.
        if cells and all(curves):
            values = [best(curve) for curve in curves]
            spread = statistics.stdev(values) if len(values) > 1 else None
            record = {"best_test_epoch": statistics.fmean(values), "best_test_epoch_sd": spread}
            records[variant.name] = record
    return records


def _variant_record(study: StudyRecord, variant: PlannedVariant, has_stopped: bool) -> Record:
    cells = study.variant_cells(variant.name)
    statuses = Counter(cell.status for cell in cells if cell.status != "done")
    values = study.values(variant.name).values()
    mean = statistics.fmean(values) if values else None
    published, published_sd = variant.published or (None, None)
    medians = {
        name: statistics.median(measured) if name in TIMES else int(statistics.median(measured))
        for name in ("parameters", "ffn_width", "flops", "peak_memory", *TIMES)
        if (measured := study.measurements(name, variant.name))
    }
    # How far the machine's load changed a time.
    ratios = {
        f"{name}_ratio": max(times) / min(times)
        for name in TIMES
        if min(times := study.measurements(name, variant.name), default=0) > 0
    }
    waiting = study.measurements("waiting", variant.name)
    steps = study.measurements("steps", variant.name)
    time = study.step_time(variant.name)
    return {
        "variant": variant.name,
        "n": len(values),
        "planned": len(cells),
        "missing": ", ".join(f"{count} {name}" for name, count in sorted(statuses.items())),
        "mean": mean,
        "sd": statistics.stdev(values) if len(values) > 1 else None,
        "steps_run": statistics.fmean(steps) if steps and has_stopped else None,
        "stopped": len(study.measurements("stopped_early", variant.name)) if has_stopped else None,
        "best": False,
        "significant": False,
        "published": published,
        "published_sd": published_sd,
        "published_difference": None if mean is None or published is None else mean - published,
        **medians,
        **ratios,
        **({"step_time": time, "step_time_ratio": None} if time and study.step_times else {}),
        "waiting": statistics.median(waiting) if waiting else None,
        "step_time_fault": study.step_time_faults[variant.name],
        "evaluation_time_fault": study.time_faults[variant.name],
        "mixed": study.is_mixed(variant.name, study.plan.baseline),
    }


def make_settings_frame(study: StudyRecord) -> pd.DataFrame:
    """Return one row for each setting in which a variant's experiment differs from the baseline's.

    The settings are those of the first recorded `config.yaml` of each variant. A variant without a
    readable one has no rows.
    """
    experiments = {v.name: _read_experiment(study, v.name) for v in study.plan.variants}
    baseline = experiments[study.plan.baseline]
    rows = [
        (name, key, baseline.get(key, NOTHING), settings.get(key, NOTHING))
        for name, settings in experiments.items()
        for key in dict.fromkeys([*baseline, *settings] if baseline and settings else ())
        if baseline.get(key, NOTHING) != settings.get(key, NOTHING)
    ]
    return pd.DataFrame(rows, columns=["variant", "setting", "baseline", "value"])


def _read_experiment(study: StudyRecord, variant: str) -> dict[str, str]:
    path = study.config_path(variant)
    if path is None:
        return {}
    try:
        config = parse_yaml(path.read_text("utf-8"), str(path))
        # The tables of a report are published.
        settings = pd.json_normalize(hide_private(config["experiment"])).to_dict("records")[0]
    except (OSError, ValueError, LookupError, TypeError):
        return {}
    others = {k: json.dumps(v, default=str) for k, v in settings.items() if not isinstance(v, str)}
    return {str(key): str(value) for key, value in (settings | others).items()}
