"""Statistics of the report for a frame of any program: one row for each run."""

from typing import Literal

import pandas as pd

from lit_attn.judging.prepare import Choices, prepare
from lit_attn.judging.runs import make_table
from lit_attn.report.tables.summary import make_variant_frame
from lit_attn.report.verdicts.comparison import compare_variants
from lit_attn.report.verdicts.judge import judge_study

FRAME_COLUMNS = {
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
    pairs: str,
    baseline: str | None = None,
    goal: Literal["max", "min"] | None = None,
    margin: float | None = None,
) -> pd.DataFrame:
    """Return the comparison of every variant with the baseline, one row for each variant.

    The numbers are those of `lit-attn judge` and `report --csv` (docs/statistics.md): means,
    differences with 95 % intervals, corrected p, verdict ("baseline" for the baseline), and the
    range of seeds that are needed. Raises ConfigError for another frame.
    """
    text = f"{metric}:{goal}" if goal else metric
    choices = Choices(metric=text, pairs=pairs, baseline=baseline or "", margin=margin)
    study = prepare(make_table(frame), choices).study
    comparisons = compare_variants(study)
    summary = make_variant_frame(study, comparisons)
    result = summary[list(FRAME_COLUMNS)].rename(columns=FRAME_COLUMNS)
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
