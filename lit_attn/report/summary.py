"""One study's numbers: a frame with a row per cell and a frame with a row per variant.

Values are in printed units (an accuracy in percent), times in seconds, memory in bytes.
"""

import statistics
from typing import Any

import pandas as pd

from lit_attn.cells.records import PlannedVariant, Result
from lit_attn.report import stats
from lit_attn.report.read import CellRecord, StudyRecord

ALPHA = 0.05


def per_seed(study: StudyRecord) -> pd.DataFrame:
    """Every planned cell with its status and, where it is done, everything that was measured."""
    rows = [
        {
            "variant": cell.planned.variant,
            "seed": cell.planned.seed,
            "status": cell.status,
            "value": cell.value,
            **({} if cell.result is None else _measured(cell.result)),
            "identity": cell.planned.identity,
        }
        for cell in study.cells
    ]
    integers = ["selected_epoch", "steps", "epochs", "parameters", "flops", "ffn_width"]
    integers += ["peak_memory", "attempts"]
    frame = pd.DataFrame(rows)
    return frame.astype({name: "Int64" for name in integers if name in frame})


def per_variant(study: StudyRecord) -> pd.DataFrame:
    """One row per variant in the plan's order: value, difference to the baseline, cost."""
    rows = [_row(study, variant) for variant in study.plan.variants]
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
    numbers += ["evaluation_time", "published", "published_sd", "published_difference"]
    return frame.astype(dict.fromkeys(integers, "Int64")).astype(dict.fromkeys(numbers, "Float64"))


def _measured(result: Result) -> dict[str, Any]:
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
        "versions": "; ".join(f"{k} {v}" for k, v in sorted(result.versions.items())),
        **{f"metric {name}": value for name, value in sorted(result.metrics.items())},
    }


def _row(study: StudyRecord, variant: PlannedVariant) -> dict[str, Any]:
    cells, results = study.of(variant.name), study.results(variant.name)
    own = study.values(variant.name)
    baseline = {} if variant.name == study.plan.baseline else study.values(study.plan.baseline)
    differences = [value - baseline[seed] for seed, value in own.items() if seed in baseline]
    interval = stats.paired_interval(differences)
    mean = statistics.fmean(own.values()) if own else None
    published, published_sd = variant.published or (None, None)
    evaluations = [r.evaluation_time.median for r in results if r.evaluation_time is not None]
    return {
        "variant": variant.name,
        "n": len(own),
        "planned": len(cells),
        "failures": _failures(cells),
        "mean": mean,
        "sd": statistics.stdev(own.values()) if len(own) > 1 else None,
        "best": False,
        "pairs": len(differences),
        "difference": statistics.fmean(differences) if differences else None,
        "low": interval.low if interval else None,
        "high": interval.high if interval else None,
        "p": stats.sign_flip_p(differences),
        "p_floor": stats.sign_flip_floor(len(differences)) if differences else None,
        "p_holm": None,
        "significant": False,
        "seeds_needed": stats.seeds_needed(differences),
        "published": published,
        "published_sd": published_sd,
        "published_difference": _difference(mean, published),
        "parameters": _median_integer([r.parameters for r in results]),
        "flops": _median_integer([r.flops for r in results]),
        "step_time": statistics.median(r.step_time.median for r in results) if results else None,
        "evaluation_time": statistics.median(evaluations) if evaluations else None,
        "peak_memory": _median_integer([r.peak_memory for r in results]),
        "mixed": _mixed(study, variant.name),
    }


def _difference(one: float | None, other: float | None) -> float | None:
    return None if one is None or other is None else one - other


def _failures(cells: list[CellRecord]) -> str:
    """The cells without a value, as in "1 diverged, 2 missing", or nothing."""
    bad = [cell.status for cell in cells if cell.status != "done"]
    return ", ".join(f"{bad.count(status)} {status}" for status in sorted(set(bad)))


def _mixed(study: StudyRecord, variant: str) -> bool:
    """Whether the variant's records and the baseline's are of more than one code or data."""
    results = study.results(variant) + study.results(study.plan.baseline)
    return len({(result.code, result.data) for result in results}) > 1


def _median_integer(values: list[int]) -> int | None:
    return int(statistics.median(values)) if values else None
