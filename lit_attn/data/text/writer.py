"""Writing shards of any size so that a stopped run goes on where it was.

Tokens are appended to `<split>.bin.partial`; `progress.json` is replaced once they are on disk, and
says how many of them count. Whoever goes on cuts the rest off and skips the documents done.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from lit_attn.data.text.shards import META, VOCABULARY
from lit_attn.data.text.tokenizers import Encoder, WordEncoder, count_words
from lit_attn.files import write_atomic, write_json
from lit_attn.schema.errors import ConfigError

PROGRESS = "progress.json"
DOCUMENTS_AT_ONCE = 1000

# (split, text) of every document from the given number on.
Documents = Callable[[int], Iterator[tuple[str, str]]]


class ShardWriter:
    """Writes one folder: `<split>.bin` for each split, then meta.json, the mark of completion.

    `recipe` (source and tokenizer) is kept with the progress: a folder that was begun otherwise is
    refused with a ConfigError, as is one that is complete.
    """

    def __init__(self, folder: Path, encoder: Encoder, recipe: dict[str, str]) -> None:
        if (folder / META).exists():
            raise ConfigError(f"{folder}: is complete already; choose another --out, or delete it")
        self.folder = folder
        self.encoder = encoder
        self.dtype = np.dtype(np.uint32 if encoder.vocabulary > 2**16 else np.uint16)
        folder.mkdir(parents=True, exist_ok=True)
        self.progress: dict[str, Any] = {"recipe": recipe, "documents": 0, "splits": {}}
        if (folder / PROGRESS).exists():
            self.progress = json.loads((folder / PROGRESS).read_text(encoding="utf-8"))
            if self.progress["recipe"] != recipe:
                raise ConfigError(f"{folder}: was begun as {self.progress['recipe']}, not {recipe}")
        self._cut_off_what_does_not_count()

    @property
    def tokens(self) -> int:
        """Tokens written so far, over all splits."""
        return sum(split["tokens"] for split in self.progress["splits"].values())

    def write(self, documents: Documents, limit: int | None, report: Callable[[int], None]) -> None:
        """Write what is missing, at least `limit` tokens if there are so many, and finish.

        `report` is told the number of tokens after every part of the way.
        """
        remaining = documents(self.progress["documents"])
        while limit is None or self.tokens < limit:
            part = list(islice(remaining, DOCUMENTS_AT_ONCE))
            if not part:
                break
            self._append(part)
            report(self.tokens)
        self._finish()

    def _append(self, part: list[tuple[str, str]]) -> None:
        for split in sorted({split for split, _ in part}):
            texts = [text for name, text in part if name == split]
            ids = np.concatenate(self.encoder.encode(texts)).astype(self.dtype)
            with self._partial(split).open("ab") as file:
                file.write(ids.tobytes())
                file.flush()
                os.fsync(file.fileno())
            counts = self.progress["splits"].setdefault(
                split, {"tokens": 0, "bytes": 0, "words": 0}
            )
            counts["tokens"] += len(ids)
            counts["bytes"] += sum(len(text.encode()) for text in texts)
            counts["words"] += sum(count_words(text) for text in texts)
        self.progress["documents"] += len(part)
        write_json(self.folder / PROGRESS, self.progress)

    def _finish(self) -> None:
        if not self.tokens:
            raise ConfigError(f"{self.folder}: the source has no text")
        for split, counts in self.progress["splits"].items():
            partial, final = self._partial(split), self.folder / f"{split}.bin"
            if partial.exists():
                partial.replace(final)
            with final.open("rb") as file:
                counts["sha256"] = hashlib.file_digest(file, "sha256").hexdigest()
        if isinstance(self.encoder, WordEncoder):
            write_atomic(self.folder / VOCABULARY, "\n".join(self.encoder.words) + "\n")
        meta = {
            **self.progress["recipe"],
            "vocabulary": self.encoder.vocabulary,
            "dtype": self.dtype.name,
            "documents": self.progress["documents"],
            "splits": self.progress["splits"],
        }
        write_json(self.folder / META, meta)
        (self.folder / PROGRESS).unlink(missing_ok=True)

    def _cut_off_what_does_not_count(self) -> None:
        for partial in self.folder.glob("*.bin.partial"):
            split = partial.name.removesuffix(".bin.partial")
            counted = self.progress["splits"].get(split, {}).get("tokens", 0)
            with partial.open("r+b") as file:
                file.truncate(counted * self.dtype.itemsize)

    def _partial(self, split: str) -> Path:
        return self.folder / f"{split}.bin.partial"
