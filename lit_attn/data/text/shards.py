"""Files of token ids: as nanoGPT, modded-nanogpt and `lit_attn.data.prepare` write them."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from lit_attn.data.text.stream import Ids, Source, Stream
from lit_attn.schema.errors import ConfigError

META = "meta.json"
DTYPES = ("uint8", "uint16", "uint32")
VOCABULARY = "vocabulary.txt"

# modded-nanogpt's header: 256 int32, of which these are the first two and the third is a count.
MAGIC, VERSION, HEADER_BYTES = 20240520, 1, 1024


def streams(folder: Path, vocabulary: int) -> dict[str, Stream]:
    """The splits that `folder` has; ConfigError for a file that is not whole, empty or missing."""
    meta = read_meta(folder)
    if meta and meta["vocabulary"] != vocabulary:
        raise ConfigError(
            f"{folder / META}: its vocabulary is {meta['vocabulary']} ({meta['tokenizer']}), "
            f"configured is {vocabulary}"
        )
    dtype = np.dtype(meta.get("dtype", "uint16"))
    splits = {}
    for split in ("train", "val", "test"):
        paths = sorted(folder.glob(f"*{split}*.bin"))
        if not paths and split != "test":
            raise ConfigError(f"{folder}: has no {split}.bin")
        if paths:
            text = meta.get("splits", {}).get(split, {})
            sources = [Source(str(path), open_shard(path, dtype)) for path in paths]
            splits[split] = Stream(sources, vocabulary, text.get("bytes"), text.get("words"))
    return splits


def open_shard(path: Path, dtype: np.dtype[Any]) -> Ids:
    """The ids of one file, mapped into memory and not read."""
    try:
        size = path.stat().st_size
        if size == 0:
            raise ConfigError(f"{path}: is empty")
        offset = _header(path, size)
        if (size - offset) % dtype.itemsize:
            raise ConfigError(
                f"{path}: {size - offset:,} bytes are not whole tokens of {dtype.itemsize} bytes"
            )
        return np.memmap(path, dtype=dtype, mode="r", offset=offset)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error


def read_meta(folder: Path) -> dict[str, Any]:
    """What `prepare` wrote of a folder; nothing where another tool made it."""
    path = folder / META
    if not path.exists():
        return {}
    try:
        meta: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read as JSON: {error}") from error
    if not isinstance(meta, dict) or not {"vocabulary", "tokenizer"} <= meta.keys():
        raise ConfigError(f"{path}: does not say its vocabulary and tokenizer")
    if meta.get("dtype", "uint16") not in DTYPES:
        raise ConfigError(f"{path}: dtype '{meta['dtype']}' is none of {', '.join(DTYPES)}")
    return meta


def _header(path: Path, size: int) -> int:
    """Bytes before the first token."""
    if size < HEADER_BYTES:
        return 0
    magic, version, count = np.fromfile(path, dtype="<i4", count=3)
    if (magic, version) != (MAGIC, VERSION):
        return 0
    if HEADER_BYTES + 2 * int(count) != size:
        raise ConfigError(
            f"{path}: its header counts {count:,} tokens, its size {(size - HEADER_BYTES) // 2:,}"
        )
    return HEADER_BYTES
