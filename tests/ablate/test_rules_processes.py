"""Rule `gates` with real processes: a run that is killed between sizes, and two runs at once."""

import contextlib
import json
import os
import signal
from collections import Counter
from pathlib import Path

import pytest
from helpers.ladders import count_results, expand, finish, read_endings, write_ladder
from helpers.runs import TIMEOUT, run_cli, start_cli, wait_until

from lit_attn.cells.folder import create_attempt
from lit_attn.cells.records import Exit, Plan
from lit_attn.cells.rules import find_open_size

pytestmark = pytest.mark.process

GATES = """
baseline: base
compare_within: [size]
gates: size
axes:
  size: {small: {}, medium: {training.epochs: 3}}
  layer: {base: {}, weak: {optimizer.lr: 2}, gated-good: {optimizer.lr: 3}}
"""


def count_starts(folder: Path, study: str) -> Counter[str]:
    """Count how often each cell has started."""
    log = folder / "runs" / study / "ran.txt"
    return Counter(log.read_text().split()) if log.exists() else Counter()


def run_until_killed(folder: Path, study: str) -> dict[str, int]:
    """Run until a cell of `study` waits, kill all processes, and return the results by variant."""
    waiting = folder / "runs" / study / "gated-good"
    with start_cli(folder, "--jobs", "2") as process:
        wait_until(lambda: list(waiting.glob("*/progress.json")))
        # The cells of the other variants go on, up to the second one that waits.
        wait_until(lambda: len(list(waiting.glob("*/progress.json"))) == 2)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(TIMEOUT)
    with contextlib.suppress(FileNotFoundError):
        for path in waiting.glob("*/progress.json"):
            path.unlink()
    return {name: count_results(folder, study, name) for name in ("base", "weak", "gated-good")}


@pytest.mark.slow
def test_a_run_that_is_killed_twice_decides_as_one_that_is_not(tmp_path: Path) -> None:
    """The first kill leaves a part of the seeds, the second one falls between two sizes."""
    write_ladder(tmp_path, GATES, "6")
    before = run_until_killed(tmp_path, "tiny-small")
    assert 0 < before["base"] < 6
    plan = Plan.load(tmp_path / "runs" / "tiny-medium" / "plan.json")
    assert "tiny-small has" in find_open_size(plan.gate, tmp_path / "runs")
    assert read_endings(tmp_path, "tiny-medium") == {}
    assert count_starts(tmp_path, "tiny-medium") == {}
    (tmp_path / "runs" / "tiny-small" / "go").touch()
    run_until_killed(tmp_path, "tiny-medium")
    decided = read_endings(tmp_path, "tiny-medium")
    assert list(decided) == ["weak"]
    (tmp_path / "runs" / "tiny-medium" / "go").touch()
    with start_cli(tmp_path, "--jobs", "2") as process:
        output, _ = process.communicate(timeout=TIMEOUT)
        assert process.returncode == 0, output
    assert read_endings(tmp_path, "tiny-medium") == decided
    for study in ("tiny-small", "tiny-medium"):
        starts = count_starts(tmp_path, study)
        # Only a cell that waited when it was killed has started again.
        assert {name.partition("/")[0] for name, count in starts.items() if count > 1} == {
            "gated-good"
        }
    assert "weak/0" not in count_starts(tmp_path, "tiny-medium")
    assert count_results(tmp_path, "tiny-medium", "gated-good") == 6


def test_two_runs_on_the_same_folder_decide_alike_and_train_no_cell_twice(tmp_path: Path) -> None:
    write_ladder(tmp_path, GATES.replace("gated-good", "brief-good"), "6")
    with (
        start_cli(tmp_path, "--jobs", "1") as first,
        start_cli(tmp_path, "--jobs", "1") as second,
    ):
        outputs = [run.communicate(timeout=TIMEOUT)[0] for run in (first, second)]
        assert (first.returncode, second.returncode) == (0, 0), outputs
    for output in outputs:
        assert "ended: weak not run: worse at size small" in output
    small = count_starts(tmp_path, "tiny-small")
    medium = count_starts(tmp_path, "tiny-medium")
    assert len(small) == 18
    assert len(medium) == 12
    assert set(small.values()) == set(medium.values()) == {1}
    assert list(read_endings(tmp_path, "tiny-medium")) == ["weak"]
    # One seal of each size: both runs have written the same plan.
    for study in ("tiny-small", "tiny-medium"):
        seals = json.loads((tmp_path / "runs" / study / "seals.json").read_text())
        assert len(seals["entries"]) == 1


def test_a_rerun_trains_all_cells_that_it_names(tmp_path: Path) -> None:
    """The rule has ended their variant, and it does not drop the second one after the first."""
    body = "baseline: base\nstop: futility\ncells: {base: {}, dull: {optimizer.lr: 2}}"
    write_ladder(tmp_path, body, "10")
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
