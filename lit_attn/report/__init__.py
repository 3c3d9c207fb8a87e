"""Tables and figures made from records. This package imports nothing that trains."""

from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import pandas as pd


def write_reports(runs: Path, reports: Path, studies: list[str] | None = None) -> list[Path]:
    """Write reports/<study>/ for each study in `runs` (or in `studies`) and reports/index.html.

    The index lists every study in `reports`. A study whose records cannot be read or reported is
    skipped with a warning. Returns the folders that were written. Raises ConfigError if there is
    nothing to report on.
    """
    # pandas is imported only when it is needed.
    from lit_attn.report import write
    from lit_attn.report.looks import record_looks
    from lit_attn.report.read import read_studies

    records = record_looks(read_studies(runs, studies), runs)
    return write.write_reports(records, reports).written


def compare(
    frame: "pd.DataFrame",
    metric: str = "",
    *,
    baseline: str | None = None,
    goal: Literal["max", "min"] | None = None,
    margin: float | None = None,
) -> "pd.DataFrame":
    """Return the comparison of the variants of a frame with a baseline.

    `frame` has the columns `variant`, `seed` and `metric` (default: its only numeric column). The
    baseline is the first variant, and the goal follows from the name of the metric, if they are not
    named. `margin` is the largest difference that does not matter. PyTorch is not needed. The rows
    and columns are those of `lit_attn.report.frames.compare_frame`. Raises ConfigError for another
    frame.
    """
    from lit_attn.report.frames import compare_frame

    return compare_frame(frame, metric, baseline=baseline, goal=goal, margin=margin)


def read_runs(path: str | Path, *, variant: str = "", seed: str = "seed") -> "pd.DataFrame":
    """Return the runs of W&B, MLflow, TensorBoard or trackio at `path` as a frame.

    It has the columns `run`, `variant`, `seed`, and the settings and last values of each run.
    `variant` and `seed` name the settings that hold them (`lit_attn.report.trackers`).
    """
    from lit_attn.report import trackers

    return trackers.read_runs(path, variant=variant, seed=seed)
