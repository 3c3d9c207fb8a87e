"""Streams of token ids, one for each split, from memory or from files of any size."""

import math
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lit_attn import files
from lit_attn.data.sets import digest
from lit_attn.data.text.tokenizers import Encoder, Tokenizer, encoding
from lit_attn.schema.errors import ConfigError

Ids = NDArray[np.integer]

# Blocks of a stream that its hash covers, evenly spaced: all of them up to 67M tokens.
BLOCK = 65_536
BLOCKS = 1024


class Source(NamedTuple):
    """Ids of one file or text, and the name that errors use for it."""

    name: str
    ids: Ids


class Stream:
    """Concatenated sources. `text_bytes` are those of the original text, if known.

    Raises ConfigError for an empty source and, when ids are read, for an id that is negative or
    beyond the vocabulary.
    """

    def __init__(
        self, sources: list[Source], vocabulary: int, text_bytes: int | None = None
    ) -> None:
        for source in sources:
            if not len(source.ids):
                raise ConfigError(f"{source.name}: is empty")
        self.sources = sources
        self.vocabulary = vocabulary
        self.text_bytes = text_bytes
        self.starts = np.cumsum([0, *(len(source.ids) for source in sources)])

    def __len__(self) -> int:
        return int(self.starts[-1])

    def read(self, start: int, count: int) -> NDArray[np.int64]:
        """Return `count` ids from position `start` on."""
        parts = []
        number = int(np.searchsorted(self.starts, start, side="right")) - 1
        while count:
            source = self.sources[number]
            offset = start - int(self.starts[number])
            ids = source.ids[offset : offset + count]
            if ids.max() >= self.vocabulary or ids.min() < 0:
                is_outside = (ids >= self.vocabulary) | (ids < 0)
                place = int(np.argmax(is_outside))
                raise ConfigError(
                    f"{source.name}: token {offset + place:,} is {ids[place]}, beyond the "
                    f"vocabulary of {self.vocabulary}"
                )
            parts.append(ids.astype(np.int64))
            start += len(ids)
            count -= len(ids)
            number += 1
        return np.concatenate(parts)

    def head(self, count: int) -> "Stream":
        """Return the first `count` ids as a stream that does not know its bytes."""
        if count >= len(self):
            return self
        number = int(np.searchsorted(self.starts, count, side="left"))
        last = self.sources[number - 1]
        cut = Source(last.name, last.ids[: count - int(self.starts[number - 1])])
        return Stream([*self.sources[: number - 1], cut], self.vocabulary)

    @cached_property
    def fingerprint(self) -> str:
        """Hash of the length, the vocabulary and up to BLOCKS blocks of BLOCK ids."""
        return digest(self._list_content())

    def _list_content(self) -> Iterator[str | NDArray[np.int64]]:
        """Yield what the hash covers."""
        yield f"{len(self)} {self.vocabulary}"
        count = math.ceil(len(self) / BLOCK)
        blocks = np.unique(np.linspace(0, count - 1, min(count, BLOCKS)).astype(int))
        for block in blocks:
            start = int(block) * BLOCK
            yield self.read(start, min(BLOCK, len(self) - start))


def encode_texts(
    tokenizer: Tokenizer, texts: dict[str, list[tuple[str, str]]]
) -> dict[str, Stream]:
    """Return the token streams of `texts`, the (name, text) of every document of every split.

    Raises ConfigError, which names the split, for a text that the tokenizer cannot encode.
    """
    training = texts["train"] if tokenizer.is_learned else []
    encode: Encoder = tokenizer.encoder(text for _, text in training)
    streams = {}
    for split, documents in texts.items():
        with encoding(split):
            streams[split] = _stream(documents, encode)
    return streams


def read_text(path: Path, newline: str | None = None) -> str:
    """Return the text of a UTF-8 file as `files.read_text`; raise ConfigError also if it is empty.

    A byte-order mark is no text.
    """
    text = files.read_text(path, newline)
    if not text:
        raise ConfigError(f"{path}: is empty")
    return text


def read_lines(path: Path) -> list[str]:
    """Return the lines of a UTF-8 file whose line numbers mean something.

    Only line feeds end lines, after an optional carriage return: a text may contain other
    separators (U+2028, a carriage return), which must not shift the lines after it. Raises
    ConfigError as `read_text`, and for a file whose lines end with carriage returns alone.
    """
    text = read_text(path, newline="")
    if "\r" in text and "\n" not in text:
        raise ConfigError(
            f"{path}: its lines end with carriage returns alone; save it with line feeds"
        )
    return [line.removesuffix("\r") for line in text.removesuffix("\n").split("\n")]


def _stream(documents: list[tuple[str, str]], encode: Encoder) -> Stream:
    encoded = encode.encode([text for _, text in documents])
    sources = [Source(name, ids) for (name, _), ids in zip(documents, encoded, strict=True)]
    text_bytes = sum(len(text.encode()) for _, text in documents)
    return Stream(sources, encode.vocabulary, text_bytes)
