"""Tests of hidden files and folders, which no reader reads: macOS writes `._x` beside each `x`."""

import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.tar_files import make_picture, write_tar

from lit_attn.data.image_folders import ImageFolder, WebDataset
from lit_attn.data.table_sets import TableText
from lit_attn.data.tables import load_rows
from lit_attn.data.text.plain_text import python_documents
from lit_attn.data.text.shards import Shards
from lit_attn.data.text.text_folders import TextFolder
from lit_attn.segmentation.mask_sets import MasksConfig

Read = Callable[[Path], Any]


def read_class_folders(root: Path) -> Any:
    for split in ("train", "test"):
        (root / split / "cat").mkdir(parents=True, exist_ok=True)
        (root / split / "cat" / "1.png").write_bytes(make_picture())
    files = ImageFolder(name="t", classes=1, path=root).list_files()
    return {split: listed.names.tolist() for split, listed in files.items()}


def read_tar_files(root: Path) -> Any:
    for split in ("train", "test"):
        write_tar(root / split / "0.tar", [("a.png", make_picture()), ("a.cls", b"0")])
    files = WebDataset(name="t", classes=1, path=root).list_files()
    return {split: listed.names.tolist() for split, listed in files.items()}


def read_text_folders(root: Path) -> Any:
    for split in ("train", "test"):
        (root / split / "cat").mkdir(parents=True, exist_ok=True)
        (root / split / "cat" / "1.txt").write_text("text")
    samples = TextFolder(name="t", classes=1, context=8, path=root).read_samples()
    return {split: [sample.documents[0].tolist() for sample in samples[split]] for split in samples}


def read_shards(root: Path) -> Any:
    root.mkdir(exist_ok=True)
    for split in ("train", "val"):
        np.arange(9, dtype=np.uint16).tofile(root / f"{split}.bin")
    streams = Shards(name="t", folder=root).streams()
    return {split: stream.read(0, len(stream)).tolist() for split, stream in streams.items()}


def read_hub_folder(root: Path) -> Any:
    pytest.importorskip("datasets")
    root.mkdir(exist_ok=True)
    for split in ("train", "test"):
        (root / f"{split}.csv").write_text("text\na\n")
    rows = load_rows(TableText(name="t", hub=str(root)))
    return {split: list(rows[split]["text"]) for split in rows}


@pytest.mark.parametrize(
    ("read", "folder", "endings"),
    [
        (read_class_folders, "train/cat", (".png",)),
        (read_class_folders, "train", (".png",)),
        (read_class_folders, "", (".png",)),
        (read_tar_files, "train", (".tar",)),
        (read_text_folders, "train/cat", (".txt",)),
        (read_shards, "", (".bin", ".npy")),
        (read_hub_folder, "", ("_train_test.csv", ".csv")),
    ],
)
def test_readers_ignore_hidden_files_and_folders(
    tmp_path: Path, read: Read, folder: str, endings: tuple[str, ...]
) -> None:
    root = tmp_path / "mine"
    expected = read(root)
    for name in ("._1", ".1", ".hidden/1", "._train", ".train_val"):
        for ending in endings:
            path = root / folder / f"{name}{ending}"
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(b"\0\5\26\7" * 1024)
    assert read(root) == expected


@pytest.mark.parametrize("folder", ["images/training", "annotations/validation", "images", ""])
def test_label_masks_ignore_hidden_files_and_folders(tmp_path: Path, folder: str) -> None:
    for split in ("training", "validation"):
        for content in ("images", "annotations"):
            (tmp_path / content / split).mkdir(parents=True)
            (tmp_path / content / split / "1.png").write_bytes(make_picture())
    config = MasksConfig(name="t", root=tmp_path, classes=("a", "b"), batch_size=1)
    before = config.build(0, torch.device("cpu"))
    (tmp_path / folder / "._1.png").write_bytes(b"\0\5\26\7")
    (tmp_path / folder / ".hidden").mkdir()
    (tmp_path / folder / ".hidden" / "1.png").write_bytes(make_picture(2))
    after = config.build(0, torch.device("cpu"))
    assert after.fingerprint() == before.fingerprint()
    assert after.train.pairs == before.train.pairs


def test_the_text_of_python_has_no_hidden_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a.py", "._a.py", ".hidden/b.py", "test/c.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
    monkeypatch.setattr(sysconfig, "get_path", lambda _: str(tmp_path))
    names = [name for name, _ in python_documents() if name.startswith("library/")]
    assert names == ["library/a.py"]
