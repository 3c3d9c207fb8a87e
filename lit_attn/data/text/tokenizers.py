"""Tokenizers and their encoders between text and token ids: bytes, characters, subwords, words."""

import contextlib
import functools
import json
from abc import abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, PositiveInt

from lit_attn.data.folders import list_names
from lit_attn.data.log import LOG
from lit_attn.data.text.ids import CHARACTERS, VOCABULARY
from lit_attn.extras import require
from lit_attn.files import read_text
from lit_attn.schema.base import Kind, outside_identity
from lit_attn.schema.errors import ConfigError
from lit_attn.schema.mistakes import first_line

if TYPE_CHECKING:
    import tokenizers

END_OF_TEXT = "<|endoftext|>"
END_OF_LINE = "<eos>"
UNKNOWN = "<unk>"


@contextlib.contextmanager
def encoding(split: str) -> Iterator[None]:
    """Name the split in the ConfigError of a text that the encoder cannot encode."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"data.{split}: {error}") from error


class Encoder(Protocol):
    """Encoder between text and ids: the number of ids, and the id that ends a document."""

    vocabulary: int
    end: int | None
    ends_documents: bool = True
    """True if the last id of an encoded document is its end, and no part of its text."""
    vocabulary_file: tuple[str, str] | None = None
    """Name and content of the file beside shards that keeps a learned vocabulary."""

    def encode(self, documents: list[str]) -> list[NDArray[np.unsignedinteger]]:
        """Return the ids of each document, its end included."""

    def prompt(self, text: str) -> list[int]:
        """Return the ids of the beginning of a document."""

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of `ids`; ids that are not text (half a character) are replaced."""


class Tokenizer(Kind):
    """Family of the tokenizers: how text becomes token ids."""

    is_byte_level: ClassVar[bool] = False
    """True if every token, except the end of a document, is one byte."""

    is_learned: ClassVar[bool] = False
    """True if the vocabulary comes from the training text."""

    @property
    def document_end(self) -> int | None:
        """Id of the token that ends every document, or None if no token does."""
        return None

    @property
    @abstractmethod
    def vocabulary(self) -> int:
        """Number of token ids (exclusive upper bound)."""

    @abstractmethod
    def encoder(self, training: Iterable[str]) -> Encoder:
        """Return the encoder; it may learn from the texts."""

    def encoder_of_shards(self, folder: Path) -> Encoder:
        """Return the encoder of shards in `folder`, which may contain a vocabulary."""
        return self.encoder(())


class Bytes(Tokenizer, kind="bytes"):
    """UTF-8 bytes; a document ends with byte 0."""

    is_byte_level = True
    document_end: ClassVar = 0
    vocabulary: ClassVar = 256

    def encoder(self, training: Iterable[str]) -> Encoder:
        return ByteEncoder()


class Gpt2(Tokenizer, kind="gpt2"):
    """GPT-2's byte-pair encoding; a document ends with <|endoftext|>."""

    folder: Path | None = outside_identity(None, "folder of encoder.json and vocab.bpe; null: hub")
    vocabulary: ClassVar = 50_257

    @property
    def document_end(self) -> int | None:
        if self.folder is None:
            return 50_256
        return read_end(self.folder / "encoder.json", 50_256)

    def encoder(self, training: Iterable[str]) -> "SubwordEncoder":
        return load_gpt2(self)


class GptNeox(Tokenizer, kind="gpt-neox"):
    """GPT-NeoX's byte-pair encoding, of Pythia and the Pile; a document ends with <|endoftext|>."""

    file: Path | None = outside_identity(None, "tokenizer.json; null: from the hub")
    size: PositiveInt = Field(50_277, description="number of ids; more or fewer in released models")

    @property
    def document_end(self) -> int | None:
        return 0 if self.file is None else read_end(self.file, 0)

    @property
    def vocabulary(self) -> int:
        return self.size

    def encoder(self, training: Iterable[str]) -> Encoder:
        return load_subwords("EleutherAI/gpt-neox-20b", self.file, "file", self.vocabulary)


class Words(Tokenizer, kind="words"):
    """Words between white space, as in WikiText and the Penn Treebank; a line ends with <eos>.

    The vocabulary is all words of the training text in order of decreasing frequency; `size` is
    their number with <eos> (267,735 for WikiText-103, 10,000 for the Penn Treebank).
    """

    is_learned = True
    size: PositiveInt = Field(description="words in the vocabulary, <eos> included")

    @property
    def vocabulary(self) -> int:
        return self.size

    def encoder(self, training: Iterable[str]) -> Encoder:
        return WordEncoder.learn(training, self.size)

    def encoder_of_shards(self, folder: Path) -> Encoder:
        # Only line feeds end words.
        words = read_text(folder / VOCABULARY).removesuffix("\n").split("\n")
        return WordEncoder(words)


class Characters(Tokenizer, kind="characters"):
    """Unicode characters, as in nanoGPT's Shakespeare; documents have no end.

    The vocabulary is all characters of the training text in the order of their code points; `size`
    is their number (65 for tinyshakespeare).
    """

    is_learned = True
    size: PositiveInt = Field(description="different characters of the training text")

    @property
    def vocabulary(self) -> int:
        return self.size

    def encoder(self, training: Iterable[str]) -> Encoder:
        return CharacterEncoder.learn(training, self.size)

    def encoder_of_shards(self, folder: Path) -> Encoder:
        return CharacterEncoder(json.loads(read_text(folder / CHARACTERS)))


class ByteEncoder(Encoder):
    """Bytes of UTF-8; a document ends with byte 0."""

    vocabulary = 256
    end: int | None = Bytes.document_end

    def encode(self, documents: list[str]) -> list[NDArray[np.unsignedinteger]]:
        return [np.frombuffer(text.encode() + b"\0", np.uint8) for text in documents]

    def prompt(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, ids: Iterable[int]) -> str:
        return bytes(ids).decode(errors="replace")


class CharacterEncoder(Encoder):
    """Characters, whose places in `characters` are their ids.

    Raises ConfigError for a character that `characters` lacks.
    """

    end: int | None = None
    ends_documents = False

    def __init__(self, characters: str) -> None:
        self.characters = characters
        self.ids = {character: number for number, character in enumerate(characters)}
        self.vocabulary = len(characters)
        self.vocabulary_file = (CHARACTERS, json.dumps(characters) + "\n")

    @classmethod
    def learn(cls, documents: Iterable[str], size: int | None) -> "CharacterEncoder":
        """Learn the characters of a training text; ConfigError if they are not `size`."""
        characters: set[str] = set()
        for text in documents:
            characters.update(text)
        if size is not None and len(characters) != size:
            raise ConfigError(
                f"data.tokenizer.size: {size}, but the training text has {len(characters)}"
                f" different characters; set {len(characters)}"
            )
        return cls("".join(sorted(characters)))

    def encode(self, documents: list[str]) -> list[NDArray[np.unsignedinteger]]:
        return [np.asarray(self.prompt(text), np.uint32) for text in documents]

    def prompt(self, text: str) -> list[int]:
        unknown = sorted(set(text) - self.ids.keys())
        if unknown:
            shown = list_names([repr(character) for character in unknown])
            verb = "is" if len(unknown) == 1 else "are"
            raise ConfigError(
                f"{shown} {verb} not among the {self.vocabulary} characters of the training text"
            )
        return [self.ids[character] for character in text]

    def decode(self, ids: Iterable[int]) -> str:
        return "".join(self.characters[number] for number in ids)


class SubwordEncoder(Encoder):
    """Subwords of the library `tokenizers`; a document ends with <|endoftext|>."""

    def __init__(self, tokenizer: "tokenizers.Tokenizer", vocabulary: int) -> None:
        self.tokenizer = tokenizer
        self.vocabulary = vocabulary
        self.end: int | None = tokenizer.token_to_id(END_OF_TEXT)
        if self.end is None:
            raise ConfigError(f"data.tokenizer: the tokenizer has no token {END_OF_TEXT}")
        # A document may contain the name of a special token, which is text, as for nanoGPT.
        tokenizer.encode_special_tokens = True

    def encode(self, documents: list[str]) -> list[NDArray[np.unsignedinteger]]:
        count = sum(text.count(END_OF_TEXT) for text in documents)
        if count:
            LOG.warning(
                "data.tokenizer: the documents contain the text %s %s times, and it is read as "
                "ordinary characters",
                END_OF_TEXT,
                f"{count:,}",
            )
        encoded = self.tokenizer.encode_batch(documents, add_special_tokens=False)
        return [np.asarray([*part.ids, self.end], np.uint32) for part in encoded]

    def prompt(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Iterable[int]) -> str:
        return self.tokenizer.decode(list(ids), skip_special_tokens=False)


class WordEncoder(Encoder):
    """White-space separated words; every line, also a blank one, ends with <eos>.

    A word outside the vocabulary becomes <unk> if the vocabulary has <unk>, else a ConfigError. The
    place of a word in `words` is its id.
    """

    end: int | None = None

    def __init__(self, words: list[str]) -> None:
        self.words = words
        self.ids = {word: number for number, word in enumerate(words)}
        self.vocabulary = len(words)
        self.vocabulary_file = (VOCABULARY, "\n".join(words) + "\n")

    @classmethod
    def learn(cls, documents: Iterable[str], size: int | None) -> "WordEncoder":
        """Learn the vocabulary of a training text, by falling frequency, then alphabetically.

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
        encoded: list[NDArray[np.unsignedinteger]] = []
        for text in documents:
            ids = [self._id(word) for word in _words(text)]
            encoded.append(np.asarray(ids, np.uint32))
        return encoded

    def prompt(self, text: str) -> list[int]:
        """Return the ids of `text`, without the end of an unfinished last line.

        Raises ConfigError for an unknown word.
        """
        words = list(_words(text))
        for word in words:
            if word not in self.ids:
                remedy = f"; write {UNKNOWN} for it" if UNKNOWN in self.ids else ""
                raise ConfigError(f"'{word}' is not one of the {self.vocabulary:,} words{remedy}")
        if not text.endswith("\n"):
            # The last word is the <eos> of a line that goes on.
            words = words[:-1]
        return [self.ids[word] for word in words]

    def decode(self, ids: Iterable[int]) -> str:
        words = []
        for number in ids:
            word = self.words[number]
            words.append("\n" if word == END_OF_LINE else word)
        return " ".join(words)

    def _id(self, word: str) -> int:
        number = self.ids.get(word, self.ids.get(UNKNOWN))
        if number is None:
            raise ConfigError(f"'{word}' is not in the vocabulary, which has no {UNKNOWN} either")
        return number


def _words(text: str) -> Iterator[str]:
    """Yield the words and the <eos> of every line. Only line feeds end lines, as in WikiText."""
    for line in text.removesuffix("\n").split("\n"):
        yield from line.split()
        yield END_OF_LINE


@functools.cache
def read_end(path: Path, default: int) -> int:
    """Return the id of <|endoftext|> in a tokenizer.json, or in GPT-2's encoder.json.

    It is `default` for a file that is absent or has no such token. The encoder says what is wrong
    with the file when it is needed.
    """
    try:
        ids = json.loads(path.read_text(encoding="utf-8-sig"))
        model = ids.get("model")
        # In an encoder.json "model" is a token with an id.
        if isinstance(model, dict):
            added_tokens = ids["added_tokens"]
            ids = dict(model["vocab"])
            ids |= {token["content"]: token["id"] for token in added_tokens}
        return int(ids[END_OF_TEXT])
    except (OSError, ValueError, AttributeError, KeyError, TypeError):
        return default


def load_gpt2(config: Gpt2) -> SubwordEncoder:
    """Return the encoder of encoder.json and vocab.bpe, or of the hub's GPT-2."""
    if config.folder is None:
        return load_subwords("openai-community/gpt2", None, "folder", config.vocabulary)
    library = require("tokenizers", "data.tokenizer", "text")
    files = [str(config.folder / name) for name in ("encoder.json", "vocab.bpe")]
    try:
        tokenizer = library.ByteLevelBPETokenizer.from_file(*files)
    except Exception as error:  # The library raises no other class.
        raise ConfigError(f"data.tokenizer.folder: {config.folder}: {error}") from error
    return SubwordEncoder(tokenizer, config.vocabulary)


def load_subwords(hub_name: str, file: Path | None, key: str, vocabulary: int) -> SubwordEncoder:
    """Return the encoder of a tokenizer.json, or of `hub_name` if `file` is None.

    Tokens that were added to the file beyond the vocabulary are left out. Raises ConfigError, which
    names `key`, if `tokenizers` is not installed or the file cannot be had or has too many ids.
    """
    library = require("tokenizers", "data.tokenizer", "text").Tokenizer
    try:
        if file is None:
            tokenizer = library.from_pretrained(hub_name)
        else:
            content = json.loads(file.read_text(encoding="utf-8-sig"))
            content["added_tokens"] = [
                token for token in content["added_tokens"] if token["id"] < vocabulary
            ]
            tokenizer = library.from_str(json.dumps(content))
    except Exception as error:  # The library raises no other class.
        source = f"{hub_name} cannot be downloaded" if file is None else f"{file} cannot be read"
        raise ConfigError(f"data.tokenizer.{key}: {source}: {first_line(error)}") from error
    size = tokenizer.get_vocab_size()
    if size > vocabulary:
        raise ConfigError(f"data.tokenizer.{key}: {file} has {size:,} tokens, not {vocabulary:,}")
    return SubwordEncoder(tokenizer, vocabulary)
