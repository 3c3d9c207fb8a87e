"""Checkpoints of a cell: exact continuation, damaged files, and kills at bad moments."""

import os
import signal
import time
from pathlib import Path
from typing import Any

import lightning as L
import pytest
from helpers.finished_cells import assert_same, train_cell
from helpers.stopping import run_until, stop_at
from helpers.training_cells import digits_cell, folder_of, result_of

from lit_attn.cells.failure import Preempted
from lit_attn.cells.records import Result
from lit_attn.train import run_cell
from lit_attn.training import checkpoints
from lit_attn.training.recording import Progress


# At an epoch's end, twice within an epoch, right after going on, and at the end of the next one.
@pytest.mark.parametrize("stops", [(4, 6, 7), (3, 8, 9)])
def test_resume_is_exact(stops: tuple[int, ...], uninterrupted: Path, tmp_path: Path) -> None:
    folder = folder_of(digits_cell(), tmp_path)
    for step in stops:
        run_until(step, folder)
    assert not (folder / "result.json").exists()
    run_cell(folder)
    assert_same(folder, uninterrupted)


@pytest.mark.process
def test_a_second_sigterm_does_not_prevent_the_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The runner signals the process group, and the cell's first process signals its ranks. On a
    busy machine a step may last longer than the time between the two."""
    folder = folder_of(digits_cell(), tmp_path)
    monkeypatch.setattr(os, "_exit", lambda code: pytest.fail(f"went with {code}, and saved none"))
    original, clock = Progress.on_train_batch_end, time.monotonic

    def stopping(self: Any, trainer: L.Trainer, *arguments: Any) -> None:
        original(self, trainer, *arguments)
        if trainer.global_step == 5:
            os.kill(os.getpid(), signal.SIGTERM)
            monkeypatch.setattr(time, "monotonic", lambda: clock() + 60)
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(Progress, "on_train_batch_end", stopping)
    with pytest.raises(Preempted, match="saved at step 5"):
        run_cell(folder)
    assert [path.name for path in folder.glob("checkpoints/*")] == ["step-000000005.ckpt"]


@pytest.mark.process
@pytest.mark.parametrize(
    "changes",
    [
        {"data": {"batch_size": 1000}, "optimizer": {"kind": "muon", "lr": 1e-2}},
        {"training": {"precision": "fp16"}, "optimizer": {"kind": "set-adam", "lr": 1e-3}},
        {
            "training": {"precision": "bf16", "clip": 0.5, "evaluate_every": 2},
            "data": {"augment": ["normalize"]},
        },
    ],
    ids=["one step an epoch, two optimisers", "scaled gradients", "clipped gradients"],
)
def test_resume_is_exact_in_every_setting(changes: dict[str, Any], tmp_path: Path) -> None:
    reference = train_cell(digits_cell(**changes), tmp_path / "a")
    folder = folder_of(digits_cell(**changes), tmp_path / "b")
    run_until(2, folder)
    run_cell(folder)
    assert_same(folder, reference)
    is_unmixed = "augment" in changes.get("data", {})
    assert ("train/accuracy" in result_of(folder).metrics) == is_unmixed


@pytest.mark.process
def test_a_cell_stopped_at_its_last_step_is_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = folder_of(digits_cell(), tmp_path)
    stop_at(monkeypatch, 12)
    run_cell(folder)
    assert (folder / "result.json").exists()


@pytest.mark.process
def test_a_torn_checkpoint_is_replaced_by_the_previous_one(
    uninterrupted: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = folder_of(digits_cell(training={"checkpoint_every": 1e-9}), tmp_path)
    run_until(6, folder)
    newest, older = sorted((folder / "checkpoints").glob("step-*.ckpt"), reverse=True)
    newest.write_bytes(newest.read_bytes()[:1000])
    run_cell(folder)
    assert f"{newest.name} does not load" in capsys.readouterr().out
    assert older.name == "step-000000005.ckpt"
    assert_same(folder, uninterrupted)


@pytest.mark.process
def test_a_cell_without_a_readable_checkpoint_starts_afresh(
    uninterrupted: Path, tmp_path: Path
) -> None:
    folder = folder_of(digits_cell(), tmp_path)
    (folder / "checkpoints").mkdir()
    (folder / "checkpoints" / "step-000000007.ckpt").write_bytes(b"")
    (folder / "tmp").mkdir()
    (folder / "tmp" / "half a checkpoint").write_bytes(b"left by a kill")
    run_cell(folder)
    assert_same(folder, uninterrupted)
    assert not (folder / "tmp").exists()


@pytest.mark.process
def test_a_kill_between_weights_and_result_loses_no_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = folder_of(digits_cell(training={"checkpoint_every": 1e-9}), tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(Result, "write", lambda *_: os.kill(os.getpid(), signal.SIGINT))
        with pytest.raises(KeyboardInterrupt):
            run_cell(folder)
    assert len(list((folder / "checkpoints").glob("step-*.ckpt"))) == checkpoints.KEEP


@pytest.mark.process
def test_a_checkpoint_that_was_not_written_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lightning exits with success if the checkpoint folder cannot be written."""
    monkeypatch.setattr(L.Trainer, "save_checkpoint", lambda *a, **k: None)
    folder = folder_of(digits_cell(training={"checkpoint_every": 1e-9}), tmp_path)
    with pytest.raises(OSError, match="was not written"):
        run_cell(folder)
