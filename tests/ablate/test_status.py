"""The commands `status` and `logs`."""

import os
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest
from helpers import studies
from helpers.answers import read_answer
from helpers.fake_cells import write_reports
from helpers.fake_results import write_results
from helpers.fake_study import write_study
from helpers.runs import make_body, run

from lit_attn.ablate import status
from lit_attn.ablate.__main__ import main
from lit_attn.ablate.commands import execution
from lit_attn.ablate.job import Job
from lit_attn.ablate.plan import expand
from lit_attn.cells import records
from lit_attn.cells.folder import CellStatus, Progress, State, create_attempt
from lit_attn.cells.lock import hold_lock
from lit_attn.cells.records import Exit, FailureClass, Plan, PlannedCell
from lit_attn.tasks.metrics import DEFAULT_METRIC


def cell(state: State, variant: str = "v", progress: Progress | None = None) -> status.StudyCell:
    planned = PlannedCell(variant=variant, seed=0, identity="i", path="p")
    return status.StudyCell(planned, Path("p"), CellStatus(state, progress=progress))


PLAN = """{"study": "x", "title": "t", "baseline": "a", "variants": [], "seeds": [0],
"metric": {"name": "test/accuracy", "label": "accuracy", "goal": "max", "scale": 1},
"cells": [{"variant": "a", "seed": 0, "identity": "i", "path": "../../elsewhere"}]}"""


def write(path: Path) -> list[Job]:
    """Write a study with cells in every state."""
    matrix = expand(studies.study(path, make_body("ok", "crash", "running", "new")), path / "runs")
    run([job for job in matrix.jobs if job.variant in ("ok", "crash")])
    matrix.write_plan()
    return matrix.jobs


def test_every_state_is_shown_with_advice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cells = write(tmp_path)
    going = next(job for job in cells if job.name == "tiny/running/0")
    monkeypatch.chdir(tmp_path)
    with hold_lock(going.folder):
        progress = '{"step": 25, "total": 100, "step_time": 0.5}'
        (going.folder / "progress.json").write_text(progress)
        assert main(["status"]) == 0
        of_runs = capsys.readouterr().out
        assert main(["status", "runs/tiny"]) == 0
        assert capsys.readouterr().out == of_runs
        assert main(["status", "--json"]) == 0
        (study,) = read_answer(capsys.readouterr().out)["studies"]
    assert of_runs.startswith("tiny: A tiny study\n  8 cells: ")
    assert {"2 done", "2 error", "1 running", "3 missing"} <= set(
        of_runs.splitlines()[1].partition("; ")[0].removeprefix("  8 cells: ").split(", ")
    )
    assert "  running  running/0  25/100 steps, about 0:38 left" in of_runs
    crash = next(job for job in cells if job.name == "tiny/crash/1")
    start = of_runs.index("  FAILED   crash/1  error: RuntimeError: the reactor is on fire")
    block = of_runs[start:].splitlines()
    assert "      | RuntimeError: the reactor is on fire" in block
    assert "      advice:    read the whole log, then run the cell alone" in block
    relative = crash.folder.relative_to(tmp_path)
    assert f"      log:       lit-attn logs {relative}" in block
    assert f"      run alone: lit-attn train {relative}" in block
    # Programs read the same.
    assert study["counts"] == {"done": 2, "error": 2, "running": 1, "missing": 3}
    listed = {(cell["variant"], cell["seed"]): cell for cell in study["cells"]}
    assert (listed["running", 0]["step"], listed["running", 0]["steps"]) == (25, 100)
    assert "the reactor is on fire" in listed["crash", 0]["message"]
    assert listed["crash", 0]["advice"]
    assert listed["ok", 0]["advice"] is None


def test_steps_predict_the_time_left() -> None:
    halfway = Progress(step=50, total=100, step_time=0.1)
    running, missing = cell("running", progress=halfway), cell("missing", "w")

    def estimate_time_left(*cells: status.StudyCell) -> float | None:
        return status.estimate_seconds("x", list(cells), 1)

    assert estimate_time_left(missing) is None
    # Five seconds for the second half of the cell, and ten for the cell that was not measured.
    assert estimate_time_left(running, missing) == 15.0
    # Diverged cells do not run again.
    assert estimate_time_left(running, cell("diverged", "w")) == 5.0
    cells = [running, cell("running", "u", halfway), missing]
    text = status.describe(plan_of(cells), cells)
    assert "about 0:10 left with 2 at once" in text


def test_finished_cells_predict_the_time_left(tmp_path: Path) -> None:
    write_study(tmp_path / "runs", seeds=2, skip=(("belief", 1), ("belief2", 0)))
    (study,) = status.read_plans(tmp_path / "runs")
    cells = status.read_cells(*study)
    assert status.estimate_seconds("fake", cells, 1) == 2 * 61.5
    assert "left with 1 at once" in status.describe(study[0], cells)


def plan_of(cells: list[status.StudyCell]) -> Plan:
    return Plan(
        study="x", title="t", baseline="v", metric=DEFAULT_METRIC, variants=[], seeds=[0],
        cells=[cell.planned for cell in cells],
    )  # fmt: skip


def test_every_failure_class_has_advice() -> None:
    assert set(status.ADVICE) == {*get_args(FailureClass), "unreadable"}


def test_the_place_of_a_crash_is_shown_and_long_lines_are_cut(tmp_path: Path) -> None:
    """Python writes the stack of a crashed process with the innermost call first."""
    folder = write_study(tmp_path / "runs", seeds=1, failures={("belief", 0): "killed"})
    (attempt,) = folder.glob("v1/*/attempts/1")
    stack = [f'  File "library.py", line {number} in call' for number in range(20)]
    modules = "Extension modules: " + ", ".join(["numpy"] * 200)
    crash = ["step 3", "Fatal Python error: Aborted", "", "Thread 0x1 (most recent call first):"]
    log = "\n".join([*crash, '  File "mine.py", line 9 in forward', *stack, modules])
    (attempt / "log.txt").write_text(log)
    (study,) = status.read_plans(tmp_path / "runs")
    text = status.describe(study[0], status.read_cells(*study))
    assert "| Fatal Python error: Aborted\n" in text
    assert 'mine.py", line 9 in forward' in text
    assert "Extension modules" not in text
    (attempt / "log.txt").write_text(modules)
    text = status.describe(study[0], status.read_cells(*study))
    assert max(map(len, text.splitlines())) < 250


def test_a_cell_of_two_variants_counts_once(tmp_path: Path) -> None:
    folder = write_study(tmp_path / "runs", seeds=2)
    ((plan, place),) = status.read_plans(folder)
    twice = plan.model_copy(update={"cells": [*plan.cells, plan.cells[0]]})
    assert len(status.read_cells(twice, place)) == len(plan.cells)


def test_further_failures_are_only_counted(tmp_path: Path) -> None:
    failures = {("standard", seed): "killed" for seed in range(15)}
    folder = write_study(tmp_path / "runs", seeds=15, failures=failures)
    (study,) = status.read_plans(folder)
    text = status.describe(study[0], status.read_cells(*study))
    assert text.count("FAILED") == status.MAX_FAILED
    assert text.endswith("and 5 more failed cells\n")


def test_the_first_failed_rank_is_shown(tmp_path: Path) -> None:
    folder = write_study(tmp_path / "runs", seeds=1, failures={("belief", 0): "out-of-memory"})
    (attempt,) = folder.glob("v1/*/attempts/1")
    (attempt / "log.txt").write_text("rank 3 was the first to fail: boom\n[rank3]: boom\n")
    ended = Exit(
        failure="out-of-memory", returncode=1, message="[rank3]: boom", rank=3, finished="now"
    )
    ended.write(attempt / "exit.json")
    (study,) = status.read_plans(tmp_path / "runs")
    text = status.describe(study[0], status.read_cells(*study))
    assert "FAILED   belief/0  out-of-memory on rank 3: [rank3]: boom" in text
    assert "| [rank3]: boom" in text
    assert f"logs {attempt.parents[1]}" in text


def test_a_missing_or_torn_plan_is_one_error_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["status", str(tmp_path)]) == 2
    assert capsys.readouterr().err == f"{tmp_path}: contains no study (no */plan.json)\n"
    assert main(["status", str(tmp_path / "nowhere")]) == 2
    assert "nowhere: this folder does not exist; correct the path" in capsys.readouterr().err
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "plan.json").write_text("{")
    assert main(["status", str(tmp_path)]) == 2
    assert "plan.json: is not a plan; run the study again" in capsys.readouterr().err


def test_an_unreadable_plan_is_skipped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_study(tmp_path, seeds=1)
    for name, content in (("torn", "{"), ("outside", PLAN)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "plan.json").write_text(content)
    assert main(["status", str(tmp_path)]) == 0
    captured = capsys.readouterr()
    assert captured.out == "fake: A study that never ran\n  3 cells: 3 done\n\n"
    assert [line.partition(":")[0] for line in captured.err.splitlines()] == [
        str(tmp_path / "outside" / "plan.json"),
        str(tmp_path / "torn" / "plan.json"),
    ]
    assert "cells.0.path: '../../elsewhere' is outside the folder of the study" in captured.err


def test_an_unreadable_result_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_study(tmp_path, seeds=1)
    (torn,) = folder.glob("v1/*/result.json")
    torn.write_text("{")
    assert main(["status", str(tmp_path)]) == 0
    output = capsys.readouterr().out
    assert "3 cells: 2 done, 1 unreadable" in output
    assert "FAILED   belief/0  unreadable: result.json is torn" in output


def test_every_command_reads_one_file_per_finished_cell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This limit lets status, dry run and resume handle 50,000 finished cells in a few seconds."""
    matrix = write_results(tmp_path, 200)
    reads: list[Path] = []
    lists: list[Path] = []
    read, iterdir = records.open_at_once, Path.iterdir
    monkeypatch.setattr(records, "open_at_once", lambda path: reads.append(path) or read(path))
    monkeypatch.setattr(Path, "iterdir", lambda path: lists.append(path) or iterdir(path))
    monkeypatch.setattr(execution, "write_reports", write_reports)
    monkeypatch.chdir(tmp_path)
    for arguments in (["status"], ["ablations.yaml", "--dry-run"], ["ablations.yaml"]):
        reads.clear()
        assert main(arguments) == 0
        results = sum(path.name == "result.json" for path in reads)
        # A run also asks one result of the baseline which data its floors are for.
        assert results == len(matrix.jobs) + (arguments == ["ablations.yaml"])
        # The others are the plan, the seals at the beginning and the end of a run, the floors, and
        # the origin of the folder at the check and with each plan.
        assert len(reads) <= len(matrix.jobs) + 7
    assert lists == []


def test_logs_shows_the_last_attempt_or_one_error_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cells = write(tmp_path)
    monkeypatch.chdir(tmp_path)
    crash = next(job for job in cells if job.name == "tiny/crash/1")
    for name in ("tiny/crash/1", str(crash.folder)):
        assert main(["logs", name]) == 0
        assert "RuntimeError: the reactor is on fire" in capsys.readouterr().out
    (create_attempt(crash.folder) / "log.txt").write_text("the second\n")
    assert main(["logs", "tiny/crash/1"]) == 0
    assert capsys.readouterr().out == "the second\n"
    create_attempt(tmp_path / "runs" / "tiny" / "no-log" / "0-x")
    messages = {
        "tiny/crsh/1": "runs: has no cell 'tiny/crsh/1'; did you mean 'tiny/crash/1'?",
        "tiny/new/0": "tiny/new/0: has no log, because the cell was not started",
        "tiny/no-log/0": "runs/tiny/no-log/0-x/attempts/1: its log cannot be read: No such",
    }
    for name, message in messages.items():
        assert main(["logs", name]) == 2
        assert capsys.readouterr().err.startswith(message)


def test_escape_sequences_of_a_log_never_reach_a_terminal(tmp_path: Path) -> None:
    (job, *_) = expand(studies.study(tmp_path, make_body("ok")), tmp_path / "runs").jobs
    job.write_config()
    (create_attempt(job.folder) / "log.txt").write_text("\x1b]0;title\x07text\n")
    terminal, screen = os.openpty()
    command = [sys.executable, "-m", "lit_attn.ablate", "logs", str(job.folder)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run(command, stdout=screen, check=True, env=environment)
    shown = os.read(terminal, 1000)
    os.close(terminal)
    os.close(screen)
    assert shown == b"\\x1b]0;title\\x07text\r\n"


@pytest.mark.process
def test_a_log_larger_than_the_memory_is_shown(tmp_path: Path) -> None:
    (job, *_) = expand(studies.study(tmp_path, make_body("ok")), tmp_path / "runs").jobs
    job.write_config()
    # More than the process may add to its memory.
    size = 160 * 2**20
    with (create_attempt(job.folder) / "log.txt").open("wb") as log:
        log.truncate(size)
    code = (
        "import resource, sys\n"
        "from pathlib import Path\n"
        "from lit_attn.ablate.__main__ import main\n"
        "pages = int(Path('/proc/self/statm').read_text().split()[0])\n"
        "limit = pages * resource.getpagesize() + 2**27\n"
        "resource.setrlimit(resource.RLIMIT_AS, (limit, limit))\n"
        "sys.exit(main(['logs', sys.argv[1]]))\n"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    output = tmp_path / "output"
    with output.open("wb") as stream:
        command = [sys.executable, "-c", code, str(job.folder)]
        subprocess.run(command, stdout=stream, check=True, env=environment)
    assert output.stat().st_size == size
    output.unlink()


def test_status_imports_no_torch(tmp_path: Path) -> None:
    write_study(tmp_path / "runs")
    code = (
        "import sys; from lit_attn.ablate.__main__ import main\n"
        "main(['status', sys.argv[1]])\n"
        "main(['status', '--watch', sys.argv[1]])\n"
        "heavy = {'torch', 'lightning', 'pandas', 'rich', 'multiprocessing'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "runs")], check=True)


def test_a_file_named_status_can_be_written_with_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    studies.write(tmp_path, make_body("ok")).rename(tmp_path / "status")
    monkeypatch.chdir(tmp_path)
    assert main(["./status", "--dry-run"]) == 0
    assert "2 missing" in capsys.readouterr().out


def test_the_advice_about_a_loss_that_is_not_finite_at_step_0_is_not_the_rate() -> None:
    for message, words in (("loss is nan at step 0", "formula"), ("loss is nan at step 10", "lr")):
        end = Exit(failure="diverged", returncode=1, message=message)
        advice = status.find_advice(CellStatus("diverged", None, None, end))
        assert advice is not None
        assert words in advice
    end = Exit(failure="killed", returncode=1, message="its job ended: CANCELLED")
    advice = status.find_advice(CellStatus("killed", None, None, end))
    assert advice == "its job was cancelled; run the same command again to submit it"
