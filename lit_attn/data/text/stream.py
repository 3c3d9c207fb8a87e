"""A split as one stream of token ids, wherever they lie: in memory or in files of any size."""

import hashlib
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from lit_attn.schema.errors import ConfigError

Ids = NDArray[np.unsignedinteger]

# What is hashed of a stream: at most so many blocks, evenly spaced; all of it up to 67M tokens.
BLOCK = 65_536
BLOCKS = 1024


@dataclass(frozen=True)
class Source:
    """Ids of one file, or of one text, and the name by which errors call it."""

    name: str
    ids: Ids


class Stream:
    """Sources one after the other. `text_bytes` and `words` of the text they stand for, if known.

    Raises ConfigError for an empty source and, as ids are read, for one beyond the vocabulary.
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
        """`count` ids from position `start`."""
        found = []
        number = int(np.searchsorted(self.starts, start, side="right")) - 1
        while count:
            source = self.sources[number]
            offset = start - int(self.starts[number])
            ids = source.ids[offset : offset + count]
            self._check(source, offset, ids)
            found.append(ids.astype(np.int64))
            start, count, number = start + len(ids), count - len(ids), number + 1
        return np.concatenate(found)

    def head(self, count: int) -> "Stream":
        """The first `count` ids; how much text they stand for is then unknown."""
        if count >= len(self):
            return self
        number = int(np.searchsorted(self.starts, count, side="left"))
        last = self.sources[number - 1]
        cut = Source(last.name, last.ids[: count - int(self.starts[number - 1])])
        return Stream([*self.sources[: number - 1], cut], self.vocabulary)

    @cached_property
    def fingerprint(self) -> str:
        """Hash of the length and of the blocks that the head of this file speaks of."""
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
