"""Tests of warnings about classes without training samples, in every kind of labelled data."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lit_attn.data.image_sets import Npz
from lit_attn.data.labels import warn_of_missing_labels
from lit_attn.data.log import LOG, collect_warnings
from lit_attn.data.table_sets import TableLabels, TableTags
from lit_attn.data.text.labelled import LabelledText
from lit_attn.schema.errors import ConfigError

CPU = torch.device("cpu")
MISSING = "data.classes: 3 classes, but no training sample has the label 1"
UNTRAINED = (
    "data: 1 of 3 samples of test have the label 1, which no training sample has; they count as "
    "errors"
)


def build_npz(folder: Path) -> Any:
    labels = {"y_train": [0, 2, 0, 2], "y_test": [0, 1, 2]}
    arrays = {name: np.array(values) for name, values in labels.items()}
    arrays |= {name.replace("y", "x", 1): np.zeros((len(values), 4, 4, 1), np.uint8)
               for name, values in labels.items()}  # fmt: skip
    np.savez(folder / "a.npz", **arrays)
    return Npz(name="t", path=folder / "a.npz", size=4, channels=1, classes=3, batch_size=2)


def build_text(folder: Path) -> Any:
    for split, labels in (("train", "0202"), ("val", "02"), ("test", "012")):
        (folder / f"{split}.tsv").write_text("".join(f"{label}\ta\n" for label in labels))
    return LabelledText(name="t", folder=folder, context=4, classes=3, batch_size=2)


def write_table(folder: Path, rows: dict[str, list[str]], header: str) -> dict[str, Any]:
    for split, lines in rows.items():
        (folder / f"{split}.csv").write_text("\n".join([header, *lines]) + "\n")
    files = {split: folder / f"{split}.csv" for split in rows}
    return {"name": "t", **files, "context": 4, "classes": 3, "batch_size": 2}


def build_table(folder: Path) -> Any:
    rows = {"train": ["a,0", "b,2"], "val": ["a,0"], "test": ["a,0", "b,1", "c,2"]}
    return TableLabels.model_validate(write_table(folder, rows, "text,label"))


def build_tags(folder: Path) -> Any:
    rows = {"train": ["a b,0 2", "b,2"], "val": ["a,0"], "test": ["a b c,0 1 2"]}
    return TableTags.model_validate(write_table(folder, rows, "tokens,tags") | {"context": 8})


@pytest.mark.parametrize("build", [build_npz, build_text, build_table, build_tags])
def test_a_class_without_training_samples_is_a_warning(build: Any, tmp_path: Path) -> None:
    with collect_warnings() as messages:
        build(tmp_path).build(0, CPU)
    assert messages == [MISSING, UNTRAINED]


@pytest.mark.parametrize("build", [build_npz, build_text, build_table, build_tags])
def test_more_classes_than_the_data_have_are_refused_as_for_folders(
    build: Any, tmp_path: Path
) -> None:
    data = build(tmp_path).model_copy(update={"classes": 5})
    message = "data.classes: 5, but the labels of all splits are 0 to 2; set 3"
    with pytest.raises(ConfigError, match=message) as error:
        data.build(0, CPU)
    assert "\n" not in str(error.value)


def test_complete_labels_are_no_warning() -> None:
    labels = {"train": np.array([0, 1, 2]), "test": np.array([1, 1])}
    with collect_warnings() as messages:
        warn_of_missing_labels(labels, 3)
    assert messages == []


def test_many_labels_are_counted() -> None:
    with collect_warnings() as messages:
        warn_of_missing_labels({"train": np.array([0])}, 1000)
    text = "no training sample has the labels 1, 2, 3, 4, 5 and 994 more"
    assert messages == [f"data.classes: 1,000 classes, but {text}"]


def test_a_warning_is_collected_once_in_one_line() -> None:
    with collect_warnings() as messages:
        LOG.warning("a\nb")
        LOG.warning("a\nb")
    LOG.warning("later")
    assert messages == ["a b"]
