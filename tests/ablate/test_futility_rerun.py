"""Rule `stop: futility` with real processes: a rerun of cells of an ended variant."""

from collections import Counter
from pathlib import Path

import pytest
from helpers.futility import expand, finish, read_endings, write_study
from helpers.runs import run_cli

from lit_attn.cells.folder import create_attempt
from lit_attn.cells.records import Exit

pytestmark = pytest.mark.process


def count_starts(folder: Path, study: str) -> Counter[str]:
    """Count how often each cell has started."""
    log = folder / "runs" / study / "ran.txt"
    return Counter(log.read_text().split()) if log.exists() else Counter()


def test_a_rerun_trains_all_cells_that_it_names(tmp_path: Path) -> None:
    """The rule has ended their variant, and it does not drop the second one after the first."""
    write_study(tmp_path)
    (matrix,) = expand(tmp_path)
    for job in matrix.jobs:
        if job.cell.variant == "base" or job.cell.seed < 5:
            finish(job)
        elif job.cell.seed > 7:
            attempt = create_attempt(job.folder)
            end = Exit(failure="error", returncode=1, message="broken")
            end.write(attempt / "exit.json")
    matrix.write_plan()
    assert list(read_endings(tmp_path, "tiny")) == ["dull"]
    code, output = run_cli(tmp_path, "--jobs", "1", command=("rerun", "failed"))
    assert code == 0, output
    assert sorted(count_starts(tmp_path, "tiny")) == ["dull/8", "dull/9"]
