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
    from lit_attn.report.pages import write
    from lit_attn.report.records.looks import record_looks
    from lit_attn.report.records.read import read_studies

    records = record_looks(read_studies(runs, studies), runs)
    return write.write_reports(records, reports).written


def compare(
    frame: "pd.DataFrame",
    metric: str = "",
    *,
    pairs: str,
    baseline: str | None = None,
    goal: Literal["max", "min"] | None = None,
    margin: float | None = None,
) -> "pd.DataFrame":
    """Return the comparison of the variants of a frame with a baseline, one row for each variant.

    `frame` has the columns `variant` and `metric` (default: its only column of numbers) and, for
    pairs, `seed`. `pairs` is "seed" if runs with one seed belong together, and "none" for
    independent runs. `goal` is needed unless the direction of the metric is known, and `baseline`
    unless a variant has this name. `margin` is the largest difference that does not matter. PyTorch
    is not needed. `lit_attn.judge` returns more. Raises ConfigError for another frame.
    """
    from lit_attn.judging.frames import compare_frame

    return compare_frame(frame, metric, pairs=pairs, baseline=baseline, goal=goal, margin=margin)


def read_runs(path: str | Path, *, reader: str = "") -> "pd.DataFrame":
    """Return the runs of another program at `path` as a frame with one row for each run.

    The columns are those of the program: nothing is renamed, and cells of a table stay texts.
    `reader` (`FILE.py:FUNCTION`) names a function that reads the path; its file is executed.
    docs/other-runs.md lists the programs. Raises ConfigError for another path.
    """
    import pandas as pd

    from lit_attn.judging.table import read_table

    return pd.DataFrame(read_table(Path(path), reader).rows)
