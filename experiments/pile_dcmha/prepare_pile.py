"""Write shards of the Pile's tokens in the order of Pythia's training, for pile_dcmha/405m.yaml.

    python experiments/pile_dcmha/prepare_pile.py --files FOLDER --out data/pile

The folder --files has one of the two sources that DCFormer's repository names. A stopped run
resumes when the same command is started again. Both sources hold records of 2,049 GPT-NeoX tokens:
2,048 inputs, and targets one token later. DCFormer (arXiv:2405.08553) trained on the first, which
its authors made of the second (docs/setups.md, section 10):

- Caiyun-AI/Pile_tfrecord: TFRecords, *pile.tfrecord.bN to train and *val_with_eos* to evaluate;
- EleutherAI/pythia_pile_idxmaps: the .idx and the parts of the .bin, joined to one file, and beside
  them the index maps *_doc_idx.npy, *_sample_idx.npy and *_shuffle_idx.npy of the splits train and
  valid, which GPT-NeoX writes when a training starts.

Tests read small files of both formats; neither source has been read itself.
"""

import argparse
import re
import struct
import sys
from collections.abc import Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from google.protobuf.empty_pb2 import Empty
from google.protobuf.unknown_fields import UnknownFieldSet
from numpy.typing import NDArray

from lit_attn.data.prepare import write_shards
from lit_attn.data.text.tokenizers import ByteEncoder, GptNeox
from lit_attn.schema.errors import ConfigError, OneLineParser, command

RECORD = 2049  # Tokens of a record.
MAGIC = b"MMIDIDX\0\0"
DTYPES = {4: np.int32, 8: np.uint16}

RECIPE = {"source": "pile", "tokenizer": "gpt-neox"}

Ids = NDArray[np.integer]


@command
def main(arguments: list[str] | None = None) -> int:
    """Return exit code 0 if the folder is complete, 2 after a ConfigError, 130 if interrupted."""
    parser = OneLineParser(
        prog="python experiments/pile_dcmha/prepare_pile.py", description=__doc__
    )
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--out", type=Path, required=True, metavar="PATH", help="folder to write")
    parser.add_argument("--limit", type=int, help="number of tokens after which to stop")
    text = "folder of Caiyun-AI/Pile_tfrecord or EleutherAI/pythia_pile_idxmaps"
    parser.add_argument("--files", type=Path, required=True, metavar="PATH", help=text)
    options = parser.parse_args(arguments)
    source = partial(read_pile, options.files)
    write_shards(source, Records(), RECIPE, options.out, options.limit)
    return 0


class Records(ByteEncoder):
    """Encoder of documents that are tokens already."""

    vocabulary = GptNeox().vocabulary

    def encode(self, documents: list[Any]) -> list[NDArray[np.unsignedinteger]]:
        return documents


def read_pile(folder: Path, skip: int) -> Iterator[tuple[str, Ids]]:
    """Return (split, ids) of every record; raise ConfigError for missing or torn files."""
    # The validation split is first, so that --limit cuts training alone.
    paths = sorted(folder.glob("*tfrecord*"), key=_order)
    indices = list(folder.glob("*.idx"))
    if not paths and len(indices) != 1:
        raise ConfigError(f"--files {folder}: has neither *tfrecord* files nor one .idx file")
    if paths:
        parts = ((_order(path)[0], _tfrecords(path)) for path in paths)
    else:
        parts = ((is_train, _samples(indices[0], is_train)) for is_train in (False, True))
    records = (("train" if is_train else "val", ids) for is_train, part in parts for ids in part)
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


def _samples(index: Path, is_train: bool) -> Iterator[Ids]:
    """Yield the records of a GPT-NeoX data set in the order of its shuffled index maps."""
    maps = []
    for kind in ("doc_idx", "sample_idx", "shuffle_idx"):
        name = f"*_{'train' if is_train else 'valid'}_*{kind}.npy"
        paths = list(index.parent.glob(name))
        if len(paths) != 1:
            raise ConfigError(f"--files {index.parent}: needs one {name}")
        maps.append(np.load(paths[0], mmap_mode="r", allow_pickle=False))
    documents, samples, order = maps
    with index.open("rb") as file:
        head = file.read(34)
        code, count = struct.unpack_from("<BQ", head, 17) if len(head) == 34 else (0, 0)
        if head[:9] != MAGIC or code not in DTYPES:
            raise ConfigError(f"{index}: is not an index of GPT-NeoX")
        sizes = np.fromfile(file, np.int32, count)
        starts = np.fromfile(file, np.int64, count) // np.dtype(DTYPES[code]).itemsize
    tokens = np.memmap(index.with_suffix(".bin"), DTYPES[code], mode="r")
    for sample in order:
        first, offset = samples[sample].tolist()
        last, end = samples[sample + 1].tolist()
        pieces = []
        for document in documents[first : last + 1]:
            start, stop = starts[document], starts[document] + sizes[document]
            pieces.append(tokens[start:stop])
        pieces[-1] = pieces[-1][: end + 1]
        pieces[0] = pieces[0][offset:]
        yield np.concatenate(pieces)


if __name__ == "__main__":
    sys.exit(main())
