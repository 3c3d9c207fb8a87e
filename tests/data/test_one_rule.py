"""Tests of rules that every reader has: shared files, numbered labels, names of classes."""

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.tar_files import make_picture, write_tar

from lit_attn.data.columns import ColumnClasses, read_columns
from lit_attn.data.image_folders import ImageFolder, WebDataset
from lit_attn.data.log import collect_warnings
from lit_attn.data.pictures import read_picture
from lit_attn.data.table_sets import TableLabels
from lit_attn.data.text.labelled import LabelledText
from lit_attn.data.text.listops import ListOps
from lit_attn.data.text.text_folders import TextFolder
from lit_attn.schema.errors import ConfigError
from lit_attn.segmentation.mask_sets import MasksConfig

CPU = torch.device("cpu")


def read_images(root: Path) -> Any:
    (root / "train" / "cat").mkdir(parents=True)
    (root / "train" / "cat" / "1.png").write_bytes(make_picture())
    (root / "test").symlink_to(root / "train")
    return ImageFolder(name="t", classes=1, path=root).list_files()


def read_tar_files(root: Path) -> Any:
    write_tar(root / "train" / "0.tar", [("a.png", make_picture()), ("a.cls", b"0")])
    (root / "test").symlink_to(root / "train")
    return WebDataset(name="t", classes=1, path=root).list_files()


def read_text_folders(root: Path) -> Any:
    (root / "train" / "cat").mkdir(parents=True)
    (root / "train" / "cat" / "1.txt").write_text("text")
    (root / "test").symlink_to(root / "train")
    return TextFolder(name="t", classes=1, context=8, path=root).read_samples()


def read_masks(root: Path) -> Any:
    for content in ("images", "annotations"):
        (root / content / "training").mkdir(parents=True)
        (root / content / "training" / "1.png").write_bytes(make_picture())
        (root / content / "validation").symlink_to(root / content / "training")
    data = MasksConfig(name="t", root=root, classes=("a", "b"), batch_size=1)
    return data.build(0, CPU)


def read_labelled_text(root: Path) -> Any:
    for split in ("train", "val"):
        (root / f"{split}.tsv").write_text("0\ta\n1\tb\n")
    (root / "test.tsv").symlink_to(root / "train.tsv")
    return LabelledText(name="t", folder=root).read_samples()


def read_list_ops(root: Path) -> Any:
    for split in ("train", "val"):
        (root / f"basic_{split}.tsv").write_text("Source\tTarget\n[MAX 1 2 ]\t2\n")
    (root / "basic_test.tsv").symlink_to(root / "basic_train.tsv")
    return ListOps(folder=root).read_samples()


@pytest.mark.parametrize(
    "read",
    [
        read_images,
        read_tar_files,
        read_text_folders,
        read_masks,
        read_labelled_text,
        read_list_ops,
    ],
)
def test_a_test_split_linked_to_train_is_a_warning(
    tmp_path: Path, read: Callable[[Path], Any]
) -> None:
    with collect_warnings() as messages:
        read(tmp_path)
    shared = [text for text in messages if "the results of this split are those of tr" in text]
    assert len(shared) == 1


def test_two_names_of_one_class_folder_are_refused(tmp_path: Path) -> None:
    for split in ("train", "test"):
        (tmp_path / split / "cat").mkdir(parents=True)
        (tmp_path / split / "cat" / "1.png").write_bytes(make_picture())
    (tmp_path / "train" / "kitty").symlink_to(tmp_path / "train" / "cat")
    message = r"'cat' and 'kitty' in .*/train are two names of one folder, so each image would"
    with pytest.raises(ConfigError, match=message):
        ImageFolder(name="t", classes=2, path=tmp_path).list_files()


def write_table(path: Path, labels: list[Any]) -> Path:
    """Write a table of numbers and labels as CSV or JSON lines, by the ending of `path`."""
    if path.suffix == ".csv":
        lines = ["x,text,label", *(f"{number},a,{label}" for number, label in enumerate(labels))]
    else:
        rows = enumerate(labels)
        lines = [json.dumps({"x": number, "text": "a", "label": label}) for number, label in rows]
    path.write_text("\n".join(lines) + "\n")
    return path


def read_labels(paths: dict[str, Path], classes: int) -> dict[str, list[int]]:
    """Return the classes that both readers of tables read, which are equal."""
    text = TableLabels(name="t", context=8, classes=classes, **paths).read_samples()
    columns = read_columns(ColumnClasses(name="t", numbers=("x",), classes=classes, **paths))
    labels = {split: [sample.label for sample in text[split]] for split in paths}
    assert {split: columns[split].targets.tolist() for split in paths} == labels
    return labels


@pytest.mark.parametrize("ending", [".csv", ".jsonl"])
@pytest.mark.parametrize("form", [str, "{}.0".format, int, float])
def test_numbered_labels_keep_their_numbers_in_every_format(
    tmp_path: Path, ending: str, form: Callable[[int], Any]
) -> None:
    numbers = [10, 2, 0, 11, *range(12)]
    paths = {
        "train": write_table(tmp_path / f"train{ending}", [form(number) for number in numbers]),
        "test": write_table(tmp_path / f"test{ending}", [form(10), form(2)]),
    }
    assert read_labels(paths, 12) == {"train": numbers, "test": [10, 2]}


@pytest.mark.parametrize("ending", [".csv", ".jsonl"])
def test_two_spellings_of_one_number_are_refused(tmp_path: Path, ending: str) -> None:
    paths = {
        "train": write_table(tmp_path / f"train{ending}", ["01", "1", "0"]),
        "test": write_table(tmp_path / f"test{ending}", ["0"]),
    }
    message = r"^data\.label: the labels '0?1' and '0?1' are one number; write it in one way"
    for read in (
        TableLabels(name="t", context=8, classes=2, **paths).read_samples,
        lambda: read_columns(ColumnClasses(name="t", numbers=("x",), classes=2, **paths)),
    ):
        with pytest.raises(ConfigError, match=message):
            read()


@pytest.mark.parametrize("classes", [1, 3])
def test_names_of_another_number_of_classes_are_refused(tmp_path: Path, classes: int) -> None:
    paths = {
        "train": write_table(tmp_path / "train.csv", ["a", "b", "a"]),
        "test": write_table(tmp_path / "test.csv", ["a"]),
    }
    message = rf"^data\.classes: {classes}, but train has 2 names of classes: a, b; set 2"
    for read in (
        TableLabels(name="t", context=8, classes=classes, **paths).read_samples,
        lambda: read_columns(ColumnClasses(name="t", numbers=("x",), classes=classes, **paths)),
    ):
        with pytest.raises(ConfigError, match=message):
            read()


def make_tiff_of_floats() -> bytes:
    """Return a TIFF of one pixel with three floats, which Pillow cannot write."""
    # Each entry has a tag, a type (3: 16 bits, 4: 32 bits), a count, and a value or its place.
    entries = [
        (256, 3, 1, 1),
        (257, 3, 1, 1),
        (258, 3, 3, 134),
        (259, 3, 1, 1),
        (262, 3, 1, 2),
        (273, 4, 1, 146),
        (277, 3, 1, 3),
        (278, 3, 1, 1),
        (279, 4, 1, 12),
        (339, 3, 3, 140),
    ]
    directory = b"".join(struct.pack("<HHII", *entry) for entry in entries)
    head = struct.pack("<2sHIH", b"II", 42, 8, len(entries)) + directory + bytes(4)
    assert len(head) == 134
    return head + struct.pack("<3H3H", 32, 32, 32, 3, 3, 3) + struct.pack("<3f", 0, 0.5, 1)


def test_a_tiff_of_floats_with_three_channels_is_described() -> None:
    with pytest.raises(ConfigError, match="is a TIFF of a form that Pillow cannot read, such as"):
        read_picture(make_tiff_of_floats(), "a.tif", "RGB")
