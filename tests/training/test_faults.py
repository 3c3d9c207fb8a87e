"""Faults while the runner trains cells: each is recorded, and nothing is lost."""

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pandas as pd
import pytest
from helpers import digit_folders, studies
from helpers.commands import Command, run_python, start_with_pipe
from helpers.holding import hold_at
from helpers.runs import is_alive, is_held, list_holders, wait_until
from helpers.training_cells import folder_of

from lit_attn.ablate.plan import expand
from lit_attn.cells import folder
from lit_attn.cells.lock import read_holder
from lit_attn.config.study import StudySource, read_studies
from lit_attn.schema.yaml_text import format_yaml
from lit_attn.train import run_cell

pytestmark = pytest.mark.slow

EXPERIMENT = studies.EXPERIMENT.replace(
    "  epochs: 2", "  epochs: 16\n  accelerator: cpu\n  checkpoint_every: 0.1"
)
MEASURED = ["step_time", "step_time_iqr", "evaluation_time", "peak_memory", "wall_time", "attempts"]
MEASURED += ["metric evaluation/seconds", "step_time_ratio", "evaluation_time_ratio"]
MEASURED += ["waiting", "step_time_fault", "evaluation_time_fault"]
MEASURED += ["finished", "target_seconds"]


@contextlib.contextmanager
def command(path: Path, *arguments: str) -> Iterator[Command]:
    words = ("-m", "helpers.holding", "ablations.yaml", "--jobs", "2", *arguments)
    environment = dict(os.environ) | {"PYTHONPATH": os.pathsep.join(sys.path)}
    process = start_with_pipe(path, words, environment, is_leader=True)
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        assert process.stdout is not None
        process.stdout.close()
        process.wait()


def finish(path: Path, *arguments: str) -> tuple[int, str]:
    with command(path, *arguments) as process:
        output, _ = process.communicate(timeout=500)
        return process.returncode, output


def tables(path: Path) -> dict[str, str]:
    """Return the tables, without measured times, and every curve."""
    tables_by_name = {}
    for name in ("per_seed", "table"):
        frame = pd.read_csv(path / "reports" / "tiny" / f"{name}.csv")
        tables_by_name[name] = frame.drop(columns=MEASURED, errors="ignore").to_csv(index=False)
    for curve in (path / "runs").glob("*/*/*/metrics.csv"):
        tables_by_name[str(curve.relative_to(path))] = without_times(curve)
    return tables_by_name


def without_times(curve: Path) -> str:
    lines = curve.read_text().splitlines()
    return "\n".join(line for line in lines if ",evaluation/seconds," not in line)


def damage(cell: Path) -> bool:
    """Truncate the newest checkpoint, add an empty newer one and half a line of metrics.

    Returns False if the cell has no checkpoint.
    """
    saved = sorted((cell / "checkpoints").glob("step-*.ckpt"))
    if (cell / "result.json").exists() or not saved:
        return False
    saved[-1].write_bytes(saved[-1].read_bytes()[:1000])
    (saved[-1].parent / "step-000009999.ckpt").write_bytes(b"")
    with (cell / "metrics.csv").open("a") as metrics:
        metrics.write("400,3,test/accu")
    return True


@pytest.mark.timeout(1800)
def test_six_kills_change_no_table(tmp_path: Path) -> None:
    """Cells and runners are killed at random, and files of dead cells are damaged. In the end the
    same command writes the same bytes.

    Before every kill some cell waits at a step. Then the cells go on for a few steps, and are
    killed during these steps or when they wait again: no cell can end before the last kill.
    """
    chance = random.Random(7)
    victims = ["cell"] * 4 + ["runner"] * 2
    chance.shuffle(victims)
    disturbed, undisturbed = tmp_path / "disturbed", tmp_path / "undisturbed"
    epochs = 6
    steps = epochs * 18
    experiment = EXPERIMENT.replace("epochs: 16", f"epochs: {epochs}")
    for path in (disturbed, undisturbed):
        path.mkdir()
        studies.write(path, "baseline: a\ncells: {a: {}, b: {attention: belief2}}", experiment)
    killed = []
    torn: list[bool] = []
    step = 5
    hold_at(disturbed, step)
    while victims:
        with command(disturbed) as process:
            while victims and process.poll() is None:
                wait_until(
                    lambda process=process: (
                        any(map(is_held, disturbed.glob("runs/*/*/*")))
                        or process.poll() is not None
                    )
                )
                if not (cells := list_holders(disturbed)):
                    continue
                step += chance.randint(3, 9)
                hold_at(disturbed, step)
                time.sleep(chance.uniform(0, 0.2))
                victim = process.pid if victims[-1] == "runner" else chance.choice(cells)
                os.kill(victim, signal.SIGKILL)
                killed.append(victims.pop())
                wait_until(lambda pid=victim: not is_alive(pid))
                if victim == process.pid:
                    process.wait()
                    wait_until(lambda cells=cells: not any(is_alive(pid) for pid in cells))
                    torn += [damage(lock.parent) for lock in disturbed.glob("runs/*/*/*/lock")]
    assert step < steps
    assert any(torn)
    assert len(killed) == 6
    for path in (disturbed, undisturbed):
        done = run_python(path, "-m", "lit_attn.ablate", "ablations.yaml", "--jobs", "2")
        assert done.returncode == 0, done.stdout + done.stderr
    assert tables(disturbed) == tables(undisturbed)
    # Nobody's child, nobody's half-written file.
    assert list_holders(disturbed) == []
    for cell in (disturbed / "runs").glob("*/*/*/result.json"):
        assert not (cell.parent / "tmp").exists()
        suffixes = {path.suffix for path in (cell.parent / "checkpoints").iterdir()}
        assert suffixes <= {".pt", ".unreadable"}


def test_failures_of_training_have_their_classes(tmp_path: Path, small_disk: Path) -> None:
    """The faults are a non-finite loss, a read-only checkpoint folder and a SIGTERM."""
    body = "baseline: a\ncells: {a: {}, nan: {optimizer.lr: 1e30}, fixed: {zz: with}}"
    path = studies.write(tmp_path, body, EXPERIMENT)
    cells = {job.variant: job for job in expand(choose_one(path), tmp_path / "runs").jobs[:3]}
    fixed = cells["fixed"].folder / "checkpoints"
    fixed.mkdir(parents=True)
    (fixed / "weights.pt").touch()
    subprocess.run(["mount", "--bind", str(small_disk), str(fixed)], check=True)
    hold_at(tmp_path, 5)
    try:
        subprocess.run(["mount", "-o", "remount,ro,bind", str(fixed)], check=True)
        with command(tmp_path, "--seeds", "0,") as process:
            wait_until(lambda: is_held(cells["a"].folder))
            holder = read_holder(cells["a"].folder)
            assert holder is not None
            os.kill(holder.pid, signal.SIGTERM)
            wait_until(lambda: not is_held(cells["a"].folder))
            (tmp_path / "hold").unlink()
            output, _ = process.communicate(timeout=500)
    finally:
        subprocess.run(["umount", str(fixed)], check=True)
    ends = {
        name: [
            end.failure for end in map(folder.read_exit, folder.list_attempts(job.folder)) if end
        ]
        for name, job in cells.items()
    }
    assert ends == {"a": ["killed"], "nan": ["diverged"], "fixed": ["error"]}, output
    assert cells["a"].state() == "done"
    assert "FAILED   tiny/fixed/0  error: OSError: [Errno 30] Read-only file system" in output
    _, output = finish(tmp_path, "--seeds", "0,")
    assert "skipped: 1 cell that diverged; see" in output
    assert cells["fixed"].state() == "done"


def test_the_loss_of_a_data_worker_is_retried(tmp_path: Path) -> None:
    """The kernel's out-of-memory killer chooses a worker as often as the process that trains."""
    experiment = digit_folders.experiment(digit_folders.write(tmp_path / "digits"))
    experiment["data"]["workers"] = 2
    path = studies.write(tmp_path, "baseline: a\ncells: {a: {}}", format_yaml(experiment))
    (job, _) = expand(choose_one(path), tmp_path / "runs").jobs
    hold_at(tmp_path, 2)
    with command(tmp_path, "--seeds", "0,") as process:
        for attempt, number in enumerate((signal.SIGKILL, signal.SIGSEGV), start=1):
            wait_until(lambda: is_held(job.folder) or process.poll() is not None)
            rank = int((job.folder / "held").read_text())
            (worker, *_) = list_children(rank)
            os.kill(worker, number)
            exit_path = job.folder / "attempts" / str(attempt) / "exit.json"
            wait_until(lambda exit_path=exit_path: exit_path.exists() or process.poll() is not None)
        (tmp_path / "hold").unlink()
        output, _ = process.communicate(timeout=500)
    attempts = folder.list_attempts(job.folder)
    ends = [end for end in map(folder.read_exit, attempts) if end is not None]
    assert [end.failure for end in ends] == ["killed", "killed"], output
    assert "Killed" in ends[0].message
    assert "Segmentation fault" in ends[1].message
    assert job.state() == "done"


def list_children(pid: int) -> list[int]:
    """Return the children of a process, oldest first."""
    tasks = Path(f"/proc/{pid}/task").glob("*/children")
    return sorted(int(child) for path in tasks for child in path.read_text().split())


def test_a_disk_that_fills_up_costs_no_result(tmp_path: Path, small_disk: Path) -> None:
    """The failure class is no-space. With free space, the same command ends with the same bytes."""
    experiment = EXPERIMENT.replace("epochs: 16", "epochs: 3")
    # A checkpoint in every step: a fast machine must not end before the second one.
    experiment = experiment.replace("checkpoint_every: 0.1", "checkpoint_every: 0.0001")
    path = studies.write(tmp_path, "baseline: a\ncells: {a: {}}", experiment)
    where = ("--seeds", "0,", "--out", str(small_disk), "--reports", str(tmp_path / "reports"))
    ballast = small_disk / "ballast"
    ballast.write_bytes(bytes(2**20 - 150_000))
    code, output = finish(tmp_path, *where)
    assert code == 1
    assert "FAILED   tiny/a/0  no-space: " in output
    ballast.unlink()
    code, output = finish(tmp_path, *where)
    assert code == 0, output
    (metrics,) = small_disk.glob("*/*/*/metrics.csv")
    cell = expand(choose_one(path), tmp_path).jobs[0]
    undisturbed = folder_of(cell.cell, tmp_path / "alone")
    run_cell(undisturbed)
    assert without_times(metrics) == without_times(undisturbed / "metrics.csv")


def choose_one(path: Path) -> StudySource:
    return read_studies(path)["tiny"]
