"""Cells on two devices (processes on two cores) compute the results of one device."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import device_cells
from helpers.finished_cells import assert_close_weights, read_weights
from helpers.once import make_once
from helpers.runs import TIMEOUT, wait_until
from helpers.training_cells import digits_cell, folder_of

from lit_attn.cells import folder
from lit_attn.cells.lock import BUSY
from lit_attn.cells.records import Exit, Result
from lit_attn.cells.rows import read_metrics
from lit_attn.tasks.classification import Calibration
from lit_attn.train import main

# The first test waits for the cells of all tests.
pytestmark = [pytest.mark.process, pytest.mark.timeout(1800)]

# A change of three of the scenes' 7,247 pixels. If the two largest logits of a pixel differ by
# rounding alone, gradients that are summed over two devices can give it another class.
FEW_PIXELS = 5e-4


@pytest.fixture(scope="module")
def cells(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder in which `device_cells` has run all of its cells side by side.

    The environment is that of a SLURM job with one task; the cells' processes are not SLURM tasks.
    """
    return make_once(tmp_path_factory, "device_cells", run_cells)


def run_cells(root: Path) -> None:
    done = subprocess.run(
        [sys.executable, device_cells.__file__, str(root)],
        env=os.environ
        | {"PYTHONPATH": os.pathsep.join(sys.path), "CUDA_VISIBLE_DEVICES": ""}
        | {"SLURM_JOB_NAME": "cells", "SLURM_NTASKS": "1", "SLURM_PROCID": "0"}
        | {"SLURM_JOB_ID": "1", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def result(path: Path) -> Result:
    logs = "\n".join(folder.read_log_tail(attempt) for attempt in folder.list_attempts(path))
    assert (path / "result.json").exists(), logs
    return Result.model_validate_json((path / "result.json").read_text())


def last_exit(path: Path) -> Exit:
    last = folder.read_exit(folder.list_attempts(path)[-1])
    assert last is not None
    return last


COMPARED = ["cut_short", "early", "text", "growing", "scenes"]
COMPARED += ["counted", "values", "normed", "configured", "few", "single"]


@pytest.mark.parametrize("name", COMPARED)
def test_two_devices_compute_the_result_of_one_device(name: str, cells: Path) -> None:
    """Every sample counts once, although 237 validation images and five scenes are odd numbers.

    Of the cells named few and single, the second device has nothing to evaluate.
    """
    one, two = cells / f"{name}-1", cells / f"{name}-2"
    alone, shared = result(one), result(two)
    assert (alone.devices, shared.devices) == (1, 2)
    assert (
        alone.batch_size
        == shared.batch_size
        == device_cells.cells()[f"{name}-1"].experiment.data.batch_size
    )
    assert (alone.identity, alone.steps, alone.data) == (
        shared.identity,
        shared.steps,
        shared.data,
    )
    rows, rows_of_two = read_metrics(one / "metrics.csv"), read_metrics(two / "metrics.csv")
    assert [row[:3] for row in rows] == [row[:3] for row in rows_of_two]
    assert rows
    for row, row_of_two in zip(rows, rows_of_two, strict=True):
        is_of_pixels = "IoU" in row.name or row.name.endswith(("/aAcc", "/mAcc"))
        rounding = FEW_PIXELS if is_of_pixels else 1e-5
        assert row.value == pytest.approx(row_of_two.value, rel=1e-4, abs=rounding), row
    units, units_of_two = np.load(one / "units.npz"), np.load(two / "units.npz")
    assert set(units) == set(units_of_two)
    for array in units:
        assert units[array] == pytest.approx(units_of_two[array], rel=1e-3, abs=1e-4)
    for loss in (array for array in units if array.endswith("loss")):
        mean = units[loss].sum(dtype=float) / units[loss.replace("loss", "targets")].sum()
        assert mean == pytest.approx(alone.metrics[loss], rel=1e-5)
    assert_close_weights(read_weights(one), read_weights(two))


def test_two_devices_stop_early_together(cells: Path) -> None:
    for name in ("early-1", "early-2"):
        assert (result(cells / name).stopped_early, result(cells / name).epochs) == (True, 2)


def test_stopped_devices_resume_exactly(cells: Path) -> None:
    """SIGTERM to one rank stops both ranks before the same step, and nothing is lost."""
    uninterrupted, stopped = cells / "whole", cells / "stopped"
    first, second = folder.list_attempts(stopped)
    ended = folder.read_exit(first)
    assert ended is not None
    assert ended.failure == "killed"
    assert ended.message.endswith(f"saved at step {device_cells.STOPPED_AT}")
    assert folder.read_exit(second) is None
    assert result(stopped).attempts == 2
    for record in ("diagnostics.csv", "attention.npz", "units.npz"):
        assert (uninterrupted / record).read_bytes() == (stopped / record).read_bytes()
    ours, same = (read_metrics(path / "metrics.csv") for path in (stopped, uninterrupted))
    for row, expected in zip(ours, same, strict=True):
        # The mean of an epoch's losses: what was summed before the stop is one rank's then.
        rounding = 1e-6 if row.name == "train/loss" else 0
        assert row._replace(value=0) == expected._replace(value=0)
        assert row.value == pytest.approx(expected.value, rel=rounding, abs=0)
    theirs = read_weights(uninterrupted)
    assert all(torch.equal(weight, theirs[key]) for key, weight in read_weights(stopped).items())


def test_a_non_finite_loss_is_a_failure_of_the_cell(cells: Path) -> None:
    assert last_exit(cells / "diverged").failure == "diverged"
    assert not (cells / "diverged" / "result.json").exists()


def test_a_killed_rank_ends_its_cell(cells: Path) -> None:
    """The other rank waits for gradients that never arrive."""
    ended = last_exit(cells / "killed")
    assert (ended.failure, ended.rank, ended.message) == ("killed", 1, "ended by SIGKILL")


def test_the_command_line_trains_on_two_devices(tmp_path: Path) -> None:
    """SIGTERM to the first process reaches both ranks; a second process reports the holder."""
    cell = digits_cell(model=device_cells.EXACT, training={"devices": 2, "epochs": 100_000})
    path = folder_of(cell, tmp_path)
    command = [sys.executable, "-m", "lit_attn.train", str(path)]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as first:
        wait_until(lambda: folder.read_progress(path) is not None)
        assert main([str(path)]) == BUSY
        first.terminate()
        _, errors = first.communicate(timeout=TIMEOUT)
    assert first.returncode == 143
    assert errors.count("stopped by SIGTERM; saved at step") == 2
    assert len(list((path / "checkpoints").glob("step-*.ckpt"))) in (1, 2)
    assert not (path / "lock").exists()


def test_only_rank_0_writes_records(cells: Path) -> None:
    path = cells / "whole"
    assert [entry.name for entry in (path / "attempts" / "1").iterdir()] != []
    assert len(list(path.glob("result*"))) == len(list(path.glob("metrics*"))) == 1
    assert sorted(entry.name for entry in (path / "attempts" / "1").glob("log*")) == [
        "log.rank1.txt",
        "log.txt",
    ]
    writers = {entry.name.rsplit(".", 2)[1] for entry in path.glob("events.out.*")}
    assert len(writers) == 1, "one process's event files"


def test_logits_between_0_and_1_are_not_taken_for_probabilities() -> None:
    """All logits of one rank may lie in this range although those of the batch do not."""
    logits = torch.tensor([[0.1, 0.9], [0.2, 0.3], [-0.5, 0.4]])
    targets = torch.tensor([1, 0, 1])
    single, parts = Calibration(2, n_bins=15), Calibration(2, n_bins=15)
    single.update(logits, targets)
    for row in range(3):
        parts.update(logits[row : row + 1], targets[row : row + 1])
    torch.testing.assert_close(parts.compute(), single.compute())
