"""Studies from a table of results that another program wrote: one row for each variant and seed."""

import itertools
import math
import re
from pathlib import Path

import pandas as pd

from lit_attn.cells.records import Metric, Plan, PlannedVariant
from lit_attn.report.read import CellRecord, StudyRecord
from lit_attn.schema.errors import ConfigError, require

COSTS = ("parameters", "ffn_width", "flops", "step_time", "evaluation_time", "peak_memory")
"""Columns that become costs: counts, FLOPs of one sample, seconds, bytes."""

WORDS = r"\b([cmtw]er|bp[bcd]|brier|ece|fid|fvd|latency|mape|memory|ppl|seconds|time)\b"
LOWER_IS_BETTER = re.compile(f"loss|error|perplexity|entropy|bits|nll|mae|mse|{WORDS}")
"""Parts and whole words in the name of a metric that is minimised."""


def read_table(
    path: Path, baseline: str | None = None, metrics: list[str] | None = None
) -> list[StudyRecord]:
    """Read a CSV file with the columns `variant` and `seed` as one study for each metric column.

    Metrics are all numeric columns but `seed` and COSTS, or those in `metrics`, where `loss:min`
    names a goal. The baseline is the first variant if none is given. A row without a finite value
    is a failed seed, a seed without a row is still to run. Raises ConfigError for other files.
    """
    try:
        frame = pd.read_csv(path, dtype={"variant": str}, skipinitialspace=True)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read as CSV: {error}") from error
    for name in ("variant", "seed"):
        require(f"{path}: has no column", name, map(str, frame))
    # The name "None" or "null" of a variant is no missing value.
    names = pd.read_csv(path, usecols=["variant"], dtype=str, keep_default_na=False)
    frame["variant"] = names["variant"]
    if frame["variant"].eq("").any() or frame["seed"].dtype.kind != "i":
        raise ConfigError(f"{path}: every row needs a variant and a seed, which is an integer")
    if frame.duplicated(["variant", "seed"]).any():
        row = frame[frame.duplicated(["variant", "seed"])].iloc[0]
        raise ConfigError(f"{path}: variant '{row['variant']}' has seed {row['seed']} twice")
    variants = frame["variant"].unique().tolist()
    require(f"{path}: has no variant", baseline or variants[0], variants)
    # pandas writes an index without a heading.
    frame = frame.drop(columns=frame.columns[frame.columns.str.startswith("Unnamed: ")])
    named = [text.removesuffix(":min").removesuffix(":max") for text in metrics or map(str, frame)]
    texts = frame.select_dtypes(exclude="number").drop(columns="variant")
    for name in texts.columns.intersection([*named, *COSTS]):
        numbers = pd.to_numeric(frame[name], errors="coerce")
        wrong = frame[name][numbers.isna() & frame[name].notna()]
        if len(wrong) and numbers.notna().any():
            text = f"row {wrong.index[0] + 1}, column '{name}': '{wrong.iloc[0]}' is not a number"
            raise ConfigError(f"{path}: {text}; correct it, or choose other columns with --metric")
    for name in frame.columns.intersection([cost for cost in COSTS if "time" not in cost]):
        # Counts with gaps were read as floats.
        counts = pd.to_numeric(frame[name], errors="coerce")
        wrong = counts[counts.notna() & (counts % 1 != 0)]
        if len(wrong):
            place = f"{path}: row {wrong.index[0] + 1}, column '{name}'"
            raise ConfigError(f"{place}: {wrong.iloc[0]:g} is not a whole number")
        frame[name] = counts.astype("Int64")
    numeric = [str(name) for name in frame.select_dtypes("number") if name not in ("seed", *COSTS)]
    chosen = [_parse_metric(text, numeric, path) for text in metrics or numeric]
    if not chosen:
        raise ConfigError(f"{path}: has no numeric column that could be a metric")
    ends = [f"-{metric.name}" if len(chosen) > 1 else "" for metric in chosen]
    pairs = zip(ends, chosen, strict=True)
    return [_make_study(frame, path.stem + end, metric, baseline) for end, metric in pairs]


def _parse_metric(text: str, columns: list[str], path: Path) -> Metric:
    name, _, goal = text.rpartition(":") if text.endswith((":min", ":max")) else (text, "", "")
    require(f"{path}: has no numeric column", name, columns)
    goal = goal or ("min" if LOWER_IS_BETTER.search(name.lower().replace("_", " ")) else "max")
    return Metric.model_validate({"name": name, "label": name, "scale": 1, "goal": goal})


def _make_study(
    frame: pd.DataFrame, name: str, metric: Metric, baseline: str | None
) -> StudyRecord:
    variants = frame["variant"].unique().tolist()
    rows = {(row["variant"], row["seed"]): row for row in frame.to_dict("records")}
    seeds = sorted(frame["seed"].unique().tolist())
    cells = []
    for cell in itertools.product(variants, seeds):
        row = rows.get(cell)
        if row is None or not math.isfinite(row[metric.name]):
            cells.append(CellRecord(*cell, "missing" if row is None else "error"))
        else:
            measured = {x: row[x] for x in COSTS if x in row and not pd.isna(row[x])}
            cells.append(CellRecord(*cell, "done", float(row[metric.name]), measured))
    planned = [PlannedVariant(name=variant) for variant in variants]
    # The report has a folder of this name: `...csv` and a metric `a/b` must not lead elsewhere.
    folder = name.replace("/", "-").lstrip(".") or "table"
    names = {"study": folder, "title": name, "baseline": baseline or variants[0]}
    return StudyRecord(Plan(**names, metric=metric, variants=planned, seeds=seeds, cells=[]), cells)
