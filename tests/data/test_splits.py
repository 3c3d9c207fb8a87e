"""Tests of the splits that the names of files state."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lit_attn.data.splits import WORDS, find_split, group_by_split
from lit_attn.data.text.shards import Shards
from lit_attn.schema.errors import ConfigError

OTHER_WORDS = ("pretrain", "latest", "interval", "constrained", "contest", "retraining", "eval")
SEPARATORS = ("_", "-", ".", " ", "0", "_000012_", "@")


@pytest.mark.parametrize(
    ("name", "split"),
    [
        ("train", "train"),
        ("pretrain_train", "train"),
        ("pretrain_val", "val"),
        ("latest_train", "train"),
        ("fineweb_val_000001", "val"),
        ("TRAIN-00001-of-00042", "train"),
        ("train001", "train"),
        ("my.validation", "val"),
        ("training", "train"),
        ("contest", None),
        ("pretrain", None),
        ("интервал_val", "val"),
        ("", None),
    ],
)
def test_a_split_is_a_word_of_the_name(name: str, split: str | None) -> None:
    assert find_split(name, name) == split


@settings(max_examples=60, deadline=None)
@given(
    word=st.sampled_from([(split, word) for split, words in WORDS.items() for word in words]),
    others=st.lists(st.sampled_from(OTHER_WORDS), max_size=3),
    place=st.integers(0, 3),
    separator=st.sampled_from(SEPARATORS),
    is_upper=st.booleans(),
)
def test_other_words_do_not_matter(
    word: tuple[str, str], others: list[str], place: int, separator: str, is_upper: bool
) -> None:
    words = [*others[:place], word[1], *others[place:]]
    name = separator.join(words)
    assert find_split(name.upper() if is_upper else name, name) == word[0]
    assert find_split(separator.join(others), name) is None


@pytest.mark.parametrize("name", ["train_val", "test-train", "val.train.test", "valid training"])
def test_a_name_with_two_splits_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"^{name}: its name states the splits \w+ and \w+"):
        find_split(name, name)


def test_two_names_of_one_file_are_refused_in_two_splits(tmp_path: Path) -> None:
    file = tmp_path / "train.bin"
    file.write_bytes(b"\0\0")
    (tmp_path / "train_again.bin").symlink_to(file)
    (tmp_path / "other.bin").symlink_to(file)
    assert set(group_by_split(tmp_path.glob("*.bin"))) == {"train", None}
    (tmp_path / "val.bin").symlink_to(file)
    message = r"val\.bin: is the same file as train\.bin, and .* the splits train and val"
    with pytest.raises(ConfigError, match=message):
        group_by_split(tmp_path.glob("*.bin"))


def write(folder: Path, *names: str) -> Shards:
    """Write files of equal ids, which are the file's place among `names`."""
    for number, name in enumerate(names):
        np.full(20, number, np.uint16).tofile(folder / f"{name}.bin")
    return Shards(name="t", folder=folder)


def test_shards_of_words_within_words_are_no_other_split(tmp_path: Path) -> None:
    streams = write(tmp_path, "pretrain_train", "pretrain_val", "latest_train").streams()
    assert set(streams) == {"train", "val"}
    assert set(streams["train"].read(0, 40).tolist()) == {0, 2}
    assert set(streams["val"].read(0, 20).tolist()) == {1}


def test_a_shard_in_two_splits_is_refused(tmp_path: Path) -> None:
    data = write(tmp_path, "train", "val", "train_val")
    with pytest.raises(ConfigError, match=r"train_val\.bin: its name states the splits train and"):
        data.streams()


def test_shards_without_a_split_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(tmp_path, "train", "val", "tokens").streams()
    text = f"{tmp_path}: 1 file is left out, because no word in the name is a split: tokens.bin"
    assert [record.getMessage() for record in caplog.records] == [text]
    (tmp_path / "val.bin").rename(tmp_path / "interval.bin")
    with pytest.raises(
        ConfigError, match=r"no file of the split val; .* there are interval\.bin, tokens\.bin"
    ):
        Shards(name="t", folder=tmp_path).streams()


def test_files_of_a_split_are_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    paths = [tmp_path / f"train-{number}.txt" for number in (10, 9, 100, 1)]
    groups = group_by_split(paths)
    assert [path.stem for path in groups["train"]] == [f"train-{n}" for n in (1, 9, 10, 100)]
