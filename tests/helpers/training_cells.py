"""Small cells for the tests of training: real digits, a fixed text, head composition, scenes."""

from pathlib import Path
from typing import Any

from helpers.paths import DOCUMENTS, EXPERIMENTS
from lit_attn.cells.records import Result
from lit_attn.cells.rows import read_metrics
from lit_attn.config.cell import Cell
from lit_attn.schema.plugins import load_parts
from lit_attn.schema.yaml_text import parse_plain

COMPOSITION = EXPERIMENTS / "head_composition" / "head_composition.py"


def cell_of(experiment: dict[str, Any], **fields: Any) -> Cell:
    """Return the cell of an experiment; `fields` are its other keys, as `metric` and `parts`."""
    names = {"study": "t", "variant": "v", "seed": 0, "experiment": experiment}
    return Cell.model_validate(names | fields)


def digits_cell(**changes: Any) -> Cell:
    """Return a cell that trains in about a second; `changes` override the experiment's sections."""
    experiment: dict[str, Any] = {
        "data": {
            "kind": "digits",
            "batch_size": 256,
            "augment": [{"kind": "crop", "padding": 1}, "normalize", {"kind": "mix", "p": 0.5}],
        },
        "model": {
            "kind": "vit",
            "dim": 16,
            "depth": 2,
            "heads": 2,
            "patch": 2,
            "ffn": {"width": 16},
            "dropout": 0.1,
            "drop_path": 0.1,
        },
        "optimizer": {"kind": "adamw", "lr": 3e-3},
        "schedule": {"kind": "cosine", "warmup": 1},
        "training": {"epochs": 3, "accelerator": "cpu"},
    }
    top = {key: changes.pop(key) for key in ("seed", "metric", "match_to") if key in changes}
    for section, values in changes.items():
        experiment[section] = {**experiment[section], **values}
    return cell_of(experiment, study="test", **top)


SMALL_TEXT = {
    "kind": "text",
    "name": "design",
    "train": str(DOCUMENTS / "train.txt"),
    "test": str(DOCUMENTS / "test.txt"),
    "context": 16,
    "batch_size": 8,
}


def text_cell(**changes: Any) -> Cell:
    """Return a language-model cell that trains in about a second; `changes` override sections."""
    experiment: dict[str, Any] = {
        "task": "language-modelling",
        "data": {**SMALL_TEXT, "accumulate": 2, "epoch_steps": 4},
        "model": {
            "kind": "gpt",
            "dim": 16,
            "depth": 2,
            "heads": 2,
            "ffn": {"width": 16},
            "dropout": 0.1,
        },
        "optimizer": {"kind": "adamw", "lr": 1e-2},
        "schedule": {"kind": "trapezoid", "warmup": 1, "warmdown": 1},
        "training": {"epochs": 3, "accelerator": "cpu", "clip": 1.0},
    }
    for section, values in changes.items():
        experiment[section] = {**experiment[section], **values}
    metric = {"name": "test/loss", "label": "loss", "goal": "min", "scale": 1}
    return cell_of(experiment, metric=metric)


def composition_cell() -> Cell:
    """Return a cell of the shipped head-composition experiment with few questions."""
    load_parts([COMPOSITION])
    experiment = parse_plain(
        (EXPERIMENTS / "head_composition" / "experiment.yaml").read_text(), "text"
    )
    experiment["data"] |= {"eval_questions": 4, "batch_size": 64}
    return cell_of(experiment, metric={"name": "test/accuracy"}, parts=[str(COMPOSITION)])


def scenes_cell(root: Path, **changes: Any) -> Cell:
    """Return a segmentation cell that trains in a few seconds on scenes below `root`."""
    experiment: dict[str, Any] = {
        "task": "segmentation",
        "data": {
            "kind": "scenes",
            "root": str(root),
            "training_images": 9,
            "evaluation_images": 5,
            "batch_size": 4,
        },
        "model": {
            "kind": "segmenter",
            "dim": 16,
            "depth": 1,
            "heads": 2,
            "patch": 8,
            "ffn": {"width": 16},
            "decoder_depth": 1,
            "stride": 16,
        },
        "optimizer": {"kind": "sgd", "lr": 0.1},
        "schedule": {"kind": "polynomial", "end": 1e-5},
        "training": {"epochs": 3, "accelerator": "cpu", "evaluate_every": 2},
    }
    for section, values in changes.items():
        experiment[section] = {**experiment[section], **values}
    return cell_of(experiment, metric={"name": "test/mIoU", "label": "mIoU (%)"})


def folder_of(cell: Cell, root: Path) -> Path:
    """Write the config.yaml of a cell and return its folder."""
    folder = root / cell.folder
    folder.mkdir(parents=True)
    cell.write(folder / "config.yaml")
    return folder


def accuracy_at(folder: Path) -> list[tuple[int, int]]:
    """Return the step and epoch of every test accuracy."""
    rows = read_metrics(folder / "metrics.csv")
    return [(row.step, row.epoch) for row in rows if row.name == "test/accuracy"]


def result_of(folder: Path) -> Result:
    """Return the record of a finished cell."""
    return Result.model_validate_json((folder / "result.json").read_text())
