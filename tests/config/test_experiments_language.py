"""The published language set-ups train with all of their keys, on tiny data and tiny models."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.paths import ROOT
from helpers.shipped import shipped_matrix, shipped_studies
from helpers.training_cells import cell_of, folder_of

from lit_attn.attention.spec import PRESETS
from lit_attn.cells.records import Result
from lit_attn.config.cell import Cell
from lit_attn.models import factory
from lit_attn.schema.plugins import load_parts
from lit_attn.schema.yaml_text import parse_plain
from lit_attn.train import run_cell

pytestmark = pytest.mark.slow

LANGUAGE = [
    name
    for name, source in shipped_studies().items()
    if str(source.experiment.get("task")) in ("language-modelling", "sequence-classification")
]

MODEL = {"dim": 16, "depth": 2, "heads": 2}
DATA = {"context": 8, "batch_size": 4, "eval_batch_size": 8, "epoch_steps": 2}
STREAM = {**DATA, "accumulate": 2, "eval_tokens": 40}


def shards(folder: Path, vocabulary: int) -> None:
    drawn = np.random.default_rng(0)
    for split in ("train", "val", "test"):
        drawn.integers(vocabulary, size=120, dtype=np.uint16).tofile(folder / f"{split}.bin")


def documents(folder: Path, texts: int) -> None:
    text = "\t".join(["some text"] * texts)
    for split in ("train", "val", "test"):
        (folder / f"{split}.tsv").write_text(f"1\t{text}\n0\t{text}\n" * 5)


def tiny(name: str, folder: Path, **changes: dict[str, Any]) -> Cell:
    """Return a cell of `experiments/<name>` with changed sections and a proportional schedule."""
    experiment = parse_plain((ROOT / "experiments" / name).read_text(), "text")
    experiment["data"] |= {"folder": str(folder)} if "folder" in experiment["data"] else {}
    for section, values in changes.items():
        experiment[section] |= values
    share = 2 / experiment["training"]["epochs"]
    for key in ("warmup", "warmdown"):
        if key in experiment.get("schedule", {}):
            experiment["schedule"][key] *= share
    short = {"epochs": 2, "evaluate_every": 1, "accelerator": "cpu", "compile": "none"}
    experiment["training"] |= short
    return cell_of(experiment, metric={"name": "val/loss", "goal": "min", "scale": 1})


def train(cell: Cell, root: Path) -> dict[str, float]:
    folder = folder_of(cell, root)
    run_cell(folder)
    return Result.model_validate_json((folder / "result.json").read_text()).metrics


@pytest.mark.parametrize(
    ("name", "vocabulary"),
    [("gpt2/fineweb", 50_257), ("gpt2/openwebtext", 50_257), ("pile_dcmha/405m", 50_257)],
)
def test_language_models_train(name: str, vocabulary: int, tmp_path: Path) -> None:
    shards(tmp_path, vocabulary)
    load_parts([ROOT / "experiments" / "gpt2" / "e5m2_weights.py"])
    model = {**MODEL, "ffn": {"width": 16, "activation": "gelu"}}
    if name == "pile_dcmha/405m":
        model["ffn"] = {"width": 16, "activation": "swiglu"}
    metrics = train(tiny(f"{name}.yaml", tmp_path, data=STREAM, model=model), tmp_path)
    assert metrics["val/loss"] == pytest.approx(np.log(vocabulary), rel=0.2)


def test_the_experiment_that_measures_speed_trains(tmp_path: Path) -> None:
    model = {**MODEL, "ffn": {"width": 16, "activation": "swiglu"}}
    cell = tiny("pile_dcmha/overhead.yaml", tmp_path, data=STREAM, model=model)
    metrics = train(cell, tmp_path)
    assert metrics["train/tokens_per_second"] > 0
    # Its head has as many rows as GPT-2's for the 256 bytes that there are.
    assert metrics["val/loss"] == pytest.approx(np.log(50_304), rel=0.2)


def test_the_model_of_wikitext_trains(tmp_path: Path) -> None:
    shards(tmp_path, 60)
    data = {**STREAM, "tokenizer": {"kind": "words", "size": 60}}
    model = {**MODEL, "head_dim": 4, "ffn": {"width": 16, "activation": "relu"}}
    model["cutoffs"] = [20, 40]
    recipe = ROOT / "experiments" / "wikitext103_mgk"
    load_parts([recipe / "transformer_xl_schedule.py", recipe / "reversed_positions.py"])
    cell = tiny("wikitext103_mgk/experiment.yaml", tmp_path, data=data, model=model)
    assert cell.experiment.data.eval_stride == 1
    # One of 20 words and two classes, and in two thirds of the cases one of the class's 20 words.
    expected = 22 * 20 ** (2 / 3)
    assert train(cell, tmp_path)["val/perplexity"] == pytest.approx(expected, rel=0.4)


@pytest.mark.parametrize(
    ("name", "data"),
    [
        (
            "long_range_arena/listops",
            {"lengths": [5, 8], "depth": 3, "train": 8, "val": 8, "test": 8},
        ),
        ("long_range_arena/text", {"max_tokens": 6}),
        ("long_range_arena/retrieval", {"max_tokens": 6}),
    ],
)
def test_sequence_classifiers_train(name: str, data: dict[str, Any], tmp_path: Path) -> None:
    documents(tmp_path, 2 if name == "long_range_arena/retrieval" else 1)
    attention = PRESETS["smgk"].model_dump(mode="json")
    model = {**MODEL, "head_dim": 4, "ffn": {"width": 16}, "attention": attention}
    metrics = train(tiny(f"{name}.yaml", tmp_path, data={**DATA, **data}, model=model), tmp_path)
    assert 0 <= metrics["test/accuracy"] <= 1
    assert metrics["val/loss"] == pytest.approx(
        np.log(10 if name == "long_range_arena/listops" else 2), rel=0.5
    )


@pytest.mark.parametrize("name", LANGUAGE)
def test_every_cell_of_a_language_study_is_a_model(name: str) -> None:
    matrix = shipped_matrix(name)
    # The variants of `match: time` exist only after a measurement.
    for variant in matrix.written:
        data = variant.experiment.data
        model = factory.resolve(variant.experiment.model, variant.match_to, data)
        assert factory.count(factory.build(model, data, device="meta")) > 10_000
    # Table 10 of DCMHA compares composed models with each other, Table 2 of MGK linear ones.
    others = ("dcmha-pythia-steps", "mgk-listops-fp32")
    is_standard = matrix.written[0].experiment.model.attention == PRESETS["standard"]
    assert is_standard == (name not in others), "the baseline comes first"
