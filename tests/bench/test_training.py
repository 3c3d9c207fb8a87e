"""A training step of this package is measured beside a plain loop of the same model."""

import os
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.tables import read_table
from torch import Tensor

from lit_attn.bench import step_parts
from lit_attn.bench.__main__ import main
from lit_attn.bench.training import WARM_UP
from lit_attn.schema.yaml_text import format_yaml
from lit_attn.tasks import optimizing
from lit_attn.tasks.classification import Classification

DRIVER_CHECK = "PYTORCH_NVML_BASED_CUDA_CHECK"

EXPERIMENT = {
    "data": {"kind": "digits", "batch_size": 16, "augment": ["normalize"]},
    "model": {"kind": "vit", "dim": 8, "depth": 1, "heads": 2, "patch": 4, "ffn": {"width": 8}},
    "optimizer": {"kind": "adamw", "lr": 0.001},
    "training": {"epochs": 1, "clip": 1.0},
}


def test_both_loops_make_the_same_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(DRIVER_CHECK, "1")
    losses: list[float] = []
    searches: list[object] = []
    compute = Classification.loss
    search = optimizing.find_learners

    def note_loss(task: Classification, batch: Tensor) -> Tensor:
        loss = compute(task, batch)
        losses.append(loss.item())
        return loss

    def note_search(network: object) -> list[object]:
        searches.append(network)
        return search(network)

    monkeypatch.setattr(Classification, "loss", note_loss)
    monkeypatch.setattr(optimizing, "find_learners", note_search)
    # Three steps do not decide which parts are the largest.
    monkeypatch.setattr(step_parts, "MOST_CAUSES", 100)
    file = tmp_path / "small.yaml"
    file.write_text(format_yaml(EXPERIMENT))
    arguments = ["training", str(file), "--steps", "3", "--rounds", "2", "--device", "cpu"]
    handler = signal.getsignal(signal.SIGTERM)
    assert main([*arguments, "--out", str(tmp_path)]) == 0
    assert signal.getsignal(signal.SIGTERM) is handler
    forward_passes = WARM_UP + 3
    # Two rounds of both loops for the times, and two for the parts of a step.
    assert len(losses) == 2 * 2 * 2 * forward_passes
    # Both start from the same weights and the same batch.
    assert losses[0] == losses[forward_passes]
    assert len(searches) == 1
    # Lightning's "1" would search the disk for the library of a driver in each step.
    assert os.environ[DRIVER_CHECK] == ("1" if torch.cuda.is_available() else "0")
    (row,) = read_table(tmp_path / "training-cpu.csv")
    assert row["experiment"] == "small"
    assert float(row["step"]) > 0
    assert float(row["plain"]) > 0
    causes = {row["part"]: row for row in read_table(tmp_path / "training-causes-cpu.csv")}
    # Parts of the plain loop, parts that only a cell has, and callbacks of a cell.
    assert float(causes["step of the optimiser"]["plain"]) > 0
    assert float(causes["Lightning's loop"]["plain"]) == 0
    assert float(causes["running means of the epoch"]["step"]) > 0
    assert any(part.startswith("callback ") for part in causes)


@pytest.mark.gpu
def test_a_classifier_is_measured_on_a_gpu(tmp_path: Path) -> None:
    """The plain loop moves the running mean of the accuracy to the GPU too."""
    file = tmp_path / "small.yaml"
    file.write_text(format_yaml(EXPERIMENT))
    arguments = ["training", str(file), "--steps", "3", "--rounds", "2", "--device", "cuda"]
    assert main([*arguments, "--out", str(tmp_path)]) == 0
    (row,) = read_table(tmp_path / "training-cuda.csv")
    assert float(row["ratio"]) > 0


def test_a_language_model_without_test_data_is_measured(tmp_path: Path) -> None:
    """GPT-2's shards have no split test, and no accuracy."""
    for split in ("train", "val"):
        tokens = np.arange(256, dtype=np.uint16) % 50
        tokens.tofile(tmp_path / f"{split}.bin")
    experiment = {
        "task": "language-modelling",
        "data": {
            "kind": "shards",
            "name": "counted",
            "folder": str(tmp_path),
            "context": 8,
            "batch_size": 2,
            "eval_tokens": 64,
        },
        "model": {"kind": "gpt", "dim": 8, "depth": 1, "heads": 2, "ffn": {"width": 8}},
        "optimizer": {"kind": "adamw", "lr": 0.001},
        "training": {"epochs": 1},
    }
    file = tmp_path / "gpt.yaml"
    file.write_text(format_yaml(experiment))
    arguments = ["training", str(file), "--steps", "2", "--rounds", "2", "--device", "cpu"]
    assert main([*arguments, "--out", str(tmp_path)]) == 0
    (row,) = read_table(tmp_path / "training-cpu.csv")
    assert row["experiment"] == "gpt"


def test_an_experiment_with_a_mistake_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "wrong.yaml"
    file.write_text(format_yaml({**EXPERIMENT, "model": {"kind": "vitt"}}))
    assert main(["training", str(file)]) == 2
    assert "vitt" in capsys.readouterr().err
