"""Small cells on the real digits, for the tests of training."""

from pathlib import Path
from typing import Any

from lit_attn.config.cell import Cell


def digits_cell(**changes: Any) -> Cell:
    """A cell that trains in about a second; `changes` go over the experiment's sections."""
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
    return Cell.model_validate(
        {"study": "test", "variant": "v", "seed": 0, "experiment": experiment, **top}
    )


def folder_of(cell: Cell, root: Path) -> Path:
    """A cell folder with its config.yaml, ready to run."""
    folder = root / cell.folder
    folder.mkdir(parents=True)
    cell.write(folder / "config.yaml")
    return folder
