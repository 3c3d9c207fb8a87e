"""Tokens of the Pile in the order of Pythia's training, from the files of DCFormer's authors.

Caiyun-AI/Pile_tfrecord holds TFRecords, *pile.tfrecord.bN to train and *val_with_eos* to evaluate,
with records of 2,049 GPT-NeoX tokens: 2,048 inputs, and targets one token later. DCFormer
(arXiv:2405.08553) trained on them. Tests read small files of this format; the data set itself has
not been read.
"""

import re
import struct
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from google.protobuf.empty_pb2 import Empty
from google.protobuf.unknown_fields import UnknownFieldSet
from numpy.typing import NDArray

from lit_attn.config.data.text import GptNeox
from lit_attn.data.text.tokenizers import ByteEncoder
from lit_attn.schema.errors import ConfigError

RECORD = 2049
"""Tokens of a record."""

Ids = NDArray[np.integer]


class Records(ByteEncoder):
    """Encoder of documents that are tokens already."""

    vocabulary = GptNeox.vocabulary

    def encode(self, documents: list[Any]) -> list[NDArray[np.unsignedinteger]]:
        return documents


def read_pile(folder: Path, skip: int) -> Iterator[tuple[str, Ids]]:
    """Return (split, ids) of every record; raise ConfigError for missing or torn files."""
    # The validation split is first, so that --limit cuts training alone.
    paths = sorted(folder.glob("*tfrecord*"), key=_order)
    if not paths:
        raise ConfigError(f"prepare pile: {folder} has no *tfrecord* files")
    splits = ("val", "train")
    records = ((splits[_order(path)[0]], ids) for path in paths for ids in _tfrecords(path))
    return islice(records, skip, None)


def _order(path: Path) -> tuple[bool, int, str]:
    """Return False for the validation split, and the number by which files are read."""
    number = re.search(r"\d+$", path.name)
    return "val_with_eos" not in path.name, int(number[0]) if number else -1, path.name


def _tfrecords(path: Path) -> Iterator[Ids]:
    """Yield `input_ids` of every example: length and its checksum, data and their checksum."""
    with path.open("rb") as file:
        while header := file.read(12):
            size = struct.unpack("<Q", header[:8])[0] if len(header) == 12 else 0
            data = file.read(size + 4)
            if not size or len(data) != size + 4:
                raise ConfigError(f"{path}: ends within a record")
            yield _input_ids(path, data[:-4])


def _input_ids(path: Path, example: bytes) -> Ids:
    """Return the feature `input_ids` of a tf.train.Example, a list of packed integers."""
    # Example.features (1), map of feature (1), value (2), Feature.int64_list (3), value (1).
    for feature in _fields(_fields(example)[1][0])[1]:
        entry = _fields(feature)
        if entry[1] == [b"input_ids"]:
            ids = _varints(_fields(_fields(entry[2][0])[3][0])[1][0])
            if len(ids) == RECORD:
                return ids
            raise ConfigError(f"{path}: a record has {len(ids):,} tokens, not {RECORD:,}")
    raise ConfigError(f"{path}: a record has no feature input_ids")


def _fields(message: bytes) -> dict[int, list[bytes]]:
    """Return the length-delimited fields of a protocol buffer by their number."""
    fields: dict[int, list[bytes]] = {}
    for field in UnknownFieldSet(Empty.FromString(message)):
        fields.setdefault(field.field_number, []).append(field.data)
    return fields


def _varints(packed: bytes) -> Ids:
    """Return all integers of a packed field."""
    parts = np.frombuffer(packed, np.uint8)
    ends = np.flatnonzero(parts < 0x80)
    starts = np.concatenate([[0], ends[:-1] + 1])
    shifts = 7 * (np.arange(len(parts)) - np.repeat(starts, ends - starts + 1))
    return np.add.reduceat((parts & 0x7F).astype(np.int64) << shifts, starts)
