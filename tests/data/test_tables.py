"""Tests of data sets of rows: Parquet, CSV and JSON files."""

import io
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import fake_cells
from helpers.table_files import write_rows
from helpers.training_cells import digits_cell
from PIL import Image
from pydantic import ValidationError

from lit_attn.cells.inputs import change_finder, collect_data
from lit_attn.data.table_sets import TableImages, TableLabels, TableTargets, TableText
from lit_attn.schema.errors import ConfigError
from lit_attn.signatures import ImageTargets

datasets = pytest.importorskip("datasets")

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the cache of `datasets` in the folder of the test."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def write_images(folder: Path, names: list[Any]) -> list[dict[str, Any]]:
    """Write one image for each of `names`; its grey level is its number."""
    rows = []
    for number, name in enumerate(names):
        Image.new("L", (6, 6), 10 * number).save(folder / f"{number}.png")
        rows.append({"image": f"{number}.png", "label": name, "x": number / 2, "y": -number})
    return rows


@pytest.mark.parametrize("suffix", [".csv", ".json", ".jsonl", ".parquet"])
def test_images_are_read_from_every_kind_of_file(suffix: str, tmp_path: Path) -> None:
    rows = write_images(tmp_path, ["dog", "cat", "cat", "emu"])
    train = write_rows(tmp_path / f"train{suffix}", rows)
    test = write_rows(tmp_path / f"test{suffix}", rows[:2])
    config = TableImages(
        name="t", train=train, test=test, size=6, channels=1, classes=3, batch_size=2
    )
    config.check_files()
    data = config.build(0, CPU)
    images, labels = data.tensors["train"]
    assert labels.tolist() == [1, 0, 0, 2]
    assert images[:, 0, 3, 3].tolist() == [0, 10, 20, 30]
    assert data.tensors["test"][1].tolist() == [1, 0]


@pytest.mark.parametrize("suffix", [".csv", ".json", ".jsonl", ".parquet"])
def test_a_changed_image_of_a_table_makes_results_stale_at_once(
    suffix: str, tmp_path: Path
) -> None:
    (tmp_path / "images").mkdir()
    rows = write_images(tmp_path / "images", ["dog", "cat", "emu"])
    rows = [row | {"image": f"images/{row['image']}"} for row in rows]
    path = write_rows(tmp_path / f"rows{suffix}", rows)
    config = TableTargets(
        name="t", train=path, test=path, targets=("x",), size=6, channels=1, batch_size=2
    )
    inputs = collect_data(config.input_paths())
    assert set(inputs) == {str(path), *(str(tmp_path / row["image"]) for row in rows)}
    result = fake_cells.result(digits_cell()).model_copy(update={"inputs": inputs})
    assert change_finder()(result) == ""
    changed = tmp_path / "images" / "1.png"
    Image.new("L", (6, 6), 99).save(changed)
    os.utime(changed, ns=(1, 1))
    assert change_finder()(result) == f"{changed} has another size or time"
    changed.unlink()
    assert change_finder()(result) == f"{changed} is missing"


def test_images_inside_a_table_are_no_files_of_their_own(tmp_path: Path) -> None:
    features = datasets.Features({"image": datasets.Image(), "label": datasets.Value("int64")})
    rows = {"image": [Image.new("L", (4, 4))], "label": [0]}
    path = tmp_path / "a.parquet"
    datasets.Dataset.from_dict(rows, features=features).to_parquet(path)
    config = TableImages(name="t", train=path, test=path, size=4, classes=1, batch_size=1)
    assert config.input_paths() == [path, path]


def test_images_in_cells_of_datasets_are_decoded(tmp_path: Path) -> None:
    rows = [{"image": Image.new("RGB", (4, 4), (9, 0, i)), "label": i} for i in range(3)]
    names = ("a", "b", "c")
    features = {"image": datasets.Image(), "label": datasets.ClassLabel(names=names)}
    table = datasets.Dataset.from_list(rows, features=datasets.Features(features))
    table.to_parquet(tmp_path / "train.parquet")
    path = tmp_path / "train.parquet"
    config = TableImages(name="t", train=path, val=path, size=4, classes=3, batch_size=3)
    data = config.build(0, CPU)
    assert data.splits == ["test"]
    images, labels = data.tensors["train"]
    assert images[:, :, 0, 0].tolist() == [[9, 0, 0], [9, 0, 1], [9, 0, 2]]
    assert labels.tolist() == [0, 1, 2]


def test_columns_of_numbers_are_targets(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "a.csv", write_images(tmp_path, [0, 1, 2]))
    config = TableTargets(
        name="t", train=path, test=path, size=6, channels=1, targets=("x", "y"), batch_size=3
    )
    assert config.signature() == ImageTargets((1, 6, 6), 2)
    config.check_files()
    assert config.build(0, CPU).tensors["test"][1].tolist() == [[0, 0], [0.5, -1], [1, -2]]


def test_texts_and_labels_make_padded_rows(tmp_path: Path) -> None:
    rows = [{"text": "no", "label": "bad"}, {"text": "a", "label": "ok"}]
    path = write_rows(tmp_path / "a.jsonl", rows)
    choices = {"name": "t", "train": path, "test": path, "context": 4, "batch_size": 2}
    data = TableLabels.model_validate(choices).build(0, CPU)
    tokens, present, labels = next(iter(data.val_dataloader()[0]))
    assert tokens[:2].tolist() == [[111, 112, 0, 0], [98, 0, 0, 0]]
    assert present[:2].sum(1).tolist() == [2, 1]
    assert labels[:2].tolist() == [0, 1]


def test_documents_are_the_rows_of_a_column(tmp_path: Path) -> None:
    path = write_rows(
        tmp_path / "a.parquet", [{"text": "hello there"}, {"text": None}, {"text": "you"}]
    )
    config = TableText(name="t", train=path, val=path, context=4, batch_size=1)
    config.check_files()
    stream = config.streams()["train"]
    assert bytes(stream.read(0, len(stream)).tolist()) == b"hello there\0you\0"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"label": "lable"},
            r"data\.label: .*a\.csv has no column 'lable'; did you mean 'label'\?",
        ),
        (
            {"batch_size": 4},
            r"^data\.batch_size: 4 is more than the 3 samples of an epoch; 3 at most",
        ),
        ({"classes": 2}, r"^data\.classes: 2, but train has the labels 0 to 2; set 3"),
    ],
)
def test_a_table_that_does_not_fit_the_keys_is_refused(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    path = write_rows(tmp_path / "a.csv", write_images(tmp_path, [0, 1, 2]))
    choices = {"name": "t", "train": path, "test": path, "size": 6, "classes": 3, "batch_size": 1}
    with pytest.raises(ConfigError, match=message):
        TableImages.model_validate(choices | changes).build(0, CPU)


def test_files_that_are_no_tables_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"data\.train: no file no\.csv"):
        TableText(name="t", train=Path("no.csv"), val=Path("no.csv")).check_files()
    with pytest.raises(ConfigError, match=r"data\.train: .*\.py: no table ends in '\.py'; choose"):
        TableText(name="t", train=Path(__file__), val=Path(__file__)).texts()


def test_an_unreadable_table_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    path.write_text("[")
    with pytest.raises(ConfigError, match=r"data\.train: .*a\.parquet cannot be read: ") as caught:
        TableText(name="t", train=path, val=path).texts()
    assert "\n" not in str(caught.value)


def test_bad_cells_are_named(tmp_path: Path) -> None:
    rows = write_images(tmp_path, ["cat", "dog"])
    train = write_rows(tmp_path / "train.csv", rows)
    test = write_rows(tmp_path / "test.csv", [{**rows[0], "label": "cart", "x": "one"}])
    choices = {"name": "t", "train": train, "test": test, "size": 6, "batch_size": 1}
    with pytest.raises(ConfigError, match=r"test row 0 of 'label' is 'cart', no class of train"):
        TableImages.model_validate(choices | {"classes": 2}).build(0, CPU)
    numbers = write_rows(tmp_path / "numbers.csv", write_images(tmp_path, [0, 1]))
    with pytest.raises(ConfigError, match=r"test row 0 of 'label' is 'cart', no class of train"):
        TableImages.model_validate(choices | {"train": numbers, "classes": 2}).build(0, CPU)
    with pytest.raises(ConfigError, match=r"data\.targets: test row 0 of x has a value .*'one'"):
        TableTargets.model_validate(choices | {"targets": ["x"]}).build(0, CPU)
    (tmp_path / "1.png").write_text("text")
    with pytest.raises(
        ConfigError, match=r"data\.train: .*train\.csv: row 1: .*/1\.png is not a readable"
    ):
        TableImages.model_validate(choices | {"classes": 2}).build(0, CPU)


NO_CLASS = r"^data\.label: train row 1 of 'label' has no class"


@pytest.mark.parametrize(
    ("ending", "rows", "message"),
    [
        (".jsonl", [("a", "x"), ("b", None)], NO_CLASS),
        # Parquet files of floats mark a missing number with NaN.
        (".parquet", [("a", 0.0), ("b", float("nan"))], NO_CLASS),
        (".jsonl", [(3, 0)], r"^data\.train: .*: row 0: 'text' is 3, which is no text"),
    ],
)
def test_a_row_without_a_text_or_a_class_is_named(
    ending: str, rows: list[tuple[Any, Any]], message: str, tmp_path: Path
) -> None:
    path = tmp_path / f"train{ending}"
    write_rows(path, [{"text": text, "label": label} for text, label in rows])
    data = TableLabels(name="t", train=path, test=path, context=8, classes=2)
    with pytest.raises(ConfigError, match=message):
        data.read_samples()


def test_the_file_whose_rows_cannot_be_loaded_is_named(tmp_path: Path) -> None:
    good, bad = tmp_path / "train.jsonl", tmp_path / "test.jsonl"
    good.write_text('{"text": "a"}\n')
    bad.write_text('{"text": "a"}\n{"text": "a')
    with pytest.raises(ConfigError, match=r"^data\.test: .*test\.jsonl cannot be read: "):
        TableText(name="t", train=good, test=bad).texts()


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ({}, "train: needs the files `train` and `test` or `val`, or `hub`"),
        ({"train": "a.csv"}, "train: needs the files"),
        ({"hub": "o/n", "val": "a.csv"}, "hub: with the file `val`; drop one of them"),
    ],
)
def test_one_source_is_needed(choices: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        TableText.model_validate({"name": "t", **choices})


def test_the_splits_of_the_hub_are_renamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = datasets.Dataset.from_list([{"text": "a"}])
    splits = datasets.DatasetDict({"train": table, "validation": table})
    monkeypatch.setattr(datasets, "load_dataset", lambda name, subset: splits)
    assert set(TableText(name="t", hub="owner/name").texts()) == {"train", "val"}
    with pytest.raises(ConfigError, match=r"data\.text: owner/name has no column 'txt'"):
        TableText(name="t", hub="owner/name", text="txt").texts()
    del splits["validation"]
    with pytest.raises(
        ConfigError, match=r"data\.hub: owner/name has the splits train; needed are"
    ):
        TableText(name="t", hub="owner/name").texts()


def test_splits_of_the_hub_that_are_not_read_are_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    table = datasets.Dataset.from_list([{"text": "a"}])
    splits = dict.fromkeys(("train", "test", "unsupervised", "test_hard"), table)
    monkeypatch.setattr(datasets, "load_dataset", lambda name, subset: splits)
    assert set(TableText(name="t", hub="owner/name").texts()) == {"train", "val"}
    (record,) = caplog.records
    text = "data.hub: owner/name: not read are the splits unsupervised, test_hard; read are train"
    assert record.getMessage().startswith(text)
    splits |= {"val": table, "validation": table}
    with pytest.raises(ConfigError, match="has two splits for val: validation and val"):
        TableText(name="t", hub="owner/name").texts()


def test_a_file_of_a_local_hub_in_two_splits_is_refused(tmp_path: Path) -> None:
    (tmp_path / "train_test.csv").write_text("text\na\n")
    with pytest.raises(ConfigError, match=r"^data\.hub: .*train_test\.csv: its name states the"):
        TableText(name="t", hub=str(tmp_path)).texts()


def test_files_of_a_local_hub_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "rows"
    folder.mkdir()
    for name in ("train.csv", "train copy.csv", "test.csv"):
        (folder / name).write_text("text\na\n")
    TableText(name="t", hub=str(folder)).texts()
    assert caplog.messages == [
        f"data.hub: {folder}: train is read from 2 files: train copy.csv, train.csv"
    ]
    (folder / "train.csv.crdownload").write_text("text\nqq\n")
    with pytest.raises(ConfigError, match=r"^data\.hub: .*crdownload is an unfinished download"):
        TableText(name="t", hub=str(folder)).texts()


def test_a_large_vocabulary_needs_as_many_embeddings() -> None:
    choices = {"name": "t", "hub": "o/n", "context": 8, "tokenizer": "gpt-neox"}
    with pytest.raises(ValidationError, match=r"vocabulary: 512, but .* choose at least 50278"):
        TableLabels.model_validate(choices)


def write_table_of_picture(folder: Path, source: str, content: bytes) -> Path:
    """Write a table of one picture: a path in a CSV or parquet file, or the content in a cell."""
    (folder / "picture.png").write_bytes(content)
    path = folder / "table.parquet"
    if source == "csv":
        return write_rows(folder / "table.csv", [{"image": "picture.png", "label": 0}])
    if source == "parquet":
        return write_rows(path, [{"image": "picture.png", "label": 0}])
    features = datasets.Features({"image": datasets.Image(), "label": datasets.Value("int64")})
    rows = {"image": [{"bytes": content, "path": None}], "label": [0]}
    datasets.Dataset.from_dict(rows, features=features).to_parquet(path)
    return path


@pytest.mark.parametrize(("source", "channels"), [("csv", 1), ("parquet", 3), ("cells", 3)])
def test_pictures_of_16_bits_keep_their_range(source: str, channels: int, tmp_path: Path) -> None:
    """test_pictures.py has every kind of picture."""
    pixels = np.full((4, 8), 255)
    pixels[:, :4] = 100
    content = io.BytesIO()
    Image.fromarray((pixels * 257).astype(np.uint16)).save(content, "PNG")
    path = write_table_of_picture(tmp_path, source, content.getvalue())
    copy = tmp_path / f"other{path.suffix}"
    copy.write_bytes(path.read_bytes())
    config = TableImages(
        name="t", train=path, test=copy, size=8, channels=channels, classes=1, batch_size=1
    )
    images = config.build(0, CPU).tensors["train"][0]
    assert images.shape == (1, channels, 8, 8)
    assert (images[..., :2] == 100).all()
    assert (images[..., 6:] == 255).all()


@pytest.mark.parametrize("source", ["csv", "cells"])
def test_damaged_pictures_are_one_line(source: str, tmp_path: Path) -> None:
    path = write_table_of_picture(tmp_path, source, b"text")
    config = TableImages(name="t", train=path, test=path, size=8, classes=1, batch_size=1)
    with pytest.raises(ConfigError, match=r"^data\.train: .*: row 0: ") as caught:
        config.build(0, CPU)
    assert "; " in str(caught.value)
    assert "\n" not in str(caught.value)


def test_cells_that_are_no_images_are_named(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "a.jsonl", [{"image": [1, 2], "label": 0}])
    config = TableImages(name="t", train=path, test=path, size=8, classes=1, batch_size=1)
    with pytest.raises(ConfigError, match=r"row 0: 'image' is \[1, 2\], no image; write the path"):
        config.build(0, CPU)
