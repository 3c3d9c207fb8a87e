"""Tests of marks that are no text in any reader: byte-order marks, and separators within lines."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lit_attn.data import prepare
from lit_attn.data.text.labelled import LabelledText
from lit_attn.data.text.parallel import ParallelData, ParallelText, read_sides
from lit_attn.data.text.plain_text import TextFiles
from lit_attn.data.text.shards import Shards
from lit_attn.data.text.streams import read_lines
from lit_attn.data.text.tokenizers import GptNeox, Words
from lit_attn.schema.errors import ConfigError

MARK = "\ufeff"


def read_text_files(folder: Path, mark: str) -> Any:
    path = folder / "text.txt"
    path.write_text(f"{mark}a b\n" * 1 + "c d\n" * 20, encoding="utf-8")
    return TextFiles(name="t", train=path).texts()["train"][0][1]


def read_labelled(folder: Path, mark: str) -> Any:
    for split in ("train", "val", "test"):
        (folder / f"{split}.tsv").write_text(f"{mark}0\ta\n1\tb\n", encoding="utf-8")
    samples = LabelledText(name="t", folder=folder, context=4).read_samples()["train"]
    return [(label, documents[0].tolist()) for documents, label in samples]


def parallel_text(folder: Path, lines: dict[str, str]) -> ParallelText:
    for name in ("train", "valid", "test"):
        for language, text in lines.items():
            (folder / f"{name}.{language}").write_bytes(text.encode())
    return ParallelText(name="t", folder=folder, vocabulary=60, batch_size=64)


def read_parallel(folder: Path, mark: str) -> Any:
    return read_sides(
        parallel_text(folder, {"de": f"{mark}a\nb\n", "en": f"{mark}c\nd\n"}), "train"
    )


def read_prepared(folder: Path, mark: str) -> Any:
    path = folder / "text.txt"
    path.write_text(f"{mark}abc", encoding="utf-8")
    return list(prepare.read_files({"train": path, "val": None, "test": None}, 0))


def read_words(folder: Path, mark: str) -> Any:
    (folder / "vocabulary.txt").write_text(f"{mark}a\nb\n<eos>\n", encoding="utf-8")
    return Shards(name="t", folder=folder, tokenizer=Words(size=3)).encoder().words


def read_tokenizer(folder: Path, mark: str) -> Any:
    from tokenizers import Tokenizer, models

    tokenizer = Tokenizer(models.BPE({"<|endoftext|>": 0, "a": 1}, []))
    (folder / "tokenizer.json").write_text(mark + tokenizer.to_str(), encoding="utf-8")
    return GptNeox(file=folder / "tokenizer.json", size=2).encoder(()).prompt("aa")


def read_meta(folder: Path, mark: str) -> Any:
    for split in ("train", "val"):
        np.arange(20, dtype=np.uint32).tofile(folder / f"{split}.bin")
    meta = json.dumps({"vocabulary": 50_257, "tokenizer": "gpt2", "dtype": "uint32"})
    (folder / "meta.json").write_text(mark + meta, encoding="utf-8")
    return Shards(name="t", folder=folder).streams()["train"].read(0, 20).tolist()


READERS: list[Callable[[Path, str], Any]] = [
    read_text_files,
    read_labelled,
    read_parallel,
    read_prepared,
    read_words,
    read_tokenizer,
    read_meta,
]


@pytest.mark.parametrize("reader", READERS)
def test_a_byte_order_mark_is_no_text(reader: Callable[[Path, str], Any], tmp_path: Path) -> None:
    assert reader(tmp_path, MARK) == reader(tmp_path, "")


SEPARATORS = ["\u2028", "\u2029", "\x85", "\x0b", "\x0c", "\x1c", "\x1d", "\x1e", "\r"]


@pytest.mark.parametrize("separator", SEPARATORS)
def test_other_separators_do_not_shift_the_pairs(separator: str, tmp_path: Path) -> None:
    """The separators are in other lines of the two sides, so their numbers of lines are equal."""
    first = f"a{separator}b\nc\nd\n"
    second = f"A\nB\nC{separator}D\n"
    sides = read_sides(parallel_text(tmp_path, {"de": first, "en": second}), "train")
    assert sides == [["a b", "c", "d"], ["A", "B", "C D"]]


@pytest.mark.parametrize("separator", SEPARATORS)
def test_other_separators_are_text_of_a_labelled_line(separator: str, tmp_path: Path) -> None:
    for split in ("train", "val", "test"):
        content = f"0\ta{separator}b\r\n1\tc\r\n"
        (tmp_path / f"{split}.tsv").write_bytes(content.encode())
    samples = LabelledText(name="t", folder=tmp_path, context=9).read_samples()["train"]
    texts = [bytes((documents[0] - 1).tolist()).decode() for documents, _ in samples]
    assert texts == [f"a{separator}b", "c"]


def test_lines_end_with_line_feeds(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"a\r\nb\n\nc\r\n")
    assert read_lines(path) == ["a", "b", "", "c"]
    path.write_bytes(b"a\rb\r")
    with pytest.raises(ConfigError, match=r"a\.txt: its lines end with carriage returns alone"):
        read_lines(path)


def test_invisible_characters_of_a_label_are_shown(tmp_path: Path) -> None:
    for split in ("train", "val", "test"):
        (tmp_path / f"{split}.tsv").write_text("\u200b0\ta\n", encoding="utf-8")
    data = LabelledText(name="t", folder=tmp_path, context=4)
    with pytest.raises(ConfigError, match=r"train\.tsv:1: label '\\u200b0' is not one of 0 to 1"):
        data.read_samples()


def test_empty_sentences_are_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    data = parallel_text(tmp_path, {"de": "a\n\nc\n", "en": "a\nb\n  \n"})
    assert read_sides(data, "train") == [["a", "", "c"], ["a", "b", ""]]
    (record,) = caplog.records
    text = f"{tmp_path / 'train.de'} and train.en: 2 of 3 pairs have an empty sentence, the first"
    assert record.getMessage().startswith(f"{text} in line 2; if lines are missing")


def test_an_empty_last_line_counts(tmp_path: Path) -> None:
    data = parallel_text(tmp_path, {"de": "a\nb\n", "en": "a\nb\n\n"})
    with pytest.raises(ConfigError, match=r"train\.en: has 3 lines, and train\.de has 2"):
        read_sides(data, "train")


def test_pairs_that_are_left_out_are_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lines = "a b\n" * 6 + "a b " * 20 + "\n"
    for language in ("de", "en"):
        for name, text in (("train", lines), ("valid", "a b\n"), ("test", "a b\n")):
            (tmp_path / f"{name}.{language}").write_text(text)
    data = ParallelText(name="t", folder=tmp_path, vocabulary=60, batch_size=64, context=20)
    ParallelData(data, 0, torch.device("cpu"))
    messages = [record.getMessage() for record in caplog.records]
    text = "data.context: 1 of 7 training pairs are left out, because a side exceeds 20 subwords"
    assert messages == [text]
