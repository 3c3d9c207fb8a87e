"""Frames of one study: a row for each cell, for each variant, or for each differing setting.

Values are in printed units (an accuracy in percent), times in seconds, memory in bytes.
"""

import itertools
import json
import statistics
from collections import Counter
from typing import Any

import pandas as pd
import yaml

from lit_attn.cells.records import PlannedVariant
from lit_attn.report.columns import NOTHING, Record, to_frame
from lit_attn.report.comparison import Comparisons
from lit_attn.report.fairness import measure_targets
from lit_attn.report.read import CellRecord, StudyRecord
from lit_attn.report.samples import measure_test_errors

TIMES = ("step_time", "evaluation_time")
INTEGERS = (
    *("selected_epoch", "steps", "epochs", "attempts"),
    *("parameters", "flops", "ffn_width", "peak_memory"),
)


def make_seed_frame(study: StudyRecord) -> pd.DataFrame:
    """Return every planned cell with its status, its value and all its measurements."""
    cells = study.cells
    columns: dict[str, Any] = {
        name: [getattr(cell, name) for cell in cells]
        for name in ("variant", "seed", "status", "value")
    }
    for name in dict.fromkeys(itertools.chain.from_iterable(c.measurements for c in cells)):
        values = [cell.measurements.get(name) for cell in cells]
        columns[name] = pd.array(values, dtype="Int64") if name in INTEGERS else values
    columns["identity"] = [cell.identity for cell in cells]
    return pd.DataFrame(columns)


def make_variant_frame(study: StudyRecord, comparisons: Comparisons) -> pd.DataFrame:
    """Return value, comparison with the baseline and costs of every variant, in the plan's order.

    Only a variant with a value for every planned seed can be the best one.
    """
    sources = (comparisons.records, measure_test_errors(study), measure_targets(study))
    records = []
    for variant in study.plan.variants:
        record = _variant_record(study, variant)
        for source in sources:
            record |= source.get(variant.name, {})
        records.append(record)
    means = [record["mean"] for record in records if 0 < record["planned"] == record["n"]]
    if means:
        best = max(means) if study.plan.metric.goal == "max" else min(means)
        for record in records:
            record["best"] = record["planned"] == record["n"] and record["mean"] == best
    return to_frame(records)


def _variant_record(study: StudyRecord, variant: PlannedVariant) -> Record:
    cells = study.variant_cells(variant.name)
    values = study.values(variant.name).values()
    mean = statistics.fmean(values) if values else None
    published, published_sd = variant.published or (None, None)
    medians = {
        name: statistics.median(measured)
        for name in ("parameters", "ffn_width", "flops", "peak_memory", *TIMES)
        if (measured := study.measurements(name, variant.name))
    }
    time = study.step_time(variant.name)
    counts = {name: int(value) for name, value in medians.items() if name not in TIMES}
    return {
        "variant": variant.name,
        "n": len(values),
        "planned": len(cells),
        "missing": _describe_missing(cells),
        "mean": mean,
        "sd": statistics.stdev(values) if len(values) > 1 else None,
        "best": False,
        "significant": False,
        "published": published,
        "published_sd": published_sd,
        "published_difference": None if mean is None or published is None else mean - published,
        **medians,
        **counts,
        **{f"{name}_ratio": _ratio(study.measurements(name, variant.name)) for name in TIMES},
        **({"step_time": time, "step_time_ratio": None} if time and study.step_times else {}),
        "mixed": _is_mixed(study, variant.name),
    }


def _ratio(times: list[float]) -> float | None:
    """Return the longest time over the shortest one: how far the machine's load changed it."""
    return max(times) / min(times) if times and min(times) > 0 else None


def _describe_missing(cells: list[CellRecord]) -> str:
    """Return the cells without a value, as in "1 diverged, 2 missing", or an empty string."""
    statuses = Counter(cell.status for cell in cells if cell.status != "done")
    return ", ".join(f"{count} {status}" for status, count in sorted(statuses.items()))


def _is_mixed(study: StudyRecord, variant: str) -> bool:
    """Return True if the results of the variant and the baseline differ in code or data."""
    cells = study.finished_cells(variant) + study.finished_cells(study.plan.baseline)
    return len({(c.measurements.get("code"), c.measurements.get("data")) for c in cells}) > 1


def make_settings_frame(study: StudyRecord) -> pd.DataFrame:
    """Return one row for each setting in which a variant's experiment differs from the baseline's.

    The settings are those of the `config.yaml` that the first cell of each variant recorded. A
    variant without a recorded configuration has no rows.
    """
    baseline = _read_settings(study, study.plan.baseline)
    rows = []
    for variant in study.plan.variants if baseline else ():
        settings = _read_settings(study, variant.name)
        for key in dict.fromkeys([*baseline, *settings]) if settings else ():
            pair = (baseline.get(key, NOTHING), settings.get(key, NOTHING))
            if pair[0] != pair[1]:
                rows.append((variant.name, key, *pair))
    return pd.DataFrame(rows, columns=["variant", "setting", "baseline", "value"])


def _read_settings(study: StudyRecord, variant: str) -> dict[str, str]:
    """Return the experiment of a variant's first cell with a readable configuration, by key."""
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    folders = (cell.folder for cell in study.variant_cells(variant) if cell.folder)
    for folder in folders:
        try:
            text = (folder / "config.yaml").read_text(encoding="utf-8")
            config = yaml.load(text, loader)
        except (OSError, ValueError, yaml.YAMLError):
            continue
        if isinstance(config, dict) and isinstance(config.get("experiment"), dict):
            settings = pd.json_normalize(config["experiment"]).to_dict("records")[0]
            return {
                str(key): value if isinstance(value, str) else json.dumps(value, default=str)
                for key, value in settings.items()
            }
    return {}
