"""Training that starts from the weights of a trained model.

A registered model stays registered, so the commands run in processes of their own.
"""

from pathlib import Path
from subprocess import CompletedProcess

import pytest
import torch
from helpers.commands import run_python
from helpers.finished_cells import read_weights
from helpers.language_models import train_model
from helpers.paths import EXPERIMENTS
from helpers.training_cells import SMALL_TEXT

from lit_attn.schema.yaml_text import format_yaml


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_model(tmp_path_factory.mktemp("models"), attention={})


def write_study(folder: Path, trained: Path, **model: object) -> Path:
    """Write a study that finetunes the model in `trained`, also with DCMHA and Belief2."""
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
    (folder / "experiment.yaml").write_text(format_yaml(experiment))
    study = {
        "title": "Finetuning",
        "experiment": "experiment.yaml",
        "parts": [str(EXPERIMENTS / "released" / "finetuned_gpt.py")],
        "seeds": 1,
        "cells": {
            "standard": {"attention": "standard"},
            "dcmha": {"attention": "dcmha"},
            "belief2": {"attention": {"preset": "belief2", "residual": {"init": "copy"}}},
        },
        "baseline": "standard",
        "match": "none",
        "metric": {"name": "test/loss"},
    }
    path = folder / "studies.yaml"
    path.write_text(format_yaml({"studies": {"tenth": study}}))
    return path


def run(folder: Path, file: Path, *options: str) -> CompletedProcess[str]:
    return run_python(folder, "-m", "lit_attn.ablate", str(file), "--jobs=1", *options)


@pytest.mark.process
def test_finetuning_starts_with_the_trained_weights(trained: Path, tmp_path: Path) -> None:
    """A tiny rate leaves the weights where they started; the composition starts anew.

    W_p of Belief2 starts as a copy of the trained W.
    """
    done = run(tmp_path, write_study(tmp_path, trained))
    assert done.returncode == 0, done.stderr + done.stdout
    before = read_weights(trained)
    parts = {"standard": (), "dcmha": (".composers.",), "belief2": (".residual.", ".z.")}
    for variant, fresh_parts in parts.items():
        (folder,) = (tmp_path / "runs" / "tenth" / variant).glob("0-*")
        after = read_weights(folder)
        for name, value in before.items():
            assert torch.allclose(after[name], value, atol=1e-6), (variant, name)
        fresh = after.keys() - before.keys()
        assert all(any(part in name for part in fresh_parts) for name in fresh)
        assert bool(fresh) == (variant != "standard")
        if variant == "belief2":
            copied = after["trunk.blocks.1.attn.residual.projected.weight"]
            torch.testing.assert_close(copied, before["trunk.blocks.1.attn.proj.weight"])


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


GPT2_CHECK = """
import sys
from pathlib import Path

import torch
import transformers

from lit_attn.signatures import CausalTokens
from lit_attn.schema.plugins import load_parts

scripts = Path(sys.argv[1])
load_parts([scripts / "released_weights.py", scripts / "finetuned_gpt.py"])
import finetuned_gpt
import released_weights

sizes = {"vocab_size": 60, "n_positions": 32, "n_embd": 48, "n_layer": 2, "n_head": 3}
theirs = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes))
with torch.no_grad():
    for parameter in theirs.parameters():
        parameter.add_(torch.randn_like(parameter), alpha=0.2)
theirs.save_pretrained("gpt2")
released_weights.convert(Path("gpt2"), Path("converted"))
residual = {"activation": "identity", "init": "copy", "scope": sys.argv[2]}
config = finetuned_gpt.FinetunedGPTConfig(
    start_from=Path("converted"),
    dim=48,
    depth=2,
    heads=3,
    norm="layernorm",
    bias="all",
    ffn={"width": 192, "activation": "gelu-tanh"},
    attention={"preset": "belief2", "zz": False, "residual": residual},
)
ours = config.build(CausalTokens(vocabulary=60, context=32)).double().eval()
tokens = torch.randint(60, (2, 20))
expected = theirs.double().eval()(tokens).logits
torch.testing.assert_close(ours(tokens), expected, rtol=1e-10, atol=1e-10)
"""


@pytest.mark.process
@pytest.mark.parametrize("scope", ["global", "both"])
def test_belief2_starts_from_gpt2_with_its_logits(tmp_path: Path, scope: str) -> None:
    (tmp_path / "check.py").write_text(GPT2_CHECK)
    done = run_python(tmp_path, "check.py", str(EXPERIMENTS / "released"), scope)
    assert done.returncode == 0, done.stderr
