"""Writer of files of token ids ("shards"), which a stopped run can resume."""

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from lit_attn.data.text.token_files import META
from lit_attn.data.text.tokenizers import Encoder
from lit_attn.files import write_atomic, write_json
from lit_attn.schema.errors import ConfigError

PROGRESS = "progress.json"
DOCUMENTS_AT_ONCE = 1000

# Function from a document's number to an iterator of (split, text or ids) from that document on.
Documents = Callable[[int], Iterator[tuple[str, Any]]]


class ShardWriter:
    """Writer of one folder: `<split>.bin` for each split, then meta.json, the mark of completion.

    Tokens are appended to `<split>.bin.partial`. Once they are on disk, `progress.json` is replaced
    and says how many of them count; a resumed run truncates the rest and skips the documents done.
    Raises ConfigError for a complete folder, and for one begun with another `recipe`.
    """

    def __init__(
        self, folder: Path, encoder: Encoder, recipe: dict[str, str], val_tokens: int = 0
    ) -> None:
        """Take the number of tokens at the start of the text that become the split val."""
        if (folder / META).exists():
            raise ConfigError(f"{folder}: is complete already; choose another --out, or delete it")
        self.folder = folder
        self.encoder = encoder
        self.val_tokens = val_tokens
        self.dtype = np.dtype(np.uint32 if encoder.vocabulary > 2**16 else np.uint16)
        folder.mkdir(parents=True, exist_ok=True)
        self.progress: dict[str, Any] = {"recipe": recipe, "documents": 0, "splits": {}}
        if (folder / PROGRESS).exists():
            self.progress = json.loads((folder / PROGRESS).read_text(encoding="utf-8"))
            if self.progress["recipe"] != recipe:
                raise ConfigError(
                    f"{folder}: was started with {self.progress['recipe']}, not {recipe}; choose "
                    "another --out, or delete it"
                )
        for partial in folder.glob("*.bin.partial"):
            split = partial.name.removesuffix(".bin.partial")
            counted = self.progress["splits"].get(split, {}).get("tokens", 0)
            with partial.open("r+b") as file:
                file.truncate(counted * self.dtype.itemsize)

    @property
    def tokens(self) -> int:
        """Number of tokens written so far, over all splits."""
        return sum(split["tokens"] for split in self.progress["splits"].values())

    def write(self, documents: Documents, limit: int | None, report: Callable[[int], None]) -> None:
        """Write the missing documents, up to about `limit` tokens, and complete the folder.

        `report` is called with the number of tokens after every DOCUMENTS_AT_ONCE documents.
        """
        remaining = documents(self.progress["documents"])
        while limit is None or self.tokens < limit:
            part = list(islice(remaining, DOCUMENTS_AT_ONCE))
            if not part:
                break
            self._append(part)
            report(self.tokens)
        self._finish()

    def _append(self, part: list[tuple[str, Any]]) -> None:
        """Append documents with their splits to the files, and record how far the writer is."""
        val = self.progress["splits"].get("val", {"tokens": 0})
        if val["tokens"] < self.val_tokens:
            # The first documents are the validation split.
            part = [("val", text) for _, text in part]
        documents: dict[str, list[Any]] = {}
        for split, text in part:
            documents.setdefault(split, []).append(text)
        for split, texts in sorted(documents.items()):
            ids = np.concatenate(self.encoder.encode(texts)).astype(self.dtype)
            with self._partial(split).open("ab") as file:
                file.write(ids.tobytes())
                file.flush()
                os.fsync(file.fileno())
            counts = self.progress["splits"].setdefault(split, {"tokens": 0, "bytes": 0})
            counts["tokens"] += len(ids)
            if isinstance(texts[0], str):
                counts["bytes"] += sum(len(text.encode()) for text in texts)
        self.progress["documents"] += len(part)
        write_json(self.folder / PROGRESS, self.progress)

    def _finish(self) -> None:
        if not self.tokens:
            raise ConfigError(f"{self.folder}: the source has no text")
        for split, counts in self.progress["splits"].items():
            partial = self._partial(split)
            final = self.folder / f"{split}.bin"
            # A run that was stopped here has renamed some of the files.
            if partial.exists():
                partial.replace(final)
            with final.open("rb") as file:
                counts["sha256"] = hashlib.file_digest(file, "sha256").hexdigest()
        if self.encoder.vocabulary_file is not None:
            name, content = self.encoder.vocabulary_file
            write_atomic(self.folder / name, content)
        meta = {
            **self.progress["recipe"],
            "vocabulary": self.encoder.vocabulary,
            "dtype": self.dtype.name,
            "documents": self.progress["documents"],
            "splits": self.progress["splits"],
        }
        write_json(self.folder / META, meta)
        (self.folder / PROGRESS).unlink(missing_ok=True)

    def _partial(self, split: str) -> Path:
        return self.folder / f"{split}.bin.partial"
