"""Studies from a table of results that another program wrote: one row for each variant and seed."""

import itertools
import math
import re
from pathlib import Path

import pandas as pd

from lit_attn.cells.records import Metric, Plan, PlannedVariant
from lit_attn.report.study_record import CellRecord, StudyRecord
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
    if "variant" in frame:
        # The name "None" or "null" of a variant is no missing value.
        names = pd.read_csv(path, usecols=["variant"], dtype=str, keep_default_na=False)
        frame["variant"] = names["variant"]
    frame, numeric = prepare_frame(frame, path, metrics or [])
    variants = frame["variant"].unique().tolist()
    require(f"{path}: has no variant", baseline or variants[0], variants)
    chosen = [parse_metric(text, numeric, path) for text in metrics or numeric]
    if not chosen:
        raise ConfigError(f"{path}: has no numeric column that could be a metric")
    studies = []
    for metric in chosen:
        name = f"{path.stem}-{metric.name}" if len(chosen) > 1 else path.stem
        studies.append(make_study(frame, name, metric, baseline))
    return studies


def prepare_frame(
    frame: pd.DataFrame, path: Path, metrics: list[str]
) -> tuple[pd.DataFrame, list[str]]:
    """Return a checked frame and the names of its numeric columns that can be metrics.

    `metrics` are the metrics that were named. Raises ConfigError, which names `path`, for a frame
    without variants and seeds, with a row twice, and with a text among numbers.
    """
    for name in ("variant", "seed"):
        require(f"{path}: has no column", name, map(str, frame))
    frame = frame.assign(variant=frame["variant"].astype(str))
    _check_rows(frame, path)
    # pandas writes an index without a heading.
    frame = frame.drop(columns=frame.columns[frame.columns.str.startswith("Unnamed: ")])
    texts = metrics or [str(name) for name in frame]
    named = [text.removesuffix(":min").removesuffix(":max") for text in texts]
    _check_numbers(frame, [*named, *COSTS], path)
    frame = _read_counts(frame, path)
    excluded = ("seed", *COSTS)
    return frame, [str(name) for name in frame.select_dtypes("number") if name not in excluded]


def _check_rows(frame: pd.DataFrame, path: Path) -> None:
    """Raise ConfigError unless every row has a variant and a seed that no other row has."""
    if frame["variant"].eq("").any() or frame["seed"].dtype.kind != "i":
        raise ConfigError(f"{path}: every row needs a variant and a seed, which is an integer")
    repeated = frame[frame.duplicated(["variant", "seed"])]
    if len(repeated):
        row = repeated.iloc[0]
        raise ConfigError(f"{path}: variant '{row['variant']}' has seed {row['seed']} twice")


def _check_numbers(frame: pd.DataFrame, names: list[str], path: Path) -> None:
    """Raise ConfigError for a column in `names` that has numbers and a text."""
    texts = frame.select_dtypes(exclude="number").drop(columns="variant")
    for name in texts.columns.intersection(names):
        numbers = pd.to_numeric(frame[name], errors="coerce")
        wrong = frame[name][numbers.isna() & frame[name].notna()]
        if len(wrong) and numbers.notna().any():
            raise ConfigError(
                f"{path}: row {wrong.index[0] + 1}, column '{name}': "
                f"'{wrong.iloc[0]}' is not a number; "
                "correct it, or choose other columns with --metric"
            )


def _read_counts(frame: pd.DataFrame, path: Path) -> pd.DataFrame:
    """Return the frame with integers in the costs that are counts. Raises ConfigError for others.

    pandas reads a column with gaps as floats.
    """
    counts = [cost for cost in COSTS if "time" not in cost]
    for name in frame.columns.intersection(counts):
        numbers = pd.to_numeric(frame[name], errors="coerce")
        wrong = numbers[numbers.notna() & (numbers % 1 != 0)]
        if len(wrong):
            raise ConfigError(
                f"{path}: row {wrong.index[0] + 1}, column '{name}': "
                f"{wrong.iloc[0]:g} is not a whole number"
            )
        frame[name] = numbers.astype("Int64")
    return frame


def parse_metric(text: str, columns: list[str], path: Path) -> Metric:
    """Return the metric of a column, whose name may end in its goal."""
    name = text
    goal = ""
    if text.endswith((":min", ":max")):
        name, _, goal = text.rpartition(":")
    require(f"{path}: has no numeric column", name, columns)
    if not goal:
        words = name.lower().replace("_", " ")
        goal = "min" if LOWER_IS_BETTER.search(words) else "max"
    return Metric.model_validate({"name": name, "label": name, "scale": 1, "goal": goal})


def make_study(frame: pd.DataFrame, name: str, metric: Metric, baseline: str | None) -> StudyRecord:
    """Return the study of a metric: each variant with each seed is a cell."""
    variants = frame["variant"].unique().tolist()
    seeds = sorted(frame["seed"].unique().tolist())
    rows = {(row["variant"], row["seed"]): row for row in frame.to_dict("records")}
    cells = []
    for variant, seed in itertools.product(variants, seeds):
        row = rows.get((variant, seed))
        if row is None:
            cells.append(CellRecord(variant, seed, "missing"))
        elif not math.isfinite(row[metric.name]):
            cells.append(CellRecord(variant, seed, "error"))
        else:
            costs = {name: row[name] for name in COSTS if name in row and not pd.isna(row[name])}
            cells.append(CellRecord(variant, seed, "done", float(row[metric.name]), costs))
    planned = [PlannedVariant(name=variant) for variant in variants]
    # The report has a folder of this name: `...csv` and a metric `a/b` must not lead elsewhere.
    folder = name.replace("/", "-").lstrip(".") or "table"
    plan = Plan(
        study=folder,
        title=name,
        baseline=baseline or variants[0],
        metric=metric,
        variants=planned,
        seeds=seeds,
        cells=[],
    )
    return StudyRecord(plan, cells)
