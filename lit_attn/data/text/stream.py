"""One stream of token ids for a split, read from memory or from files of any size."""

import hashlib
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from lit_attn.schema.errors import ConfigError

Ids = NDArray[np.unsignedinteger]

# Blocks of a stream that its hash covers, evenly spaced: all of them up to 67M tokens.
BLOCK = 65_536
BLOCKS = 1024


@dataclass(frozen=True)
class Source:
    """Ids of one file or text, and the name that errors use for it."""

    name: str
    ids: Ids


class Stream:
    """Concatenated sources. `text_bytes` and `words` are those of the original text, if known.

    Raises ConfigError for an empty source and, when ids are read, for an id beyond the vocabulary.
    """

    def __init__(
        self,
        sources: list[Source],
        vocabulary: int,
        text_bytes: int | None = None,
        words: int | None = None,
    ) -> None:
        for source in sources:
            if not len(source.ids):
                raise ConfigError(f"{source.name}: is empty")
        self.sources = sources
        self.vocabulary = vocabulary
        self.text_bytes = text_bytes
        self.words = words
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
            self._check(source, offset, ids)
            parts.append(ids.astype(np.int64))
            start, count, number = start + len(ids), count - len(ids), number + 1
        return np.concatenate(parts)

    def head(self, count: int) -> "Stream":
        """Return the first `count` ids as a stream that does not know its bytes and words."""
        if count >= len(self):
            return self
        number = int(np.searchsorted(self.starts, count, side="left"))
        last = self.sources[number - 1]
        cut = Source(last.name, last.ids[: count - int(self.starts[number - 1])])
        return Stream([*self.sources[: number - 1], cut], self.vocabulary)

    @cached_property
    def fingerprint(self) -> str:
        """Hash of the length, the vocabulary and up to BLOCKS blocks of BLOCK ids."""
        digest = hashlib.sha256(f"{len(self)} {self.vocabulary}".encode())
        count = -(-len(self) // BLOCK)
        for block in np.unique(np.linspace(0, count - 1, min(count, BLOCKS)).astype(int)):
            start = int(block) * BLOCK
            digest.update(self.read(start, min(BLOCK, len(self) - start)).tobytes())
        return digest.hexdigest()[:12]

    def _check(self, source: Source, offset: int, ids: Ids) -> None:
        if ids.max() >= self.vocabulary:
            place = int(np.argmax(ids >= self.vocabulary))
            raise ConfigError(
                f"{source.name}: token {offset + place:,} is {ids[place]}, beyond the vocabulary "
                f"of {self.vocabulary}"
            )
