"""Numbers of one study: a frame with a row for each cell, and one with a row for each variant.

Values are in printed units (an accuracy in percent), times in seconds, memory in bytes.
"""

import statistics
from collections import Counter
from typing import Any

import pandas as pd

from lit_attn.cells.records import PlannedVariant, Result
from lit_attn.report.columns import Record, to_frame
from lit_attn.report.comparison import Comparisons
from lit_attn.report.read import CellRecord, StudyRecord


def make_seed_frame(study: StudyRecord) -> pd.DataFrame:
    """Return every planned cell with its status and all measurements of its result."""
    rows = [
        {
            "variant": cell.planned.variant,
            "seed": cell.planned.seed,
            "status": cell.status,
            "value": cell.value,
            **({} if cell.result is None else _measurements(cell.result)),
            "identity": cell.planned.identity,
        }
        for cell in study.cells
    ]
    integers = ["selected_epoch", "steps", "epochs", "parameters", "flops", "ffn_width"]
    integers += ["peak_memory", "attempts"]
    frame = pd.DataFrame(rows)
    return frame.astype({name: "Int64" for name in integers if name in frame})


def _measurements(result: Result) -> dict[str, Any]:
    return {
        "selected_epoch": result.selected_epoch,
        "steps": result.steps,
        "epochs": result.epochs,
        "parameters": result.parameters,
        "flops": result.flops,
        "ffn_width": result.ffn_width,
        "step_time": result.step_time.median,
        "step_time_iqr": result.step_time.iqr,
        "evaluation_time": result.evaluation_time and result.evaluation_time.median,
        "peak_memory": result.peak_memory,
        "wall_time": result.wall_time,
        "attempts": result.attempts,
        "device": result.device,
        "code": result.code,
        "data": result.data,
        "finished": result.finished,
        "versions": "; ".join(f"{k} {v}" for k, v in sorted(result.versions.items())),
        **{f"metric {name}": value for name, value in sorted(result.metrics.items())},
    }


def make_variant_frame(study: StudyRecord, comparisons: Comparisons) -> pd.DataFrame:
    """Return value, comparison with the baseline and costs of every variant, in the plan's order.

    Only a variant with a value for every planned seed can be the best one.
    """
    records = [
        _variant_record(study, variant) | comparisons.records.get(variant.name, {})
        for variant in study.plan.variants
    ]
    means = [record["mean"] for record in records if 0 < record["planned"] == record["n"]]
    if means:
        best = max(means) if study.plan.metric.goal == "max" else min(means)
        for record in records:
            record["best"] = record["planned"] == record["n"] and record["mean"] == best
    return to_frame(records)


def _variant_record(study: StudyRecord, variant: PlannedVariant) -> Record:
    cells, results = study.variant_cells(variant.name), study.results(variant.name)
    values = study.values(variant.name).values()
    mean = statistics.fmean(values) if values else None
    published, published_sd = variant.published or (None, None)
    steps = [r.step_time.median for r in results]
    evaluations = [r.evaluation_time.median for r in results if r.evaluation_time is not None]
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
        "parameters": _median_integer([r.parameters for r in results]),
        "ffn_width": _median_integer([r.ffn_width for r in results if r.ffn_width is not None]),
        "flops": _median_integer([r.flops for r in results]),
        "step_time": statistics.median(steps) if steps else None,
        "step_time_ratio": _ratio(steps),
        "evaluation_time": statistics.median(evaluations) if evaluations else None,
        "evaluation_time_ratio": _ratio(evaluations),
        "peak_memory": _median_integer([r.peak_memory for r in results]),
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
    results = study.results(variant) + study.results(study.plan.baseline)
    return len({(result.code, result.data) for result in results}) > 1


def _median_integer(values: list[int]) -> int | None:
    return int(statistics.median(values)) if values else None
