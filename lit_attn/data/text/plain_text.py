"""Text for language models: Python's own documents, and text files of the user."""

import hashlib
import pydoc_data.topics
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from pydantic import Field, PositiveInt

from lit_attn.data.splits import warn_of_shared_files
from lit_attn.data.text.batches import NamedTokens, Tokens
from lit_attn.data.text.ids import SPLITS
from lit_attn.data.text.streams import read_text
from lit_attn.schema.base import consistency_check, outside_identity

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
    """UTF-8 text files; without `val`, the last tenth of `train` is that split."""

    train: Path = outside_identity(..., "text file of the split train")
    val: Path | None = outside_identity(None, "text file of the split val")
    test: Path | None = outside_identity(None, "text file of the split test")

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
    texts = {split: [(str(path), read_text(path))] for split, path in files.items()}
    if data.val is None:
        name, text = texts["train"][0]
        share = round(len(text) * (1 - HELD_OUT))
        # Cut after a complete line if there is one.
        cut = text.rfind("\n", 0, share) + 1 or share
        texts["train"] = [(name, text[:cut])]
        texts["val"] = [(name, text[cut:])]
    return texts
