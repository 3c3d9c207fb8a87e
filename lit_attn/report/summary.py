"""One study's numbers: a frame with a row per cell and a frame with a row per variant.

Values are in printed units (an accuracy in percent), times in seconds, memory in bytes.
"""

import statistics
from typing import Any

import pandas as pd

from lit_attn.records import PlannedVariant
from lit_attn.report import stats
from lit_attn.report.read import CellRecord, StudyRecord

ALPHA = 0.05


def per_seed(study: StudyRecord) -> pd.DataFrame:
    """Every planned cell with its status and, where it is done, everything that was measured."""
    rows = []
    for cell in study.cells:
        row: dict[str, Any] = {
            "variant": cell.planned.variant,
            "seed": cell.planned.seed,
            "status": cell.status,
            "value": _value(study, cell),
        }
        if cell.result is not None:
            result = cell.result
            row |= {
                "selected_epoch": result.selected_epoch,
                "steps": result.steps,
                "parameters": result.parameters,
                "flops": result.flops,
                "ffn_width": result.ffn_width,
                "step_time": result.step_time.median,
                "peak_memory": result.peak_memory,
                "wall_time": result.wall_time,
                "attempts": result.attempts,
                "device": result.device,
                "code": result.code,
                "data": result.data,
                **{f"metric {name}": value for name, value in sorted(result.metrics.items())},
            }
        rows.append({**row, "identity": cell.planned.identity})
    integers = ["selected_epoch", "steps", "parameters", "flops", "ffn_width", "peak_memory"]
    frame = pd.DataFrame(rows)
    present = {name: "Int64" for name in [*integers, "attempts"] if name in frame}
    return frame.astype(present)


def per_variant(study: StudyRecord) -> pd.DataFrame:
    """One row per variant in the plan's order: value, difference to the baseline, cost."""
    baseline = _values(study, study.plan.baseline)
    rows = [_row(study, variant, baseline) for variant in study.plan.variants]
    compared = [row for row in rows if row["p"] is not None]
    for row, adjusted in zip(compared, stats.holm([r["p"] for r in compared]), strict=True):
        row["p_holm"] = adjusted
        row["significant"] = adjusted <= ALPHA
    means = [row["mean"] for row in rows if row["mean"] is not None]
    if means:
        best = max(means) if study.plan.metric.goal == "max" else min(means)
        for row in rows:
            row["best"] = row["mean"] == best
    frame = pd.DataFrame(rows)
    integers = ["n", "planned", "pairs", "seeds_needed", "parameters", "flops", "peak_memory"]
    numbers = ["mean", "sd", "difference", "low", "high", "p", "p_floor", "p_holm", "step_time"]
    numbers += ["published", "published_sd", "published_difference"]
    return frame.astype(dict.fromkeys(integers, "Int64")).astype(dict.fromkeys(numbers, "Float64"))


def _row(study: StudyRecord, variant: PlannedVariant, baseline: dict[int, float]) -> dict[str, Any]:
    cells = study.of(variant.name)
    values = _values(study, variant.name)
    own = list(values.values())
    differences = [values[seed] - baseline[seed] for seed in values if seed in baseline]
    if variant.name == study.plan.baseline:
        differences = []
    interval = stats.paired_interval(differences)
    mean = statistics.fmean(own) if own else None
    published = variant.published
    results = [cell.result for cell in cells if cell.result is not None]
    return {
        "variant": variant.name,
        "n": len(own),
        "planned": len(cells),
        "failures": _failures(cells),
        "mean": mean,
        "sd": statistics.stdev(own) if len(own) > 1 else None,
        "pairs": len(differences),
        "difference": statistics.fmean(differences) if differences else None,
        "low": interval.low if interval else None,
        "high": interval.high if interval else None,
        "p": stats.sign_flip_p(differences),
        "p_floor": stats.sign_flip_floor(len(differences)) if differences else None,
        "p_holm": None,
        "significant": False,
        "best": False,
        "seeds_needed": stats.seeds_needed(differences),
        "published": published[0] if published else None,
        "published_sd": published[1] if published else None,
        "published_difference": mean - published[0] if published and mean is not None else None,
        "parameters": results[0].parameters if results else None,
        "flops": results[0].flops if results else None,
        "step_time": statistics.median(r.step_time.median for r in results) if results else None,
        "peak_memory": int(statistics.median(r.peak_memory for r in results)) if results else None,
    }


def _values(study: StudyRecord, variant: str) -> dict[int, float]:
    values = {cell.planned.seed: _value(study, cell) for cell in study.of(variant)}
    return {seed: value for seed, value in values.items() if value is not None}


def _value(study: StudyRecord, cell: CellRecord) -> float | None:
    metric = study.plan.metric
    if cell.result is None or metric.name not in cell.result.metrics:
        return None
    return cell.result.metrics[metric.name] * metric.scale


def _failures(cells: list[CellRecord]) -> str:
    """ "1 diverged, 2 missing", or nothing."""
    bad = [cell.status for cell in cells if cell.status != "done"]
    return ", ".join(f"{bad.count(status)} {status}" for status in sorted(set(bad)))
