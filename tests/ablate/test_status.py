"""`status` and `logs`: what is done, what failed and why, how long yet."""

import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import get_args

import pytest
from helpers import studies
from helpers.fake_study import write_study
from helpers.runs import TIMEOUT, cli, names, run, running, until

from lit_attn.ablate import status
from lit_attn.ablate.__main__ import main
from lit_attn.ablate.plan import Job, expand
from lit_attn.cells.folder import create_attempt
from lit_attn.cells.lock import hold_lock
from lit_attn.cells.records import Exit, FailureClass, Metric, PlannedCell


def seen(state: str, variant: str = "v", **found: object) -> status.Seen:
    planned = PlannedCell(variant=variant, seed=0, identity="i", path="p")
    values = {"result": None, "progress": None} | found
    return status.Seen(planned, Path("p"), state, **values)  # type: ignore[arg-type]


def write(path: Path) -> list[Job]:
    """A study in every state, in `path`."""
    cells = expand(studies.study(path, names("ok", "crash", "running", "new")), path / "runs").jobs
    run([job for job in cells if job.cell.variant in ("ok", "crash")])
    matrix = expand(studies.study(path, names("ok", "crash", "running", "new")), path / "runs")
    matrix.plan().write(matrix.folder / "plan.json")
    return cells


def test_every_state_and_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cells = write(tmp_path)
    going = next(job for job in cells if job.name == "tiny/running/0")
    monkeypatch.chdir(tmp_path)
    with hold_lock(going.folder):
        progress = '{"step": 25, "total": 100, "step_time": 0.5, "memory": 1}'
        (going.folder / "progress.json").write_text(progress)
        assert main(["status"]) == 0
        of_runs = capsys.readouterr().out
        assert main(["status", "ablations.yaml"]) == 0
        assert capsys.readouterr().out == of_runs
    assert of_runs.startswith("tiny: A tiny study\n  8 cells: ")
    assert {"2 done", "2 error", "1 running", "3 missing"} <= set(
        of_runs.splitlines()[1].partition("; ")[0].removeprefix("  8 cells: ").split(", ")
    )
    assert "  running  running/0  25/100 steps, 500 ms each, about 0:38 left" in of_runs
    crash = next(job for job in cells if job.name == "tiny/crash/1")
    start = of_runs.index("  FAILED   crash/1  error: RuntimeError: the reactor is on fire")
    block = of_runs[start:].splitlines()
    assert "      | RuntimeError: the reactor is on fire" in block
    assert "      to do: the whole log, then the cell alone" in block
    assert "      log:   python -m lit_attn.ablate logs tiny/crash/1" in block
    relative = crash.folder.relative_to(tmp_path)
    assert f"      alone: python -m lit_attn.train {relative}" in block


def test_time_left() -> None:
    fast = status.Progress(50, 100, 0.1)
    assert status.remaining([seen("missing")]) is None
    # A half of ten seconds, and ten for the cell that nobody has measured.
    assert status.remaining([seen("running", progress=fast), seen("missing", "w")]) == 15.0
    both = [seen("running", progress=fast), seen("running", "w", progress=fast), seen("missing")]
    text = status.report(plan_of(both), Path("runs/x"), both)
    assert "about 0:10 left at 2 at once" in text
    # Not what has diverged: it is left alone.
    assert status.remaining([seen("running", progress=fast), seen("diverged", "w")]) == 5.0


def test_finished_cells_tell_more_than_steps(tmp_path: Path) -> None:
    folder = write_study(tmp_path / "runs", seeds=2, skip=(("belief", 1), ("belief2", 0)))
    (found,) = status.plans(tmp_path / "runs", tmp_path, [])
    cells = status.look(*found)
    assert status.costs(cells) == {"standard": 61.5, "belief": 61.5, "belief2": 61.5}
    assert status.remaining(cells) == 2 * 61.5
    assert "one after the other" in status.report(found[0], folder, cells)


def plan_of(cells: list[status.Seen]) -> status.Plan:
    return status.Plan(
        study="x", title="t", baseline="v", metric=Metric(), variants=[], seeds=[0],
        cells=[cell.planned for cell in cells],
    )  # fmt: skip


def test_every_failure_has_an_advice() -> None:
    assert set(status.ADVICE) == set(get_args(FailureClass))


def test_many_failures_are_counted(tmp_path: Path) -> None:
    failures = {("standard", seed): "killed" for seed in range(15)}
    folder = write_study(tmp_path / "runs", seeds=15, failures=failures)
    (found,) = status.plans(tmp_path / "runs", tmp_path, ["fake"])
    text = status.report(found[0], folder, status.look(*found))
    assert text.count("FAILED") == status.SHOWN
    assert text.endswith("and 5 more that failed\n")


def test_the_first_failing_rank(tmp_path: Path) -> None:
    folder = write_study(tmp_path / "runs", seeds=1, failures={("belief", 0): "out-of-memory"})
    (attempt,) = folder.glob("v1/*/attempts/1")
    (attempt / "log.txt").write_text("rank 3 was the first to fail: boom\n[rank3]: boom\n")
    ended = Exit(
        failure="out-of-memory", returncode=1, message="[rank3]: boom", rank=3, finished="now"
    )
    ended.write(attempt / "exit.json")
    (found,) = status.plans(tmp_path / "runs", tmp_path, [])
    text = status.report(found[0], folder, status.look(*found))
    assert "FAILED   belief/0  out-of-memory on rank 3: [rank3]: boom" in text
    assert "| [rank3]: boom" in text
    assert f"logs fake/belief/0 --runs {tmp_path / 'runs'}" in text


def test_nothing_to_look_at(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", str(tmp_path)]) == 2
    assert capsys.readouterr().err == f"{tmp_path}: holds no study (no */plan.json)\n"
    assert main(["status", str(tmp_path / "no.yaml")]) == 2
    assert "no.yaml" in capsys.readouterr().err
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "plan.json").write_text("{")
    assert main(["status", str(tmp_path)]) == 2
    assert "plan.json: is not a plan: " in capsys.readouterr().err


def test_logs(
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
    assert main(["logs", "tiny/crash/1", "--attempt", "1"]) == 0
    assert "the reactor" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["tiny/crsh/1"], "runs: has no cell 'tiny/crsh/1'; did you mean 'tiny/crash/1'?"),
        (["tiny/new/0"], "tiny/new/0: has no log: it was not begun"),
        (["tiny/crash/1", "--attempt", "7"], "--attempt 7: "),
        (["tiny/crash/1", "--rank", "1"], "--rank 1: "),
    ],
)
def test_no_such_log(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    write(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert main(["logs", *arguments]) == 2
    assert capsys.readouterr().err.startswith(message)


def test_a_log_is_followed_to_its_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (job, *_) = expand(studies.study(tmp_path, names("ok")), tmp_path / "runs").jobs
    job.cell.write(job.folder / "config.yaml")
    log = create_attempt(job.folder) / "log.txt"
    log.write_text("first\n")

    def cell() -> None:
        with hold_lock(job.folder):
            held.set()
            time.sleep(0.3)
            with log.open("a") as stream:
                stream.write("last\n")

    held = threading.Event()
    thread = threading.Thread(target=cell)
    thread.start()
    held.wait()
    assert main(["logs", str(job.folder), "--watch"]) == 0
    thread.join()
    assert capsys.readouterr().out == "first\nlast\n"


def test_watching_ends_with_the_last_cell(tmp_path: Path) -> None:
    studies.write(tmp_path, names("gated"))
    with cli(tmp_path, "--jobs", "2") as process, cli_of_status(tmp_path) as watching:
        until(lambda: len(running(tmp_path)) == 2)
        (tmp_path / "runs" / "tiny" / "go").touch()
        assert process.wait(TIMEOUT) == 0
        output, _ = watching.communicate(timeout=TIMEOUT)
    assert output.rstrip().endswith("2 cells: 2 done")


def cli_of_status(path: Path) -> "subprocess.Popen[str]":
    code = "import sys; from lit_attn.ablate.__main__ import main; sys.exit(main(sys.argv[1:]))"
    arguments = ["status", "ablations.yaml", "--watch", "0.05"]
    return subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        cwd=path,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )


def test_looking_imports_nothing_heavy(tmp_path: Path) -> None:
    write_study(tmp_path / "runs")
    code = (
        "import sys; from lit_attn.ablate.__main__ import main; main(['status', sys.argv[1]])\n"
        "heavy = {'torch', 'lightning', 'pandas', 'rich', 'multiprocessing'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "runs")], check=True)


def test_a_file_called_status_is_written_with_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    studies.write(tmp_path, names("ok")).rename(tmp_path / "status")
    monkeypatch.chdir(tmp_path)
    assert main(["./status", "--dry-run"]) == 0
    assert "2 missing" in capsys.readouterr().out
