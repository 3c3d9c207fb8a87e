"""Splits of a text configuration as token streams, and the encoder that made them."""

import hashlib
import pydoc_data.topics
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from lit_attn.config.data.text import PythonText, TextFiles, Tokens
from lit_attn.data.text import shards
from lit_attn.data.text.stream import Source, Stream
from lit_attn.data.text.tokenizers import Encoder, WordEncoder, count_words
from lit_attn.schema.errors import ConfigError

# Parts of the standard library's folder that are not its source, and files of one build of Python.
LEFT_OUT = {"test", "tests", "idle_test", "__pycache__", "site-packages", "dist-packages"}
BUILD_SPECIFIC = "_sysconfigdata"


def encode_texts(data: Tokens, texts: dict[str, list[tuple[str, str]]]) -> dict[str, Stream]:
    """Return the token streams of `texts`, the (name, text) of every document of every split."""
    training = texts["train"] if data.tokenizer.is_word_level else []
    encode: Encoder = data.tokenizer.encoder(text for _, text in training)
    return {split: _stream(documents, encode) for split, documents in texts.items()}


def read_vocabulary(folder: Path) -> WordEncoder:
    """Return the encoder of the words that `lit_attn.data.prepare` wrote beside the shards."""
    return WordEncoder(read_text(folder / shards.VOCABULARY).splitlines())


def read_text(path: Path) -> str:
    """Return the text of a UTF-8 file; raise ConfigError if it is missing, empty or not UTF-8."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text (byte {error.start:,})") from error
    if not text:
        raise ConfigError(f"{path}: is empty")
    return text


def read_python_text(data: PythonText) -> dict[str, list[tuple[str, str]]]:
    """Return (name, text) of Python's own documents in every split."""
    texts: dict[str, list[tuple[str, str]]] = {"train": [], "val": [], "test": []}
    for name, text in python_documents(data.parts):
        texts[split_of(name)].append((name, text))
    return texts


def read_text_files(data: TextFiles) -> dict[str, list[tuple[str, str]]]:
    """Return (path, text) of every split; without `val`, the end of the training text is it."""
    paths = {"train": data.train, "val": data.val, "test": data.test}
    texts = {
        split: [(str(path), read_text(path))] for split, path in paths.items() if path is not None
    }
    if data.val is None:
        name, text = texts["train"][0]
        # Cut after a whole line if there is one.
        share = round(len(text) * (1 - data.holdout))
        kept = text.rfind("\n", 0, share) + 1 or share
        texts["train"], texts["val"] = [(name, text[:kept])], [(name, text[kept:])]
    return texts


def python_documents(parts: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    """Yield (name, text) of Python's own documents, always in the same order.

    Part "topics" is the interpreter's documentation, "library" its standard library's source.
    """
    if "topics" in parts:
        for topic, text in sorted(pydoc_data.topics.topics.items()):
            yield f"topics/{topic}", text
    if "library" in parts:
        root = Path(sysconfig.get_path("stdlib"))
        for path in sorted(root.rglob("*.py"), key=lambda path: path.relative_to(root).as_posix()):
            name = path.relative_to(root)
            if not LEFT_OUT.intersection(name.parts) and not name.name.startswith(BUILD_SPECIFIC):
                yield f"library/{name.as_posix()}", path.read_text("utf-8", errors="replace")


def split_of(name: str) -> str:
    """Return the split of a document, a function of its name: 80 % train, 10 % val, 10 % test."""
    number = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big") % 10
    return {0: "val", 1: "test"}.get(number, "train")


def _stream(documents: list[tuple[str, str]], encode: Encoder) -> Stream:
    encoded = encode.encode([text for _, text in documents])
    sources = [Source(name, ids) for (name, _), ids in zip(documents, encoded, strict=True)]
    text_bytes = sum(len(text.encode()) for _, text in documents)
    words = sum(count_words(text) for _, text in documents)
    return Stream(sources, encode.vocabulary, text_bytes, words)
