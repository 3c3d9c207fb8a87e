"""Splits with fewer samples than processes: each process has a batch, no sample counts twice."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.data_ranks import on_rank
from helpers.digit_folders import write
from torch import Tensor

from lit_attn.data.base import Data
from lit_attn.data.image_folders import ImageFolder
from lit_attn.data.image_sets import Npz, NpzTargets
from lit_attn.data.module import DataModule, EvaluationLoader
from lit_attn.data.text.labelled import LabelledText
from lit_attn.data.text.plain_text import TextFiles
from lit_attn.schema.errors import ConfigError

WORLD = 4


def arrays(folder: Path, targets: bool, evaluated: int) -> Path:
    drawn = np.random.default_rng(0)
    images = drawn.integers(256, size=(8 + evaluated, 8, 8, 3), dtype=np.uint8)
    values = drawn.random((len(images), 2)) if targets else np.arange(len(images)) % 2
    path = folder / "arrays.npz"
    parts = {"train": slice(8), "test": slice(8, None)}
    np.savez(
        path,
        **{f"x_{name}": images[rows] for name, rows in parts.items()},
        **{f"y_{name}": values[rows] for name, rows in parts.items()},
    )
    return path


def classes(folder: Path, evaluated: int) -> Data:
    path = arrays(folder, False, evaluated)
    return Npz.model_validate(
        {"name": "few", "path": path, "classes": 2, "size": 8, "batch_size": 8}
    )


def targets(folder: Path, evaluated: int) -> Data:
    values = {"name": "few", "path": arrays(folder, True, evaluated), "outputs": 2}
    return NpzTargets.model_validate({**values, "size": 8, "batch_size": 8})


def folders(folder: Path, evaluated: int) -> Data:
    path = write(folder / "images", train=8, val=evaluated, classes=1)
    values = {"name": "few", "path": path, "classes": 1, "size": 16, "workers": 0}
    return ImageFolder.model_validate({**values, "batch_size": 8, "eval_batch_size": 4})


def texts(folder: Path, evaluated: int) -> Data:
    for split, count in (("train", 8), ("val", evaluated), ("test", evaluated)):
        rows = [f"{number % 2}\ttext {number}" for number in range(count)]
        (folder / f"{split}.tsv").write_text("\n".join(rows) + "\n")
    values = {"name": "few", "folder": folder, "classes": 2, "context": 16, "batch_size": 8}
    return LabelledText.model_validate({**values, "eval_batch_size": 1})


def stream(folder: Path, evaluated: int) -> Data:
    """Return text of which `evaluated` windows are evaluated."""
    for split, count in (("train", 500), ("test", 8 * evaluated + 1)):
        (folder / f"{split}.txt").write_text("".join(chr(97 + i % 26) for i in range(count)))
    paths = {split: folder / f"{split}.txt" for split in ("train", "test")}
    values = {"name": "few", **paths, "context": 8, "batch_size": 8, "eval_batch_size": 1}
    return TextFiles.model_validate(values)


def flatten(batch: Any) -> list[Tensor]:
    return [part for part in batch if isinstance(part, Tensor)]


@pytest.mark.parametrize("make", [classes, targets, folders, texts, stream])
@pytest.mark.parametrize("evaluated", [1, 2, 3, 5])
def test_every_process_has_a_batch(
    make: Callable[[Path, int], Data], evaluated: int, tmp_path: Path
) -> None:
    module: DataModule = make(tmp_path, evaluated).build(0, torch.device("cpu"))
    places: list[int] = []
    forms = set()
    for rank in range(WORLD):
        (*_, loader) = on_rank(module, rank, WORLD).val_dataloader()
        batches = list(loader)
        assert len(batches) == len(loader) == len(loader.units) >= 1
        first = flatten(batches[0])
        assert all(len(part) > 0 for part in first)
        forms.add(tuple((part.dtype, part.ndim) for part in first))
        assert bool(loader.count_samples(0)) == (rank < loader.count)
        places += [place for unit in loader.units for place in unit if place < loader.count]
    assert sorted(places) == list(range(loader.count))
    assert len(forms) == 1


def test_a_loader_without_a_batch_is_refused(tmp_path: Path) -> None:
    module: Any = classes(tmp_path, 1).build(0, torch.device("cpu"))
    module.evaluation_loader = lambda split: EvaluationLoader([], iter, [], 1)
    text = r"data: the evaluation loader of test has no batch for process 3 of 4"
    with pytest.raises(ConfigError, match=text):
        on_rank(module, 3, WORLD).val_dataloader()
