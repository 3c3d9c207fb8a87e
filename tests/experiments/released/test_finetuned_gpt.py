"""Training that starts from the weights of a trained model.

A registered model stays registered, so the commands run in processes of their own.
"""

from pathlib import Path
from subprocess import CompletedProcess

import pytest
import torch
import yaml
from helpers.commands import run_python
from helpers.language_models import train_model
from helpers.paths import EXPERIMENTS
from helpers.training_cells import SMALL_TEXT


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_model(tmp_path_factory.mktemp("models"), attention={})


def write_study(folder: Path, trained: Path, **model: object) -> Path:
    """Write a study that finetunes the model in `trained`, as it is and with DCMHA."""
    experiment = {
        "task": "language-modelling",
        "data": {**SMALL_TEXT, "epoch_steps": 1},
        "model": {
            "kind": "finetuned-gpt",
            "start_from": str(trained),
            "dim": 16,
            "depth": 2,
            "heads": 2,
            "ffn": {"width": 16},
            "positions": "rotary",
            **model,
        },
        "optimizer": {"kind": "adamw", "lr": 1e-9, "weight_decay": 0.0},
        "schedule": "constant",
        "training": {"epochs": 1, "accelerator": "cpu"},
    }
    (folder / "experiment.yaml").write_text(yaml.safe_dump(experiment))
    study = {
        "title": "Finetuning",
        "experiment": "experiment.yaml",
        "parts": [str(EXPERIMENTS / "released" / "finetuned_gpt.py")],
        "seeds": 1,
        "cells": {"standard": {"attention": "standard"}, "dcmha": {"attention": "dcmha"}},
        "baseline": "standard",
        "match": "none",
        "metric": {"name": "test/loss"},
    }
    path = folder / "studies.yaml"
    path.write_text(yaml.safe_dump({"studies": {"tenth": study}}))
    return path


def run(folder: Path, file: Path, *options: str) -> CompletedProcess[str]:
    return run_python(folder, "-m", "lit_attn.ablate", str(file), "--jobs=1", *options)


def read_weights(folder: Path) -> dict[str, torch.Tensor]:
    return torch.load(folder / "checkpoints" / "weights.pt", weights_only=True)


@pytest.mark.process
def test_finetuning_starts_with_the_trained_weights(trained: Path, tmp_path: Path) -> None:
    """A tiny rate leaves the weights where they started; the composition starts anew."""
    done = run(tmp_path, write_study(tmp_path, trained))
    assert done.returncode == 0, done.stderr + done.stdout
    before = read_weights(trained)
    for variant in ("standard", "dcmha"):
        (folder,) = (tmp_path / "runs" / "tenth" / variant).glob("0-*")
        after = read_weights(folder)
        for name, value in before.items():
            assert torch.allclose(after[name], value, atol=1e-6), (variant, name)
        fresh = after.keys() - before.keys()
        assert all(".composers." in name for name in fresh)
        assert bool(fresh) == (variant == "dcmha")


@pytest.mark.process
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dim": 32}, "does not fit this model: "),
        ({"start_from": "/nowhere"}, "model.start_from: /nowhere has no trained weights"),
    ],
)
def test_other_weights_are_one_line(
    trained: Path, tmp_path: Path, changes: dict[str, object], message: str
) -> None:
    done = run(tmp_path, write_study(tmp_path, trained, **changes))
    assert done.returncode != 0
    assert message in done.stderr + done.stdout
