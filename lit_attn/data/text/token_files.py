"""Files of token ids: their integer type, their header, and the checks of both.

Shapes: the ids of a file are one array (count,) of integers, mapped into memory.
"""

import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from lit_attn.data.text.ids import TOKEN_TYPES
from lit_attn.data.text.streams import Ids
from lit_attn.schema.errors import ConfigError

META = "meta.json"
DEFAULT_TYPE = "uint16"  # Type of nanoGPT's files, which do not state it.

# A header is 256 int32: a magic number, a version, the count of tokens, zeros. The first format is
# that of modded-nanogpt and of llm.c for GPT-2, the second that of llm.c for Llama 3.
HEADER_BYTES = 1024
HEADER_TYPES = {(20240520, 1): "uint16", (20240801, 7): "uint32"}
MAGIC_NUMBERS = {magic for magic, _ in HEADER_TYPES}

SAMPLE = 1_000_000  # Tokens at the start of a file that are searched for the pattern of zeros.
SHORTEST = 16  # Tokens of a file from which the pattern is more than a coincidence.


class TokenType(NamedTuple):
    """Integer type of the ids in a folder's files, and the place that states it (empty: none)."""

    name: str
    source: str


class Header(NamedTuple):
    """Type and number of the tokens that follow a header."""

    type: str
    tokens: int


def choose_type(configured: str | None, meta: dict[str, Any], folder: Path) -> TokenType | None:
    """Return the type that `data.dtype` or meta.json states, or None.

    Raises ConfigError if they differ.
    """
    stated: str | None = meta.get("dtype")
    if configured is None:
        return None if stated is None else TokenType(stated, f"{folder / META}")
    if stated not in (None, configured):
        raise ConfigError(
            f"data.dtype: {configured}, but {folder / META} says {stated}; remove data.dtype"
        )
    return TokenType(configured, "data.dtype")


def open_tokens(path: Path, stated: TokenType | None, vocabulary: int) -> Ids:
    """Map the ids of one file into memory, without reading them all.

    Raises ConfigError for a file that is empty, torn or of another type than stated, and for a type
    that was not stated and cannot be right.
    """
    try:
        if path.stat().st_size == 0:
            raise ConfigError(f"{path}: is empty")
        if path.suffix == ".npy":
            return _open_array(path, stated)
        header = _read_header(path)
        if header is not None:
            return _open_with_header(path, header, stated)
        return _open_plain(path, stated, vocabulary)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from error


def _open_array(path: Path, stated: TokenType | None) -> Ids:
    """Map a .npy file, which states its type and its shape."""
    try:
        ids: Ids = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise ConfigError(f"{path}: cannot be read as .npy: {error}") from error
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise ConfigError(
            f"{path}: has {ids.dtype} numbers of the shape {ids.shape}; token ids are integers of "
            "the shape (count,)"
        )
    _require_type(path, ids.dtype.name, stated)
    return ids


def _read_header(path: Path) -> Header | None:
    """Return the header of a .bin file, or None if it has none.

    Raises ConfigError for a version that is unknown.
    """
    start = np.fromfile(path, "<i4", 3).tolist()
    if len(start) < 3 or start[0] not in MAGIC_NUMBERS:
        return None
    magic, version, count = start
    if (magic, version) not in HEADER_TYPES:
        raise ConfigError(
            f"{path}: its header has the version {version}, which is unknown; write the file "
            "without a header and set data.dtype"
        )
    return Header(HEADER_TYPES[magic, version], count)


def _open_with_header(path: Path, header: Header, stated: TokenType | None) -> Ids:
    """Return the ids after a header; raise ConfigError if the file contradicts it or `stated`."""
    _require_type(path, header.type, stated)
    dtype = np.dtype(header.type)
    tokens_bytes = path.stat().st_size - HEADER_BYTES
    if tokens_bytes != header.tokens * dtype.itemsize:
        raise ConfigError(
            f"{path}: its header counts {header.tokens:,} tokens, its size "
            f"{tokens_bytes // dtype.itemsize:,} of {dtype}; the file is torn"
        )
    return np.memmap(path, dtype=dtype, mode="r", offset=HEADER_BYTES)


def _require_type(path: Path, written: str, stated: TokenType | None) -> None:
    """Raise ConfigError if a file states another type than `stated`."""
    if stated is not None and stated.name != written:
        raise ConfigError(
            f"{path}: has tokens of {written}, but {stated.source} says {stated.name}; correct it"
        )


def _open_plain(path: Path, stated: TokenType | None, vocabulary: int) -> Ids:
    """Map a file of ids alone, whose type the file does not state."""
    token_type = stated or TokenType(DEFAULT_TYPE, "")
    dtype = np.dtype(token_type.name)
    size = path.stat().st_size
    if size % dtype.itemsize:
        raise ConfigError(
            f"{path}: {size:,} bytes are not whole tokens of {dtype.itemsize} bytes ({dtype}); the "
            "file is torn, or set data.dtype"
        )
    if stated is None and vocabulary - 1 > np.iinfo(dtype).max:
        raise ConfigError(
            f"{path}: the ids of a vocabulary of {vocabulary:,} do not fit into {dtype}, the type "
            "of files that do not state one; set data.dtype, for example to uint32"
        )
    ids = np.memmap(path, dtype=dtype, mode="r")
    # The program that wrote the ids also wrote meta.json, so its type needs no check.
    if token_type.source in ("", "data.dtype"):
        _require_no_wider_type(path, ids, vocabulary)
    return ids


def _require_no_wider_type(path: Path, ids: Ids, vocabulary: int) -> None:
    """Raise ConfigError if the zeros among the ids show that the file has a wider type.

    The high half of a wide id is 0, so every second narrow id is 0. Beyond 65,536 ids the high half
    is at most the high half of the largest id.
    """
    bits = 8 * ids.dtype.itemsize
    if bits == 64 or len(ids) < SHORTEST:
        return
    largest_high_half = (vocabulary - 1) >> bits if bits > 8 else 0
    sample = np.asarray(ids[: min(SAMPLE, len(ids) // 2 * 2)])
    first, second = sample[0::2], sample[1::2]
    if not first.any() and second.any():
        raise ConfigError(
            f"{path}: every second token is 0 if it is read as {ids.dtype}, as in a file of wider "
            "big-endian ids; write it again with little-endian ids"
        )
    if second.max() > largest_high_half or not first.any():
        return
    wider = 2 * bits
    quarters = sample[: len(sample) // 4 * 4].reshape(-1, 4)
    if bits < 32 and not quarters[:, 2:].any():
        wider = 4 * bits
    name = "int64" if wider == 64 else f"uint{wider}"
    raise ConfigError(
        f"{path}: every second token is 0 if it is read as {ids.dtype}, as in a file of wider ids; "
        f"set data.dtype: {name}"
    )


def read_meta(folder: Path) -> dict[str, Any]:
    """Return the meta.json that `prepare` wrote, or an empty dictionary if there is none."""
    path = folder / META
    if not path.exists():
        return {}
    try:
        meta: dict[str, Any] = json.loads(path.read_text(encoding="utf-8-sig"))
        if not isinstance(meta, dict) or not {"vocabulary", "tokenizer"} <= meta.keys():
            raise ValueError("has no 'vocabulary' and 'tokenizer'; prepare the folder again")
        dtype = meta.get("dtype", DEFAULT_TYPE)
        if dtype not in TOKEN_TYPES:
            raise ValueError(f"dtype '{dtype}' is not one of {', '.join(TOKEN_TYPES)}")
        splits = meta.setdefault("splits", {})
        if not isinstance(splits, dict) or not all(isinstance(s, dict) for s in splits.values()):
            raise ValueError("'splits' is not a mapping of counts; prepare the folder again")
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be used: {error}") from error
    return meta
