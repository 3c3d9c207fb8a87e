"""One cell: its record, exact resume, and every way it can end."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from training_cells import digits_cell, folder_of

from lit_attn.config.errors import ConfigError
from lit_attn.errors import Diverged, Preempted
from lit_attn.records import Metric, MetricRow, Result, read_metrics
from lit_attn.tasks import checkpoints
from lit_attn.train import main, run_cell, selected


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return torch.load(folder / "checkpoints" / "weights.pt", weights_only=True)


def stop_at(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """SIGTERM to this process once training has made `step` steps."""
    original = checkpoints.Checkpoints.on_train_batch_end

    def stopping(self: Any, trainer: L.Trainer, *rest: Any) -> None:
        if trainer.global_step == step:
            os.kill(os.getpid(), signal.SIGTERM)
        original(self, trainer, *rest)

    monkeypatch.setattr(checkpoints.Checkpoints, "on_train_batch_end", stopping)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = folder_of(digits_cell(), tmp_path_factory.mktemp("whole"))
    run_cell(folder)
    return folder


def test_a_finished_cell_has_a_whole_record(uninterrupted: Path) -> None:
    result = Result.model_validate_json((uninterrupted / "result.json").read_text())
    assert result.identity == digits_cell().fingerprint
    assert (result.steps, result.epochs, result.selected_epoch) == (12, 3, 2)
    assert {"test/accuracy", "val/accuracy", "test/loss", "train/loss"} <= result.metrics.keys()
    assert 0 < result.metrics["test/accuracy"] <= result.metrics["test/top5"] <= 1
    assert result.parameters == sum(w.numel() for w in weights(uninterrupted).values())
    assert result.flops > 0
    assert result.step_time.median > 0
    assert result.peak_memory > 10**7
    assert list((uninterrupted / "tmp").iterdir()) == []
    assert list((uninterrupted / "checkpoints").glob("step-*")) == []
    assert any("tfevents" in path.name for path in uninterrupted.iterdir())
    assert json.loads((uninterrupted / "progress.json").read_text()) == {"step": 12, "total": 12}


def test_metrics_file_has_every_epoch(uninterrupted: Path) -> None:
    rows = read_metrics(uninterrupted / "metrics.csv")
    accuracy = [(row.step, row.epoch) for row in rows if row.name == "test/accuracy"]
    assert accuracy == [(4, 0), (8, 1), (12, 2)]
    assert [row.step for row in rows if row.name == "train/loss"] == [4, 8, 12]


@pytest.mark.parametrize(("step", "saved"), [(1, 1), (4, 5), (6, 6), (7, 7), (11, 11)])
def test_resume_is_exact(
    step: int, saved: int, uninterrupted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped mid-epoch, or at an epoch's last step and so one later: the same bits."""
    folder = folder_of(digits_cell(), tmp_path)
    with monkeypatch.context() as patch:
        stop_at(patch, step)
        with pytest.raises(Preempted, match=f"saved at step {saved}"):
            run_cell(folder)
    assert not (folder / "result.json").exists()
    run_cell(folder)
    whole, resumed = weights(uninterrupted), weights(folder)
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)
    csv = [(path / "metrics.csv").read_text() for path in (uninterrupted, folder)]
    assert csv[0] == csv[1]


def test_stopped_at_the_very_last_step_is_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = folder_of(digits_cell(), tmp_path)
    stop_at(monkeypatch, 12)
    run_cell(folder)
    assert (folder / "result.json").exists()


def test_a_torn_checkpoint_falls_back_to_the_one_before(
    uninterrupted: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = folder_of(digits_cell(training={"checkpoint_every": 1e-9}), tmp_path)
    with monkeypatch.context() as patch:
        stop_at(patch, 6)
        with pytest.raises(Preempted):
            run_cell(folder)
    newest, older = sorted((folder / "checkpoints").glob("step-*.ckpt"), reverse=True)
    newest.write_bytes(newest.read_bytes()[:1000])
    run_cell(folder)
    assert f"{newest.name} does not load" in capsys.readouterr().out
    assert older.name == "step-000000005.ckpt"
    whole, resumed = weights(uninterrupted), weights(folder)
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


def test_no_checkpoint_that_loads_means_a_fresh_start(uninterrupted: Path, tmp_path: Path) -> None:
    folder = folder_of(digits_cell(), tmp_path)
    (folder / "checkpoints").mkdir()
    (folder / "checkpoints" / "step-000000007.ckpt").write_bytes(b"")
    run_cell(folder)
    csv = [(path / "metrics.csv").read_text() for path in (uninterrupted, folder)]
    assert csv[0] == csv[1]


def test_a_loss_that_is_not_finite_stops_before_the_update(tmp_path: Path) -> None:
    folder = folder_of(digits_cell(optimizer={"lr": 1e30}, schedule={"warmup": 0}), tmp_path)
    with pytest.raises(Diverged, match="at step"):
        run_cell(folder)
    assert not (folder / "result.json").exists()


def test_a_checkpoint_that_was_not_written_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lightning ends with success where the checkpoint folder cannot be written."""
    monkeypatch.setattr(L.Trainer, "save_checkpoint", lambda *a, **k: None)
    folder = folder_of(digits_cell(training={"checkpoint_every": 1e-9}), tmp_path)
    with pytest.raises(OSError, match="was not written"):
        run_cell(folder)


def test_different_seeds_differ_and_smoke_is_one_step(uninterrupted: Path, tmp_path: Path) -> None:
    folder = folder_of(digits_cell(seed=1), tmp_path)
    run_cell(folder, smoke=True)
    result = Result.model_validate_json((folder / "result.json").read_text())
    assert result.steps == 1
    assert not all(
        torch.equal(a, b)
        for a, b in zip(weights(folder).values(), weights(uninterrupted).values(), strict=True)
    )


def test_the_last_epoch_or_the_best_on_validation_counts() -> None:
    rows = [
        MetricRow(1, 0, "val/accuracy", 0.9),
        MetricRow(1, 0, "test/accuracy", 0.5),
        MetricRow(2, 1, "val/accuracy", 0.8),
        MetricRow(2, 1, "test/accuracy", 0.99),
    ]
    assert {row.epoch for row in selected(rows, Metric())} == {1}
    assert {row.epoch for row in selected(rows, Metric(selection="best-validation"))} == {0}
    with pytest.raises(ConfigError, match="'test/loss' was not logged"):
        selected(rows, Metric(name="test/loss"))


def test_exit_codes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path)]) == 2
    assert "config.yaml: cannot be read" in capsys.readouterr().err
    diverging = digits_cell(optimizer={"lr": 1e30}, schedule={"warmup": 0})
    assert main([str(folder_of(diverging, tmp_path))]) == 1
    impossible = digits_cell(schedule={"warmup": 9})
    assert main([str(folder_of(impossible, tmp_path))]) == 2
    assert "warmup: 9" in capsys.readouterr().err


def test_help_imports_no_torch() -> None:
    code = "import sys, lit_attn.train; assert not {'torch', 'lightning'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
