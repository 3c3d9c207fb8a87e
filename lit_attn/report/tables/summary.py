"""Rows of one study: for each cell, for each variant, and for each differing setting.

Values are in printed units (an accuracy in percent), times in seconds, memory in bytes.
"""

import itertools
import json
import math
import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from lit_attn.cells.records import PlannedVariant
from lit_attn.report.numbers import round_number
from lit_attn.report.records.measurements import SIZES
from lit_attn.report.records.samples import measure_test_errors
from lit_attn.report.records.skipped import LOG
from lit_attn.report.records.study_record import StudyRecord
from lit_attn.report.tables.columns import COLUMNS, NOTHING, Record
from lit_attn.report.verdicts.comparison import Comparisons
from lit_attn.schema.errors import ConfigError
from lit_attn.schema.publish import hide_private
from lit_attn.schema.yaml_text import parse_plain

UNREADABLE = "config.yaml"
"""Setting of a variant whose settings are unknown, because its files are damaged."""
TIMES = ("step_time", "evaluation_time")
"""Measurements of which a variant has the median over its seeds."""


def list_cells(study: StudyRecord) -> Iterator[Sequence[Any]]:
    """Yield the heading, then every planned cell with status, value and all its measurements.

    If variants have labels, each name is followed by the label.
    """
    names = dict.fromkeys(itertools.chain.from_iterable(c.measurements for c in study.cells))
    heading = ["variant", "label"] if study.names else ["variant"]
    yield [*heading, "seed", "status", "value", *names, "identity"]
    for cell in study.cells:
        row: list[Any] = [cell.variant]
        if study.names:
            row = [study.names[cell.variant], cell.variant]
        row += [cell.seed, cell.status, cell.value]
        row += [cell.measurements.get(name) for name in names]
        row.append(cell.identity)
        yield row


def make_variant_frame(study: StudyRecord, comparisons: Comparisons) -> pd.DataFrame:
    """Return value, comparison with the baseline and costs of every variant, in the plan's order.

    Only a variant with a value for every planned seed can be the best one.
    """
    sources = [comparisons.records, measure_test_errors(study), _measure_targets(study)]
    if study.plan.best_test_epoch:
        sources.append(_measure_best_epochs(study))
    has_stopped = bool(study.measurements("stopped_early"))
    has_steps = has_stopped or "steps_run" in (study.plan.columns or ())
    records = []
    for variant in study.plan.variants:
        record = _variant_record(study, variant, has_steps, has_stopped)
        for source in sources:
            record |= source.get(variant.name, {})
        records.append(record)
    _mark_best(records, study.plan.metric.goal)
    types: dict[str, str] = {}
    for column in COLUMNS:
        types |= column.fields
    return pd.DataFrame(records, columns=list(types)).astype(types)


def _mark_best(records: list[Record], goal: str) -> None:
    """Set `best` of the variants with the best mean, or median, among the complete ones."""
    complete = [record for record in records if 0 < record["planned"] == record["n"]]
    if not complete:
        return
    field = "mean" if any(record["mean"] is not None for record in complete) else "median"
    valued = [record for record in complete if record[field] is not None]
    if not valued:
        return
    choose = max if goal == "max" else min
    best = choose(record[field] for record in valued)
    for record in valued:
        record["best"] = record[field] == best


def _measure_targets(study: StudyRecord) -> dict[str, Record]:
    """Return the steps and seconds after which mean curves reach the baseline's final value."""
    final_values = list(study.values(study.plan.baseline).values())
    records: dict[str, Record] = {}
    # Before the event the curve of a time has its limit, so a mean curve says nothing.
    if not final_values or study.plan.metric.event:
        return records
    sign = 1 if study.plan.metric.goal == "max" else -1
    # The curve of the baseline ends at the target, up to the last digits.
    target = round_number(sign * statistics.fmean(final_values))
    for name, rows in study.curves.groupby("variant"):
        means = sign * rows.groupby("step")["value"].mean()
        reached = means.index[means.map(round_number) >= target]
        # A shorter curve says too little about the step.
        if len(reached) == 0 or len(means) <= 2:
            continue
        steps = int(reached.min())
        time = study.step_time(str(name))
        seconds = None if time is None else steps * time
        records[str(name)] = {"target_steps": steps, "target_seconds": seconds}
    return records


def _measure_best_epochs(study: StudyRecord) -> dict[str, Record]:
    """Return mean and standard deviation of the best finite value of each seed's curve."""
    metric = study.plan.metric
    best = max if metric.goal == "max" else min
    records: dict[str, Record] = {}
    for variant in study.plan.variants:
        cells = study.finished_cells(variant.name)
        values = []
        for cell in cells:
            curve = [row.value for row in cell.curve(metric) if math.isfinite(row.value)]
            if curve:
                values.append(best(curve))
        # A damaged metrics.csv has no rows, and a mean of fewer seeds is another one.
        if values and len(values) == len(cells):
            records[variant.name] = {
                "best_test_epoch": statistics.fmean(values),
                "best_test_epoch_sd": statistics.stdev(values) if len(values) > 1 else None,
            }
    return records


def _variant_record(
    study: StudyRecord, variant: PlannedVariant, has_steps: bool, has_stopped: bool
) -> Record:
    """Return the numbers of a variant that need no comparison, by CSV field.

    Those of its steps are among them if the study `has_steps`, and how many seeds stopped early if
    it `has_stopped` ones.
    """
    name = variant.name
    cells = study.variant_cells(name)
    statuses = Counter(cell.status for cell in cells if cell.status != "done")
    values = study.values(name).values()
    center = study.center(name)
    has_means = study.test.has_means
    mean = center if has_means else None
    record: Record = {
        "variant": name,
        "n": sum(cell.status == "done" for cell in cells),
        "planned": len(cells),
        "missing": ", ".join(f"{count} {status}" for status, count in sorted(statuses.items())),
        "mean": mean,
        "sd": statistics.stdev(values) if has_means and len(values) > 1 else None,
        "median": None if has_means else center,
        "reached": study.count_events(name),
        "best": False,
        "significant": False,
        "mixed": study.is_mixed(name, study.plan.baseline),
    }
    if variant.published is not None:
        published, published_sd = variant.published
        record["published"] = published
        record["published_sd"] = published_sd
        record["published_difference"] = None if mean is None else mean - published
    if has_steps:
        steps = study.measurements("steps", name)
        record["steps_run"] = statistics.fmean(steps) if steps else None
    if has_stopped:
        record["stopped"] = len(study.measurements("stopped_early", name))
    for field in SIZES:
        sizes = study.measurements(field, name)
        if sizes:
            record[field] = int(statistics.median(sizes))
    return record | _variant_times(study, name)


def _variant_times(study: StudyRecord, variant: str) -> Record:
    """Return the times of a variant, how far they can be trusted, and the share of waiting."""
    record: Record = {
        "step_time_fault": study.step_time_faults[variant],
        "evaluation_time_fault": study.time_faults[variant],
    }
    for field in TIMES:
        times = study.measurements(field, variant)
        if times:
            record[field] = statistics.median(times)
            # The ratio shows how much the machine's load changed a time.
            if min(times) > 0:
                record[f"{field}_ratio"] = max(times) / min(times)
    step_time = study.step_time(variant)
    if step_time and study.step_times:
        # Times that were measured alone do not depend on the load.
        record["step_time"] = step_time
        record["step_time_ratio"] = None
    waiting = study.measurements("waiting", variant)
    if waiting:
        record["waiting"] = statistics.median(waiting)
    return record


def make_settings_frame(study: StudyRecord) -> pd.DataFrame:
    """Return one row for each setting in which a variant's experiment differs from the baseline's.

    The settings are those of the first readable `config.yaml` of each variant. A variant that has
    none has no rows, and one whose files are all damaged has the row UNREADABLE.
    """
    rows = []
    experiments: dict[str, dict[str, str]] = {}
    for variant in study.plan.variants:
        settings = _read_experiment(study, variant.name)
        if settings is None:
            rows.append((variant.name, UNREADABLE, NOTHING, "cannot be read"))
        elif settings:
            experiments[variant.name] = settings
    baseline = experiments.pop(study.plan.baseline, {})
    for name, settings in experiments.items():
        if not baseline:
            continue
        for key in dict.fromkeys([*baseline, *settings]):
            value = settings.get(key, NOTHING)
            reference = baseline.get(key, NOTHING)
            if value != reference:
                rows.append((name, key, reference, value))
    places = {variant.name: place for place, variant in enumerate(study.plan.variants)}
    rows.sort(key=lambda row: places[row[0]])
    return pd.DataFrame(rows, columns=["variant", "setting", "baseline", "value"])


def list_unknown_settings(settings: pd.DataFrame) -> list[str]:
    """Return the variants of a frame of settings whose files are all damaged."""
    variants = settings.loc[settings["setting"] == UNREADABLE, "variant"]
    return [str(variant) for variant in variants]


def _read_experiment(study: StudyRecord, variant: str) -> dict[str, str] | None:
    """Return the settings of a variant as texts by dotted key, from its first readable file.

    Returns nothing without a file, and None if every file is damaged; a warning names each of them.
    """
    has_damaged = False
    for path in study.config_paths(variant):
        try:
            return _read_settings(path)
        except (ConfigError, OSError) as error:
            LOG.warning("%s: unreadable and skipped: %s", path, error)
            has_damaged = True
    return None if has_damaged else {}


def _read_settings(path: Path) -> dict[str, str]:
    """Return the settings in a config.yaml as texts by dotted key. Raises ConfigError."""
    try:
        config = parse_plain(path.read_text("utf-8"), path.name)
        # The tables of a report are published.
        settings = pd.json_normalize(hide_private(config["experiment"])).to_dict("records")[0]
    except ConfigError:
        raise
    except (ValueError, LookupError, TypeError, AttributeError, NotImplementedError) as error:
        raise ConfigError(f"it is not the configuration of a cell: {error}") from error
    texts = {}
    for key, value in settings.items():
        is_text = isinstance(value, str)
        texts[str(key)] = value if is_text else json.dumps(value, default=str)
    return texts
