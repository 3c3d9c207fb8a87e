"""Tests of the check for missing paths and splits, which reads no data."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from lit_attn.data.base import Data
from lit_attn.data.columns import ColumnClasses
from lit_attn.data.image_folders import ImageFolder, WebDataset
from lit_attn.data.image_sets import Digits, Npz, NpzTargets
from lit_attn.data.table_sets import TableText
from lit_attn.data.text.labelled import LabelledText
from lit_attn.data.text.listops import ListOps
from lit_attn.data.text.parallel import ParallelText
from lit_attn.data.text.plain_text import TextFiles
from lit_attn.data.text.shards import Shards
from lit_attn.data.text.text_folders import TextFolder
from lit_attn.schema.errors import ConfigError
from lit_attn.segmentation.mask_sets import Ade20k, MasksConfig
from lit_attn.segmentation.scenes import Scenes

CLASS_FOLDERS = ("train/a/1.x", "test/a/1.x")
PAIRS = ("images/training/1", "images/validation/1", "annotations/training/1")
SENTENCES = ("train.de", "train.en", "valid.de", "valid.en", "test.de", "test.en")
Make = Callable[[Path], Data]


def write(root: Path, *names: str) -> None:
    """Write empty files below `root`."""
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).touch()


def make_image_folder(root: Path) -> Data:
    write(root, *CLASS_FOLDERS)
    return ImageFolder(name="t", classes=1, path=root)


def make_web_dataset(root: Path) -> Data:
    write(root, "train/1.tar", "val/1.tar")
    return WebDataset(name="t", classes=1, path=root)


def make_text_folder(root: Path) -> Data:
    write(root, *CLASS_FOLDERS)
    return TextFolder(name="t", context=8, path=root)


def make_masks(root: Path) -> Data:
    write(root, *PAIRS, "annotations/validation/1")
    return MasksConfig(name="t", root=root, classes=("a", "b"))


def make_ade20k(root: Path) -> Data:
    write(root, *PAIRS, "annotations/validation/1")
    return Ade20k(root=root)


def make_shards(root: Path) -> Data:
    write(root, "train.bin", "val.bin")
    return Shards(name="t", folder=root)


def make_labelled_text(root: Path) -> Data:
    write(root, "train.tsv", "val.tsv", "test.tsv")
    return LabelledText(name="t", folder=root)


def make_list_ops(root: Path) -> Data:
    write(root, "basic_train.tsv", "basic_val.tsv", "basic_test.tsv")
    return ListOps(folder=root)


def make_parallel_text(root: Path) -> Data:
    write(root, *SENTENCES)
    return ParallelText(name="t", folder=root)


@pytest.mark.parametrize(
    ("make", "split", "message"),
    [
        (make_image_folder, "train", "data.path: no folder ROOT/train"),
        (make_image_folder, "test", "data.path: no folder ROOT/test or ROOT/val"),
        (make_web_dataset, "train", "data.path: no folder ROOT/train"),
        (make_web_dataset, "val", "data.path: no folder ROOT/test or ROOT/val"),
        (make_text_folder, "train", "data.path: no folder ROOT/train"),
        (make_text_folder, "test", "data.path: no folder ROOT/test or ROOT/val"),
        (make_masks, "images/training", "data.root: no file ROOT/images/training"),
        (make_masks, "annotations/validation", "data.root: no file ROOT/annotations/validation"),
        (make_ade20k, "images/validation", "data.root: no file ROOT/images/validation"),
        (make_labelled_text, "val.tsv", "data.folder: no file ROOT/val.tsv"),
        (make_list_ops, "basic_test.tsv", "data.folder: no file ROOT/basic_test.tsv"),
        (make_parallel_text, "valid.en", "data.val_name: no file ROOT/valid.en"),
    ],
)
def test_a_missing_split_is_named_with_the_nearest_name(
    tmp_path: Path, make: Make, split: str, message: str
) -> None:
    root = tmp_path / "mine"
    data = make(root)
    data.check_files()
    path = root / split
    misspelt = path.name[1] + path.name[0] + path.name[2:]
    path.rename(path.with_name(misspelt))
    with pytest.raises(ConfigError) as caught:
        data.check_files()
    expected = message.replace("ROOT", str(root))
    assert str(caught.value).startswith(expected)
    assert misspelt in str(caught.value).removeprefix(expected)


@pytest.mark.parametrize(
    "make",
    [
        make_image_folder,
        make_web_dataset,
        make_text_folder,
        make_masks,
        make_ade20k,
        make_shards,
        make_labelled_text,
        make_list_ops,
        make_parallel_text,
    ],
)
def test_a_missing_folder_is_named_with_the_nearest_name(tmp_path: Path, make: Make) -> None:
    data = make(tmp_path / "mine")
    (tmp_path / "mine").rename(tmp_path / "mnie")
    with pytest.raises(ConfigError, match=r"^data\.\w+: no file .*/mine.*; did you mean 'mnie'\?"):
        data.check_files()


def test_a_missing_path_lists_no_other_names(tmp_path: Path) -> None:
    (tmp_path / "README.md").touch()
    data = ListOps(folder=tmp_path / "listops" / "arena")
    with pytest.raises(ConfigError, match=f"no file .*; '{tmp_path}' has no 'listops'$"):
        data.check_files()


@pytest.mark.parametrize("name", ["dev.bin", "eval.bin", "fineVal.bin", ".val.bin", "._val.bin"])
def test_the_words_of_a_missing_split_of_shards_are_listed(tmp_path: Path, name: str) -> None:
    data = make_shards(tmp_path)
    data.check_files()
    (tmp_path / "val.bin").rename(tmp_path / name)
    with pytest.raises(ConfigError, match="has the word val or valid or validation") as caught:
        data.check_files()
    is_hidden = name.startswith(".")
    assert (name in str(caught.value)) is not is_hidden


@pytest.mark.parametrize("member", [Npz, NpzTargets])
def test_a_missing_array_is_named_with_the_nearest_name(tmp_path: Path, member: type[Data]) -> None:
    path = tmp_path / "mine.npz"
    keys = {"name": "t", "size": 8, "path": path} | ({"classes": 2} if member is Npz else {})
    arrays = {"x_train": np.zeros(1), "y_train": np.zeros(1), "x_test": np.zeros(1)}
    np.savez(path, **arrays, y_tset=np.zeros(1))
    with pytest.raises(ConfigError, match=r"has no 'y_test'; it has .*y_tset"):
        member(**keys).check_files()
    np.savez(path, **arrays, y_test=np.zeros(1))
    member(**keys).check_files()
    path.rename(tmp_path / "mien.npz")
    with pytest.raises(ConfigError, match=r"no file .*mine\.npz; did you mean 'mien\.npz'\?"):
        member(**keys).check_files()


def test_a_missing_table_or_text_is_named_with_the_nearest_name(tmp_path: Path) -> None:
    write(tmp_path, "train.csv", "test.csv")
    paths = {"train": tmp_path / "train.csv", "test": tmp_path / "tset.csv"}
    members = [
        TableText(name="t", **paths),
        ColumnClasses(name="t", numbers=("a",), **paths),
        TextFiles(name="t", **paths),
    ]
    for data in members:
        with pytest.raises(ConfigError, match=r"^data\.test: .*; did you mean 'test\.csv'\?"):
            data.check_files()


def test_generated_data_need_no_files(tmp_path: Path) -> None:
    for data in (Digits(), ListOps(), Scenes(root=tmp_path / "none")):
        data.check_files()
