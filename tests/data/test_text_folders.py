"""Text files in folders of classes."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lit_attn.data.text.text_folders import TextFolder, read_text_folder
from lit_attn.schema.errors import ConfigError


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


FILES = {
    "train/good/10.txt": "great",
    "train/good/9.txt": "fine",
    "train/bad/deep/1.txt": "poor",
    "test/bad/1.txt": "é",
    "test/good/1.txt": "",
}


def read(root: Path, **changes: Any) -> Any:
    return read_text_folder(TextFolder(name="t", path=root, context=16, **changes))


def test_the_class_is_the_first_folder_below_the_split(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write(tmp_path, FILES | {"train/good/notes.md": "not read"})
    samples = read(tmp_path)
    read_back = {}
    for split, part in samples.items():
        texts = [bytes((sample.documents[0] - 1).astype(np.uint8)) for sample in part]
        read_back[split] = list(zip(texts, [sample.label for sample in part], strict=True))
    assert read_back["train"] == [(b"poor", 0), (b"fine", 1), (b"great", 1)]
    # An empty text is a space, and a letter may have several bytes.
    assert read_back["test"] == [("é".encode(), 0), (b" ", 1)]
    # A single evaluated folder is the test: what is chosen by it would be chosen by test results.
    assert read_back.keys() == {"train", "test"}
    assert "test: 1 of 2 texts are empty, and each is read as one space" in caplog.text
    assert "left out 1 file: .md (1); files that are read end in .txt" in caplog.text


def test_val_and_test_are_two_splits(tmp_path: Path) -> None:
    write(tmp_path, FILES | {"val/good/1.txt": "nice"})
    samples = read(tmp_path)
    assert [len(samples[split]) for split in ("train", "val", "test")] == [3, 1, 2]


def test_a_vocabulary_of_words_comes_from_the_training_texts(tmp_path: Path) -> None:
    write(tmp_path, {"train/a/1.txt": "x y x", "train/b/1.txt": "y x", "test/a/1.txt": "y"})
    samples = read(tmp_path, tokenizer={"kind": "words", "size": 3}, vocabulary=300)
    lengths = [len(sample.documents[0]) for sample in samples["train"]]
    assert lengths == [3, 2]


@pytest.mark.parametrize(
    ("files", "changes", "message"),
    [
        ({"train/loose.txt": "x"}, {}, "train has 1 text outside of its class folders, as loose"),
        (
            {"train/empty/notes.md": "x"},
            {},
            "empty has no texts; add texts that end in one",
        ),
        ({"test/ugly/1.txt": "x"}, {}, "ugly: no such class in train"),
        ({}, {"classes": 3}, "data.classes: 3, but .* has texts of 2 classes: bad, good"),
    ],
)
def test_odd_folders_are_one_error(
    files: dict[str, str], changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    write(tmp_path, FILES | files)
    with pytest.raises(ConfigError, match=message):
        read(tmp_path, **changes)


def test_a_file_that_is_not_utf8_is_named(tmp_path: Path) -> None:
    write(tmp_path, FILES)
    (tmp_path / "train/good/9.txt").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match=r"9\.txt:1: not UTF-8 text \(byte 0\)"):
        read(tmp_path)


def test_a_vocabulary_needs_an_id_for_padding(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="vocabulary: 300, but the tokenizer has 50257 ids and 0"):
        TextFolder(name="t", path=tmp_path, context=8, vocabulary=300, tokenizer={"kind": "gpt2"})
