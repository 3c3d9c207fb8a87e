"""Scikit-learn's real digits as class folders, in the layout of ImageNet."""

from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from sklearn.datasets import load_digits

CLASSES = 4


def write(root: Path, train: int = 16, val: int = 5, classes: int = CLASSES) -> Path:
    """Write `train` and `val` images of each of `classes` digits below `root`, in three sizes."""
    digits = load_digits()
    for label in range(classes):
        images = digits.images[digits.target == label]
        for split, chosen in (("train", images[:train]), ("val", images[train : train + val])):
            folder = root / split / f"n{label}"
            folder.mkdir(parents=True)
            for number, pixels in enumerate(chosen):
                side = (16, 20, 24)[number % 3]
                image = Image.fromarray(np.round(pixels * (255 / 16)).astype(np.uint8))
                suffix = "png" if number % 2 else "JPEG"
                image.resize((side, 20)).save(folder / f"{number}.{suffix}")
    return root


def experiment(root: Path, **changes: Any) -> dict[str, Any]:
    """Return an experiment with a tiny ViT; `changes` override its sections."""
    sections: dict[str, Any] = {
        "data": {
            "kind": "image-folder",
            "name": "digits",
            "path": str(root),
            "classes": CLASSES,
            "size": 16,
            "batch_size": 16,
            "eval_batch_size": 8,
            "workers": 0,
            "augment": {
                "policy": "rand-m9-mstd0.5-inc1",
                "erasing": 0.25,
                "mixup": 0.8,
                "cutmix": 1.0,
            },
        },
        "model": {
            "kind": "image-vit",
            "dim": 16,
            "depth": 2,
            "heads": 2,
            "patch": 4,
            "ffn": {"width": 16},
        },
        "loss": {"label_smoothing": 0.1},
        "optimizer": {"kind": "adamw", "lr": 3e-3, "weight_decay": 0.05, "decay": "matrices"},
        "schedule": {"kind": "cosine"},
        "training": {"epochs": 2, "accelerator": "cpu"},
    }
    for section, values in changes.items():
        sections[section] = {**sections[section], **values}
    return sections
