"""A training step of this package is measured beside a plain loop of the same model."""

import csv
from pathlib import Path

import pytest
import yaml
from torch import Tensor

from lit_attn.bench.__main__ import main
from lit_attn.bench.training import WARM_UP
from lit_attn.tasks import base
from lit_attn.tasks.classification import Classification

EXPERIMENT = {
    "data": {"kind": "digits", "batch_size": 16, "augment": ["normalize"]},
    "model": {"kind": "vit", "dim": 8, "depth": 1, "heads": 2, "patch": 4, "ffn": {"width": 8}},
    "optimizer": {"kind": "adamw", "lr": 0.001},
    "training": {"epochs": 1, "clip": 1.0},
}


def test_both_loops_make_the_same_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    losses: list[float] = []
    searches: list[object] = []
    compute = Classification.loss
    search = base.find_learners

    def note_loss(task: Classification, batch: Tensor) -> Tensor:
        loss = compute(task, batch)
        losses.append(loss.item())
        return loss

    def note_search(network: object) -> list[object]:
        searches.append(network)
        return search(network)

    monkeypatch.setattr(Classification, "loss", note_loss)
    monkeypatch.setattr(base, "find_learners", note_search)
    file = tmp_path / "small.yaml"
    file.write_text(yaml.safe_dump(EXPERIMENT))
    arguments = ["training", str(file), "--steps", "3", "--rounds", "2", "--device", "cpu"]
    assert main([*arguments, "--out", str(tmp_path)]) == 0
    forward_passes = WARM_UP + 3
    assert len(losses) == 2 * 2 * forward_passes
    # Both start from the same weights and the same batch.
    assert losses[0] == losses[forward_passes]
    assert len(searches) == 1
    with (tmp_path / "training-cpu.csv").open() as table:
        [row] = csv.DictReader(table)
    assert row["experiment"] == "small"
    assert float(row["step"]) > 0
    assert float(row["plain"]) > 0


def test_an_experiment_with_a_mistake_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "wrong.yaml"
    file.write_text(yaml.safe_dump({**EXPERIMENT, "model": {"kind": "vitt"}}))
    assert main(["training", str(file)]) == 2
    assert "vitt" in capsys.readouterr().err
