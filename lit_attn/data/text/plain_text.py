"""Text for language models: Python's own documents, and text files of the user."""

import hashlib
import pydoc_data.topics
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from pydantic import Field, PositiveInt

from lit_attn.data.class_folders import TEXTS
from lit_attn.data.folders import FolderReader, natural_order
from lit_attn.data.splits import warn_of_shared_files
from lit_attn.data.text.batches import NamedTokens, Tokens
from lit_attn.data.text.ids import SPLITS
from lit_attn.data.text.streams import read_text
from lit_attn.schema.base import consistency_check, outside_identity
from lit_attn.schema.errors import ConfigError

HELD_OUT = 0.1  # Share of the training text that becomes the split val if no file is.

# Parts of the standard library's folder that are not its source, and files of one build of Python.
LEFT_OUT = {"test", "tests", "idle_test", "__pycache__", "site-packages", "dist-packages"}
BUILD_SPECIFIC = "_sysconfigdata"


class PythonText(Tokens, kind="python-text"):
    """Text of Python's documentation topics and of its standard library, as bytes.

    It comes with the interpreter, so it needs no download. It differs between Python versions,
    which the fingerprint of the data in a result shows. Names decide on the split of each file.
    """

    context: PositiveInt = Field(128, description="tokens of a sequence")

    @consistency_check
    def _reads_bytes(self) -> None:
        """Refuse other tokenizers than bytes."""
        if self.tokenizer.kind != "bytes":
            raise ValueError("tokenizer: this text is read as bytes")

    def texts(self) -> dict[str, list[tuple[str, str]]]:
        return read_python_text()


def read_python_text() -> dict[str, list[tuple[str, str]]]:
    """Return (name, text) of Python's own documents in every split."""
    texts: dict[str, list[tuple[str, str]]] = {"train": [], "val": [], "test": []}
    for name, text in python_documents():
        texts[split_of(name)].append((name, text))
    return texts


def python_documents() -> Iterator[tuple[str, str]]:
    """Yield (name, text) of Python's documentation and its library, always in the same order."""
    for topic, text in sorted(pydoc_data.topics.topics.items()):
        yield f"topics/{topic}", text
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py"), key=lambda path: path.relative_to(root).as_posix()):
        name = path.relative_to(root)
        is_hidden = any(part.startswith(".") for part in name.parts)
        is_left_out = is_hidden or not LEFT_OUT.isdisjoint(name.parts)
        if not is_left_out and not name.name.startswith(BUILD_SPECIFIC):
            yield f"library/{name.as_posix()}", path.read_text("utf-8", errors="replace")


def split_of(name: str) -> str:
    """Return the split of a document, a function of its name: 80 % train, 10 % val, 10 % test."""
    number = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big") % 10
    return {0: "val", 1: "test"}.get(number, "train")


class TextFiles(NamedTokens, kind="text"):
    """UTF-8 text files, or folders of them; without `val`, the last tenth of `train` is that split.

    The documents of a folder are its .txt files at every depth, in the natural order of the paths.
    """

    train: Path = outside_identity(..., "text file of the split train, or folder of .txt files")
    val: Path | None = outside_identity(None, "text file or folder of the split val")
    test: Path | None = outside_identity(None, "text file or folder of the split test")

    @property
    def splits(self) -> tuple[str, ...]:
        return ("val",) if self.test is None else ("test", "val")

    def texts(self) -> dict[str, list[tuple[str, str]]]:
        return read_text_files(self)


def read_text_files(data: TextFiles) -> dict[str, list[tuple[str, str]]]:
    """Return (path, text) of every split; without `val`, the end of the training text is it."""
    files = {}
    for split in SPLITS:
        path = getattr(data, split)
        if path is not None:
            files[split] = path
    warn_of_shared_files(files)
    texts = {split: _read_documents(f"data.{split}", path) for split, path in files.items()}
    if data.val is None:
        texts["train"], texts["val"] = _cut(texts["train"])
    return texts


def _read_documents(key: str, path: Path) -> list[tuple[str, str]]:
    """Return (path, text) of a file, or of the .txt files of a folder."""
    if not path.is_dir():
        return [(str(path), read_text(path))]
    reader = FolderReader(key, TEXTS.endings)
    paths = sorted(reader.walk(path), key=lambda path: natural_order(str(path)))
    reader.warn_of_left_out(path)
    if not paths:
        raise ConfigError(f"{key}: {path} has no .txt files")
    return [(str(path), read_text(path)) for path in paths]


def _cut(documents: list[tuple[str, str]]) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """Return the documents without the last tenth of their characters, and this tenth.

    The cut is after a complete line of a document if it has one there.
    """
    share = round(sum(len(text) for _, text in documents) * (1 - HELD_OUT))
    number = 0
    while share > len(documents[number][1]):
        share -= len(documents[number][1])
        number += 1
    name, text = documents[number]
    cut = text.rfind("\n", 0, share) + 1 or share
    before = [*documents[:number], (name, text[:cut])]
    after = [(name, text[cut:]), *documents[number + 1 :]]
    return before, [(name, text) for name, text in after if text]
