"""Encoders between text and token ids: bytes, GPT-2's byte-pair encoding, words."""

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from lit_attn.schema.errors import ConfigError

if TYPE_CHECKING:
    import tiktoken

END_OF_TEXT = "<|endoftext|>"
END_OF_LINE = "<eos>"
UNKNOWN = "<unk>"

# GPT-2's pattern that cuts text into pieces before bytes are merged (Radford et al. 2019).
GPT2_PIECES = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""


class Encoder(Protocol):
    """Encoder between text and ids. `end` is the id that ends a document, or None."""

    vocabulary: int
    dtype: type[np.unsignedinteger]
    end: int | None

    def encode(self, documents: list[str]) -> list[NDArray[np.unsignedinteger]]:
        """Return the ids of each document, its end included."""

    def prompt(self, text: str) -> list[int]:
        """Return the ids of the beginning of a document."""

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of `ids`; ids that are not text (half a character) are replaced."""


class ByteEncoder:
    """Bytes of UTF-8; a document ends with byte 0."""

    vocabulary = 256
    dtype = np.uint8
    end: int | None = 0

    def encode(self, documents: list[str]) -> list[NDArray[np.unsignedinteger]]:
        return [np.frombuffer(text.encode() + b"\0", np.uint8) for text in documents]

    def prompt(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, ids: Iterable[int]) -> str:
        return bytes(ids).decode(errors="replace")


class Gpt2Encoder:
    """GPT-2's byte-pair encoding through tiktoken; a document ends with <|endoftext|>.

    The encoding is built from encoder.json and vocab.bpe in `folder`, or downloaded by tiktoken.
    Raises ConfigError if tiktoken is not installed or the files cannot be read.
    """

    vocabulary = 50_257
    dtype = np.uint16

    def __init__(self, folder: Path | None) -> None:
        self.encoding = gpt2_encoding(folder)
        self.end: int | None = self.encoding.eot_token

    def encode(self, documents: list[str]) -> list[NDArray[np.unsignedinteger]]:
        encoded = self.encoding.encode_ordinary_batch(documents)
        return [np.asarray([*ids, self.end], dtype=self.dtype) for ids in encoded]

    def prompt(self, text: str) -> list[int]:
        return self.encoding.encode_ordinary(text)

    def decode(self, ids: Iterable[int]) -> str:
        return self.encoding.decode(list(ids))


class WordEncoder:
    """White-space separated words; every line, also a blank one, ends with <eos>.

    A word outside the vocabulary becomes <unk> if the vocabulary has <unk>, else a ConfigError.
    """

    dtype = np.uint32
    end: int | None = None

    def __init__(self, words: list[str]) -> None:
        """Take `words` in the order of their ids."""
        self.words = words
        self.ids = {word: number for number, word in enumerate(words)}
        self.vocabulary = len(words)

    @classmethod
    def of(cls, documents: Iterable[str], size: int | None) -> "WordEncoder":
        """Build the vocabulary of a training text, by falling frequency, then alphabetically.

        Raises ConfigError if its size is not the configured `size`.
        """
        counts: Counter[str] = Counter()
        for text in documents:
            counts.update(_words(text))
        if size is not None and len(counts) != size:
            raise ConfigError(
                f"data.tokenizer.size: {size}, but the training text has {len(counts)} different "
                f"words, {END_OF_LINE} included"
            )
        return cls(sorted(counts, key=lambda word: (-counts[word], word)))

    def encode(self, documents: list[str]) -> list[NDArray[np.unsignedinteger]]:
        return [np.asarray(self._document(text), dtype=self.dtype) for text in documents]

    def prompt(self, text: str) -> list[int]:
        """Return the ids of `text`, without the end of an unfinished last line.

        Raises ConfigError for an unknown word.
        """
        words = list(_words(text))
        if unknown := [word for word in words if word not in self.ids]:
            remedy = f"; write {UNKNOWN} for it" if UNKNOWN in self.ids else ""
            raise ConfigError(f"'{unknown[0]}' is not one of the {self.vocabulary:,} words{remedy}")
        return [self.ids[word] for word in (words if text.endswith("\n") else words[:-1])]

    def decode(self, ids: Iterable[int]) -> str:
        words = (self.words[number] for number in ids)
        return " ".join("\n" if word == END_OF_LINE else word for word in words)

    def _document(self, text: str) -> list[int]:
        return [self._id(word) for word in _words(text)]

    def _id(self, word: str) -> int:
        number = self.ids.get(word, self.ids.get(UNKNOWN))
        if number is None:
            raise ConfigError(f"'{word}' is not in the vocabulary, which has no {UNKNOWN} either")
        return number


def count_words(text: str) -> int:
    """Count words and ends of lines, the unit of word-level perplexity."""
    return sum(1 for _ in _words(text))


def _words(text: str) -> Iterator[str]:
    """Yield the words and the <eos> of every line. Only line feeds end lines, as in WikiText."""
    for line in text.removesuffix("\n").split("\n"):
        yield from line.split()
        yield END_OF_LINE


def gpt2_encoding(folder: Path | None) -> "tiktoken.Encoding":
    """Return tiktoken's encoding; raise ConfigError if it, or a file, is missing or malformed."""
    try:
        import tiktoken
    except ModuleNotFoundError as error:
        raise ConfigError(
            "data.tokenizer: gpt2 needs tiktoken, which is not installed: "
            "pip install 'lit_attn[text]'"
        ) from error
    if folder is None:
        try:
            return tiktoken.get_encoding("gpt2")
        except OSError as error:
            raise ConfigError(
                "data.tokenizer: GPT-2's encoding cannot be downloaded; set data.tokenizer.folder "
                "to a folder with encoder.json and vocab.bpe"
            ) from error
    ranks = _ranks(folder)
    end = ranks.pop(END_OF_TEXT.encode())
    return tiktoken.Encoding(
        "gpt2",
        pat_str=GPT2_PIECES,
        mergeable_ranks=ranks,
        special_tokens={END_OF_TEXT: end},
        explicit_n_vocab=len(ranks) + 1,
    )


def _ranks(folder: Path) -> dict[bytes, int]:
    """Return the id of each byte string, read from encoder.json and checked against vocab.bpe.

    Both files write a byte as a printable character. Ids follow the order of the merges, which is
    all that byte-pair encoding needs.
    """
    try:
        ids = json.loads((folder / "encoder.json").read_text(encoding="utf-8"))
        merges = (folder / "vocab.bpe").read_text(encoding="utf-8").splitlines()[1:]
    except OSError as error:
        raise ConfigError(f"{error.filename}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{folder / 'encoder.json'}: not JSON: {error}") from error
    byte_of = _printable_bytes()
    merged = [line.replace(" ", "", 1) for line in merges if line]
    for number, token in enumerate(merged):
        if ids.get(token) != 256 + number:
            raise ConfigError(
                f"{folder / 'vocab.bpe'}: merge {number + 1} makes '{token}', which is "
                f"{ids.get(token)} and not {256 + number} in encoder.json"
            )
    ranks = {bytes(byte_of[char] for char in char_token): ids[char_token] for char_token in merged}
    ranks |= {bytes([byte]): ids[char] for char, byte in byte_of.items()}
    return ranks | {END_OF_TEXT.encode(): ids[END_OF_TEXT]}


def _printable_bytes() -> dict[str, int]:
    """Map characters to bytes: a printable byte is its own character, others start at 256."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}
