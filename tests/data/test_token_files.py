"""Tests of the integer type of token files: stated, recognised, or refused."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy.typing import NDArray

from lit_attn.data.text.ids import TOKEN_TYPES
from lit_attn.data.text.shards import Shards
from lit_attn.data.text.token_files import HEADER_TYPES, TokenType, open_tokens
from lit_attn.data.text.tokenizers import GptNeox
from lit_attn.schema.errors import ConfigError

IDS = np.arange(7, 107)


def write(folder: Path, written: str, ids: NDArray[Any] = IDS, **changes: Any) -> Shards:
    for split in ("train", "val"):
        ids.astype(written).tofile(folder / f"{split}.bin")
    return Shards.model_validate({"name": "t", "folder": folder, **changes})


def read(data: Shards) -> list[int]:
    stream = data.streams()["train"]
    return stream.read(0, len(stream)).tolist()


@pytest.mark.parametrize("dtype", TOKEN_TYPES)
def test_files_of_every_type_are_read(dtype: str, tmp_path: Path) -> None:
    data = write(tmp_path, dtype, dtype=dtype)
    assert read(data) == IDS.tolist()
    assert data.identity() == write(tmp_path, dtype).identity()


@pytest.mark.parametrize(
    ("written", "configured", "remedy"),
    [
        ("uint32", None, "uint32"),
        ("int32", None, "uint32"),
        ("int64", None, "int64"),
        ("uint32", "uint16", "uint32"),
        ("uint16", "uint8", "uint16"),
        ("uint32", "uint8", "uint32"),
        ("int64", "uint32", "int64"),
        ("int64", "int32", "int64"),
    ],
)
def test_a_wider_type_is_recognised_by_its_zeros(
    written: str, configured: str | None, remedy: str, tmp_path: Path
) -> None:
    data = write(tmp_path, written, dtype=configured)
    read_as = configured or "uint16"
    message = rf"train\.bin: every second token is 0 .* {read_as}, .*; set data\.dtype: {remedy}$"
    with pytest.raises(ConfigError, match=message):
        data.streams()
    assert read(write(tmp_path, written, dtype=remedy)) == IDS.tolist()


@settings(max_examples=30, deadline=None)
@given(arrays(np.uint16, st.integers(16, 60), elements=st.integers(1, 50_256)))
def test_no_file_of_wide_ids_is_read_as_narrow(
    tmp_path_factory: pytest.TempPathFactory, ids: NDArray[np.uint16]
) -> None:
    path = tmp_path_factory.mktemp("tokens") / "train.bin"
    ids.tofile(path)
    assert open_tokens(path, None, 50_257).tolist() == ids.tolist()
    ids.astype(np.uint32).tofile(path)
    with pytest.raises(ConfigError, match=r"set data\.dtype: uint32"):
        open_tokens(path, None, 50_257)
    assert open_tokens(path, TokenType("uint32", ""), 50_257).tolist() == ids.tolist()


def test_high_halves_of_a_large_vocabulary_are_recognised(tmp_path: Path) -> None:
    """Ids up to 128,000 have the high halves 0 and 1."""
    ids = np.random.default_rng(0).integers(128_000, size=200)
    data = write(tmp_path, "uint32", ids, tokenizer=GptNeox(size=128_000), dtype="uint16")
    with pytest.raises(ConfigError, match="every second token is 0"):
        data.streams()


def test_big_endian_ids_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="wider big-endian ids; write it again"):
        write(tmp_path, ">u4").streams()


def test_short_files_and_files_of_zeros_have_no_pattern(tmp_path: Path) -> None:
    assert read(write(tmp_path, "uint16", np.array([5, 0] * 4))) == [5, 0] * 4
    assert read(write(tmp_path, "uint16", np.zeros(40))) == [0] * 40


def test_a_type_that_is_too_narrow_for_the_vocabulary_is_not_assumed(tmp_path: Path) -> None:
    data = write(tmp_path, "uint32", tokenizer=GptNeox(size=100_000))
    with pytest.raises(ConfigError, match=r"vocabulary of 100,000 do not fit into uint16, .*dtype"):
        data.streams()


@pytest.mark.parametrize("size", [101, 7])
@pytest.mark.parametrize("dtype", ["uint16", "uint32", "int64"])
def test_a_torn_file_is_refused(size: int, dtype: str, tmp_path: Path) -> None:
    data = write(tmp_path, dtype, dtype=dtype)
    (tmp_path / "train.bin").write_bytes(b"\1" * size)
    message = rf"train\.bin: {size} bytes are not whole tokens of {np.dtype(dtype).itemsize} bytes"
    with pytest.raises(ConfigError, match=message):
        data.streams()


@pytest.mark.parametrize("place", [0, 50, 99])
def test_negative_ids_are_refused(place: int, tmp_path: Path) -> None:
    ids = IDS.copy()
    ids[place] = -1
    data = write(tmp_path, "int32", ids, dtype="int32")
    with pytest.raises(ConfigError, match=rf"train\.bin: token {place} is -1, beyond"):
        read(data)


def write_meta(folder: Path, **changes: Any) -> None:
    meta = {"vocabulary": 50_257, "tokenizer": "gpt2", **changes}
    (folder / "meta.json").write_text(json.dumps(meta))


def test_the_type_of_meta_json_is_used(tmp_path: Path) -> None:
    data = write(tmp_path, "uint32")
    write_meta(tmp_path, dtype="uint32")
    assert read(data) == IDS.tolist()
    with pytest.raises(ConfigError, match=r"data\.dtype: uint16, but .*meta\.json says uint32"):
        write(tmp_path, "uint32", dtype="uint16").streams()


def test_meta_json_without_a_type_states_none(tmp_path: Path) -> None:
    data = write(tmp_path, "uint32")
    write_meta(tmp_path)
    with pytest.raises(ConfigError, match=r"set data\.dtype: uint32"):
        data.streams()


def test_the_counts_of_meta_json_are_checked(tmp_path: Path) -> None:
    data = write(tmp_path, "uint16")
    write_meta(tmp_path, dtype="uint16", splits={"train": {"tokens": 100}, "val": {"tokens": 99}})
    with pytest.raises(ConfigError, match=r"meta\.json: counts 99 tokens of val, but .* have 100"):
        data.streams()
    write_meta(tmp_path, splits=[])
    with pytest.raises(ConfigError, match=r"meta\.json: cannot be used: 'splits' is not a mapping"):
        data.streams()


@pytest.mark.parametrize(("key", "dtype"), HEADER_TYPES.items())
def test_a_header_states_the_type(key: tuple[int, int], dtype: str, tmp_path: Path) -> None:
    header = np.zeros(256, np.int32)
    header[:3] = *key, len(IDS)
    for split in ("train", "val"):
        content = header.tobytes() + IDS.astype(dtype).tobytes()
        (tmp_path / f"{split}.bin").write_bytes(content)
    assert read(Shards(name="t", folder=tmp_path)) == IDS.tolist()
    message = rf"train\.bin: has tokens of {dtype}, but data\.dtype says int64"
    with pytest.raises(ConfigError, match=message):
        Shards(name="t", folder=tmp_path, dtype="int64").streams()
    header[1] = 99
    (tmp_path / "val.bin").write_bytes(header.tobytes())
    with pytest.raises(ConfigError, match=r"val\.bin: its header has the version 99"):
        Shards(name="t", folder=tmp_path).streams()


@pytest.mark.parametrize("dtype", TOKEN_TYPES)
def test_arrays_of_numpy_state_their_type(dtype: str, tmp_path: Path) -> None:
    for split in ("train", "val"):
        np.save(tmp_path / f"{split}.npy", IDS.astype(dtype))
    assert read(Shards(name="t", folder=tmp_path)) == IDS.tolist()


def test_arrays_that_are_no_tokens_are_refused(tmp_path: Path) -> None:
    data = Shards(name="t", folder=tmp_path)
    np.save(tmp_path / "val.npy", IDS.astype(np.uint16))
    for array in (IDS.astype(np.float32), IDS.reshape(4, -1)):
        np.save(tmp_path / "train.npy", array)
        with pytest.raises(ConfigError, match=r"train\.npy: has \w+ numbers of the shape"):
            data.streams()
    (tmp_path / "train.npy").write_bytes(b"text")
    with pytest.raises(ConfigError, match=r"train\.npy: cannot be read as \.npy: "):
        data.streams()
    np.save(tmp_path / "train.npy", IDS.astype(np.uint16))
    IDS.astype(np.uint16).tofile(tmp_path / "train_2.bin")
    with pytest.raises(ConfigError, match=r"train has \.bin and \.npy files; keep one"):
        data.streams()
