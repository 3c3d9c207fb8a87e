"""One cell: its records, its evaluations, and all of its exit codes."""

import contextlib
import json
import math
import os
import socket
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.commands import run_python, start_python
from helpers.finished_cells import read_weights, train_cell
from helpers.paths import ROOT
from helpers.training_cells import accuracy_at, digits_cell, folder_of, result_of
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.plugin_event_multiplexer import EventMultiplexer
from torch import nn

from lit_attn.cells.failure import Diverged
from lit_attn.cells.lock import hold_lock
from lit_attn.cells.rows import MetricRow, read_metrics
from lit_attn.models import factory
from lit_attn.optim.schedules import Rate, Schedule
from lit_attn.tasks.base import TaskModule
from lit_attn.tasks.metrics import DEFAULT_METRIC
from lit_attn.train import main, run_cell
from lit_attn.training.selection import select_epoch


@pytest.mark.process
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_one_cycle_sets_the_momentum_of_every_step(
    optimizer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = []

    def record(self: TaskModule, optimizer: torch.optim.Optimizer) -> None:
        set_rate(self, optimizer)
        (group, *_) = optimizer.param_groups
        steps.append(group["betas"][0] if "betas" in group else group["momentum"])

    set_rate = TaskModule.on_before_optimizer_step
    monkeypatch.setattr(TaskModule, "on_before_optimizer_step", record)
    schedule = {"kind": "one-cycle", "warmup": 1.25}
    changes = {"optimizer": {"kind": optimizer}, "schedule": schedule, "training": {"epochs": 3}}
    run_cell(folder_of(digits_cell(**changes), tmp_path))
    # 12 steps: down over 5 - 1 steps, up over the other 7.
    down = [0.95 - 0.1 * step / 4 for step in range(4)]
    up = [0.85 + 0.1 * step / 7 for step in range(8)]
    assert steps == pytest.approx(down + up)


@pytest.mark.process
@pytest.mark.parametrize("keeps_constants", [False, True])
def test_a_schedule_changes_the_weight_decay_of_every_step(
    keeps_constants: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = []

    def record(self: TaskModule, optimizer: torch.optim.Optimizer) -> None:
        for group in optimizer.param_groups:
            group["keeps_constants"] = keeps_constants
        set_values(self, optimizer)
        steps.append(optimizer.param_groups[0]["weight_decay"])

    def decay(self: Schedule, steps_per_epoch: int, epochs: int) -> Rate:
        total = steps_per_epoch * epochs
        return lambda step: 1 - step / total

    set_values = TaskModule.on_before_optimizer_step
    monkeypatch.setattr(TaskModule, "on_before_optimizer_step", record)
    monkeypatch.setattr(Schedule, "weight_decay", decay)
    changes = {
        "optimizer": {"kind": "adamw", "weight_decay": 0.24},
        "training": {"epochs": 3},
    }
    run_cell(folder_of(digits_cell(**changes), tmp_path))
    falling = [0.24 - 0.02 * step for step in range(12)]
    assert steps == pytest.approx([0.24] * 12 if keeps_constants else falling)


def test_a_finished_cell_has_a_complete_record(uninterrupted: Path) -> None:
    result = result_of(uninterrupted)
    assert result.identity == digits_cell().fingerprint
    assert (result.steps, result.epochs, result.selected_epoch) == (12, 3, 2)
    assert {"test/accuracy", "val/accuracy", "test/loss", "train/loss"} <= result.metrics.keys()
    assert 0 < result.metrics["test/accuracy"] <= result.metrics["test/top5"] <= 1
    assert result.parameters == sum(w.numel() for w in read_weights(uninterrupted).values())
    assert result.flops > 0
    assert result.step_time.median > 0
    assert result.peak_memory > 10**7
    assert not (uninterrupted / "tmp").exists()
    assert list((uninterrupted / "checkpoints").glob("step-*")) == []
    assert any("tfevents" in path.name for path in uninterrupted.iterdir())
    progress = json.loads((uninterrupted / "progress.json").read_text())
    assert (progress["step"], progress["total"]) == (12, 12)
    assert progress["step_time"] == pytest.approx(result.step_time.median, abs=1)
    assert (result.devices, result.batch_size) == (1, 256)


@pytest.mark.process
def test_every_epoch_prints_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Lightning's own messages stay silent; the end within an epoch is evaluated and has a line."""
    folder = train_cell(digits_cell(training={"max_steps": 6}), tmp_path)
    captured = capsys.readouterr()
    first, second = captured.out.splitlines()
    assert first.startswith("epoch 1/2  step 4/6  val/loss ")
    assert second.startswith("epoch 2/2  step 6/6  ")
    for line in (first, second):
        assert {"train/loss", "val/loss", "test/loss", "test/accuracy"} <= set(line.split())
    assert captured.err == ""
    assert accuracy_at(folder) == [(4, 0), (6, 1)]
    result = result_of(folder)
    assert (result.steps, result.selected_epoch, result.epochs) == (6, 1, 2)


@pytest.mark.process
def test_a_terminal_shows_a_progress_bar(tmp_path: Path) -> None:
    folder = folder_of(digits_cell(), tmp_path)
    parent, child = os.openpty()
    words = ("-m", "lit_attn.train", str(folder))
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with start_python(tmp_path, words, environment, child, err=2) as process:
        os.close(child)
        output = b""
        # Reading a terminal whose other end is closed is an error.
        with contextlib.suppress(OSError):
            while part := os.read(parent, 4096):
                output += part
    os.close(parent)
    assert process.returncode == 0
    # Before the first step, which may take long.
    assert output.startswith(f"{folder}: reading the data and building the model\r\n".encode())
    assert b"\r\x1b[K[########################] step 12/12, " in output
    assert b"\r\x1b[Kepoch 3/3  step 12/12  " in output


def test_the_metrics_file_has_every_epoch(uninterrupted: Path) -> None:
    rows = read_metrics(uninterrupted / "metrics.csv")
    assert accuracy_at(uninterrupted) == [(4, 0), (8, 1), (12, 2)]
    assert [row.step for row in rows if row.name == "train/loss"] == [4, 8, 12]


def test_tensorboard_has_the_curves_and_settings_of_a_run_with_the_name_of_its_folder(
    uninterrupted: Path,
) -> None:
    """Each cell below the folder is one run."""
    runs = EventMultiplexer().AddRunsFromDirectory(str(uninterrupted.parents[1])).Reload()
    assert set(runs.Runs()) == {f"v/{uninterrupted.name}"}
    events = EventAccumulator(str(uninterrupted)).Reload()
    assert {event.step for event in events.Scalars("val/loss")} == {4, 8, 12}
    settings = events.PluginTagToContent("hparams")["_hparams_/session_start_info"]
    assert b"model/attention/residual/kind" in settings


@pytest.mark.process
def test_the_end_of_training_is_always_evaluated(tmp_path: Path) -> None:
    folder = train_cell(digits_cell(training={"evaluate_every": 2}), tmp_path)
    assert accuracy_at(folder) == [(8, 1), (12, 2)]
    result = result_of(folder)
    assert (result.steps, result.selected_epoch, result.epochs) == (12, 2, 3)


@pytest.mark.process
@pytest.mark.parametrize("evaluation", ["fp32", "as-training"])
def test_half_precision_on_a_cpu_is_the_configured_one(
    evaluation: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lightning itself would compute in bf16 for fp16 on a CPU."""
    observed = []

    def looking(self: nn.Linear, x: torch.Tensor) -> torch.Tensor:
        out = nn.functional.linear(x, self.weight, self.bias)
        # FLOPs are counted on the meta device in float32.
        if not out.is_meta:
            observed.append((self.training, out.dtype))
        return out

    monkeypatch.setattr(nn.Linear, "forward", looking)
    for precision, dtype in (("fp16", torch.float16), ("bf16", torch.bfloat16)):
        training = {"precision": precision, "evaluation": evaluation}
        folder = folder_of(digits_cell(training=training), tmp_path / precision)
        run_cell(folder, smoke=True)
        evaluated = dtype if evaluation == "as-training" else torch.float32
        assert set(observed) == {(True, dtype), (False, evaluated)}
        observed.clear()


@pytest.mark.process
def test_a_non_finite_loss_stops_training_before_the_update(tmp_path: Path) -> None:
    folder = folder_of(digits_cell(optimizer={"lr": 1e30}, schedule={"warmup": 0}), tmp_path)
    with pytest.raises(Diverged, match="loss is nan at step 1"):
        run_cell(folder)
    assert not (folder / "result.json").exists()


@pytest.mark.process
def test_evaluation_detects_a_last_update_that_diverges(tmp_path: Path) -> None:
    changes: dict[str, Any] = {"optimizer": {"lr": 1e30}, "schedule": {"warmup": 0}}
    folder = folder_of(digits_cell(**changes, training={"max_steps": 1}), tmp_path)
    with pytest.raises(Diverged, match="loss is nan after step 1"):
        run_cell(folder)
    assert not (folder / "result.json").exists()


@pytest.mark.process
def test_every_step_has_the_rate_of_its_schedule(tmp_path: Path) -> None:
    """The first step of a warm-up from zero moves no weight, and the second moves all."""
    cells = [digits_cell(training={"max_steps": steps}, seed=3) for steps in (1, 2)]
    after_one, after_two = (read_weights(train_cell(cell, tmp_path)) for cell in cells)
    torch.manual_seed(3)
    model, data = cells[0].experiment.model, cells[0].experiment.data
    start = factory.build(model, data).state_dict()
    assert all(torch.equal(start[name], value) for name, value in after_one.items())
    assert not any(torch.equal(start[name], value) for name, value in after_two.items())


@pytest.mark.process
def test_different_seeds_differ_and_smoke_is_one_step(uninterrupted: Path, tmp_path: Path) -> None:
    folder = folder_of(digits_cell(seed=1), tmp_path)
    run_cell(folder, smoke=True)
    result = result_of(folder)
    assert result.steps == 1
    others = read_weights(uninterrupted)
    assert not all(torch.equal(value, others[name]) for name, value in read_weights(folder).items())


@pytest.mark.process
def test_the_selected_epoch_is_the_last_or_the_best_on_validation() -> None:
    rows = [
        MetricRow(1, 0, "val/accuracy", 0.9),
        MetricRow(1, 0, "test/accuracy", 0.5),
        MetricRow(2, 1, "val/accuracy", 0.8),
        MetricRow(2, 1, "test/accuracy", 0.99),
    ]
    best = DEFAULT_METRIC.model_copy(update={"selection": "best-validation"})
    assert {row.epoch for row in select_epoch(rows, DEFAULT_METRIC)} == {1}
    assert {row.epoch for row in select_epoch(rows, best)} == {0}
    # A cell that was continued has evaluated its last step twice: the later row counts.
    repeated = [MetricRow(2, 1, "test/accuracy", math.nan), *rows]
    assert {row.epoch for row in select_epoch(repeated, DEFAULT_METRIC)} == {1}


@pytest.mark.process
def test_the_values_of_samples_belong_to_the_selected_epoch(tmp_path: Path) -> None:
    """The learning rate makes the second of three epochs the best one on the validation split."""
    changes = {"name": "test/averaged-accuracy", "selection": "best-validation"}
    metric = DEFAULT_METRIC.model_dump() | changes
    cell = digits_cell(metric=metric, optimizer={"lr": 0.1}, training={"average": {"decay": 0.5}})
    folder = train_cell(cell, tmp_path)
    result = result_of(folder)
    assert result.selected_epoch == 1
    with np.load(folder / "units.npz") as units:
        assert len(units["test/averaged-correct"]) == 360
        for split in ("val/", "val/averaged-", "test/", "test/averaged-"):
            targets = units[f"{split}targets"].sum()
            correct = units[f"{split}correct"].sum() / targets
            assert correct == pytest.approx(result.metrics[f"{split}accuracy"])
            loss = units[f"{split}loss"].sum(dtype=float) / targets
            assert loss == pytest.approx(result.metrics[f"{split}loss"], rel=1e-5)


@pytest.mark.process
def test_a_study_can_compare_the_time_of_an_evaluation(tmp_path: Path) -> None:
    metric = {**DEFAULT_METRIC.model_dump(), "name": "evaluation/seconds", "goal": "min"}
    folder = train_cell(digits_cell(metric=metric), tmp_path)
    assert result_of(folder).metrics["evaluation/seconds"] > 0
    assert (folder / "units.npz").exists()


@pytest.mark.process
def test_exit_codes_describe_the_end_of_a_cell(
    tmp_path: Path, uninterrupted: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(uninterrupted)]) == 0
    assert "has a result already" in capsys.readouterr().out
    assert main([str(tmp_path)]) == 2
    assert "config.yaml: cannot be read" in capsys.readouterr().err
    diverging = digits_cell(optimizer={"lr": 1e30}, schedule={"warmup": 0})
    assert main([str(folder_of(diverging, tmp_path))]) == 1
    missing = {"kind": "npz", "name": "n", "path": str(tmp_path / "n.npz"), "size": 8, "classes": 2}
    impossible = folder_of(digits_cell(data=missing), tmp_path)
    assert main([str(impossible)]) == 2
    assert "n.npz: cannot be read" in capsys.readouterr().err
    with hold_lock(impossible):
        assert main([str(impossible)]) == 75
        assert f"process {os.getpid()} on {socket.gethostname()} runs" in capsys.readouterr().err


@pytest.mark.process
def test_a_cell_ignores_a_slurm_allocation_around_it(tmp_path: Path) -> None:
    """The tasks and nodes of `salloc` or `sbatch` are not the ranks of the cell."""
    folder = folder_of(digits_cell(training={"devices": 2, "max_steps": 1}), tmp_path)
    slurm = {"NTASKS": "4", "NTASKS_PER_NODE": "4", "NNODES": "2", "JOB_NAME": "mine"}
    slurm |= {"PROCID": "0", "LOCALID": "0", "NODEID": "0"}
    variables = {f"SLURM_{name}": value for name, value in slurm.items()}
    done = run_python(tmp_path, "-m", "lit_attn.train", str(folder), **variables)
    assert done.returncode == 0, done.stderr
    assert result_of(folder).devices == 2
