"""Statistics of the report for a frame of any program: one row for each variant and seed."""

from pathlib import Path
from typing import Literal

import pandas as pd

from lit_attn.cells.records import Metric
from lit_attn.report.comparison import compare_variants
from lit_attn.report.judge import judge_study
from lit_attn.report.summary import make_variant_frame
from lit_attn.report.table_input import make_study, parse_metric, prepare_frame
from lit_attn.schema.errors import ConfigError, require

NAME = Path("frame")
"""Place that messages about a frame name."""

COLUMNS = {
    "variant": "variant",
    "n": "n",
    "mean": "mean",
    "sd": "sd",
    "pairs": "pairs",
    "difference": "difference",
    "low": "low",
    "high": "high",
    "p": "p",
    "p_adjusted": "p_corrected",
    "significant": "is_significant",
    "failed": "failed",
}
"""Columns of the result by field of table.csv."""


def compare_frame(
    frame: pd.DataFrame,
    metric: str = "",
    *,
    baseline: str | None = None,
    goal: Literal["max", "min"] | None = None,
    margin: float | None = None,
) -> pd.DataFrame:
    """Return the comparison of every variant with the baseline, one row for each variant.

    `frame` has the columns `variant`, `seed` and `metric` (default: its only numeric column). A
    value that is not finite is a failed seed. The baseline is the first variant if none is named,
    the goal follows from the name of the metric, and `margin` is the largest difference that does
    not matter. The numbers are those of `lit_attn report --csv` (docs/statistics.md): means, paired
    differences with 95 % intervals, corrected p, verdict ("baseline" for the baseline), and the
    range of seeds that are needed.
    Raises ConfigError for another frame.
    """
    prepared, numeric = prepare_frame(frame.reset_index(drop=True), NAME, [metric])
    if not metric and len(numeric) != 1:
        raise ConfigError(
            f"compare: name the metric: {', '.join(numeric) or 'the frame has no numeric column'}"
        )
    name = metric or numeric[0]
    text = f"{name}:{goal}" if goal else name
    chosen = parse_metric(text, numeric, NAME)
    if margin is not None:
        if not margin > 0:
            raise ConfigError(f"compare: margin: needs a number above 0, not {margin}")
        chosen = Metric.model_validate({**chosen.model_dump(), "margin": margin})
    variants = [str(variant) for variant in prepared["variant"].unique()]
    if baseline is not None:
        require("compare: no variant", baseline, variants)
    study = make_study(prepared, "frame", chosen, baseline)
    comparisons = compare_variants(study)
    summary = make_variant_frame(study, comparisons)
    result = summary[list(COLUMNS)].rename(columns=COLUMNS)
    judged = judge_study(study, comparisons=comparisons)
    by_variant = {entry.variant: entry for entry in judged.variants}
    verdicts = []
    needed = []
    for name in result["variant"]:
        entry = by_variant.get(name)
        verdicts.append("baseline" if entry is None else entry.verdict)
        needed.append(None if entry is None else entry.seeds_needed)
    result.insert(1, "verdict", verdicts)
    lows = [None if seeds is None else seeds.low for seeds in needed]
    highs = [None if seeds is None else seeds.high for seeds in needed]
    return result.assign(
        seeds_low=pd.array(lows, "Int64"),
        seeds_high=pd.array(highs, "Int64"),
    )
