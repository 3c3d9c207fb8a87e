"""Tests of images with numbers to predict."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from pydantic import ValidationError

from lit_attn.data.columns import ColumnNumbers, read_columns
from lit_attn.data.image_sets import NpzTargets
from lit_attn.data.images import load_splits
from lit_attn.data.sets import convert_targets
from lit_attn.data.table_sets import TableTargets
from lit_attn.schema.errors import ConfigError
from lit_attn.signatures import ImageTargets

CPU = torch.device("cpu")


def write_npz(path: Path, **changes: np.ndarray) -> NpzTargets:
    rng = np.random.default_rng(0)
    arrays = {}
    for split, count in (("train", 12), ("test", 5)):
        arrays[f"x_{split}"] = rng.integers(256, size=(count, 4, 4), dtype=np.uint8)
        arrays[f"y_{split}"] = rng.normal(size=(count, 2))
    np.savez(path, **(arrays | changes))
    return NpzTargets(name="n", path=path, size=4, channels=1, outputs=2, batch_size=4)


def test_batches_contain_the_targets_of_their_images(tmp_path: Path) -> None:
    config = write_npz(tmp_path / "a.npz")
    assert config.signature() == ImageTargets((1, 4, 4), 2)
    data = config.build(0, CPU)
    written = np.load(config.path)
    targets_read = []
    for images, targets in data.train_dataloader():
        assert (images.shape, targets.dtype) == ((4, 1, 4, 4), torch.float32)
        targets_read += targets.tolist()
    assert sorted(targets_read) == sorted(written["y_train"].astype(np.float32).tolist())
    ((_, targets),) = data.val_dataloader()[0]
    assert (targets.numpy() == written["y_test"].astype(np.float32)).all()


def test_one_output_may_be_one_dimensional(tmp_path: Path) -> None:
    config = write_npz(tmp_path / "a.npz", y_train=np.arange(12), y_test=np.arange(5.0))
    data = config.model_copy(update={"outputs": 1}).build(0, CPU)
    assert data.tensors["train"][1].shape == (12, 1)


def test_images_can_be_held_out_without_classes(tmp_path: Path) -> None:
    config = write_npz(tmp_path / "a.npz").model_copy(update={"validation": 3})
    loaded = load_splits(config)
    assert [len(loaded[name].labels) for name in ("train", "val", "test")] == [9, 3, 5]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"y_train": np.zeros(12)}, r"y_train must be numbers of \(N, 2\), is float64 of \(12,\)"),
        ({"y_test": np.full((5, 2), np.nan)}, "test has a target that is not a finite number"),
        ({"y_test": np.full((5, 2), "a")}, r"y_test must be numbers"),
    ],
)
def test_malformed_targets_are_refused(
    changes: dict[str, np.ndarray], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=r"^data\.path: .*a\.npz: " + message):
        write_npz(tmp_path / "a.npz", **changes).build(0, CPU)


def test_mixing_needs_classes(tmp_path: Path) -> None:
    with pytest.raises(ValidationError, match="augment: 'mix' mixes classes"):
        NpzTargets(name="n", path=tmp_path, size=4, augment=["normalize", "mix"])


@pytest.mark.parametrize("mean", [0.0, 1e5, 1.7e9])
def test_targets_that_float32_cannot_hold_are_refused(mean: float, tmp_path: Path) -> None:
    """All readers: of one .npz, of tables of images, and of tables of numbers."""
    values = mean + np.random.default_rng(0).normal(0, 0.05, 20)
    images = np.zeros((20, 4, 4, 1), np.uint8)
    npz = tmp_path / "a.npz"
    np.savez(npz, x_train=images, y_train=values, x_test=images, y_test=values)
    Image.fromarray(images[0, :, :, 0]).save(tmp_path / "a.png")
    table = tmp_path / "a.csv"
    rows = [f"a.png,1,{value!r}" for value in values.tolist()]
    table.write_text("\n".join(["image,x,y", *rows]) + "\n")
    files = {"name": "n", "train": table, "test": table, "targets": ("y",)}
    size: dict[str, Any] = {"size": 4, "channels": 1, "batch_size": 4}
    readers = (
        lambda: NpzTargets(name="n", path=npz, outputs=1, **size).read_splits(),
        lambda: TableTargets(**files, **size).read_splits(),
        lambda: read_columns(ColumnNumbers(**files, numbers=("x",), batch_size=4)),
    )
    for read in readers:
        if mean == 0:
            read()
            continue
        with pytest.raises(ConfigError, match=r"^data\..*: float32 changes targets of mean [19]"):
            read()
    # Constant targets have no deviation to compare with.
    assert convert_targets("y", np.full((5, 2), 0.1)).dtype == np.float32
