"""Data for language modelling: texts, tokenizers, and how batches are cut from the tokens."""

from abc import abstractmethod
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from pydantic import Field, PositiveInt, model_validator

from lit_attn.config.data.base import TokenData, require_files
from lit_attn.config.signatures import TokenStream
from lit_attn.schema.base import Kind, load, outside_identity
from lit_attn.schema.errors import ConfigError

if TYPE_CHECKING:
    import torch

# Target that is not to be predicted: padding, or a token that an earlier window predicts.
IGNORED = -100


class Tokenizer(Kind):
    """Family of the tokenizers: how text becomes token ids."""

    is_byte_level: ClassVar[bool] = False
    """True if every token, except the end of a document, is one byte."""

    is_word_level: ClassVar[bool] = False
    """True if every token is a word, so that the vocabulary comes from the training text."""

    @property
    @abstractmethod
    def vocabulary(self) -> int:
        """Number of token ids (exclusive upper bound)."""

    @abstractmethod
    def encoder(self, training: Iterable[str]) -> Any:
        """Return the `lit_attn.data.text.tokenizers.Encoder`; it may learn from the texts."""

    def encoder_of_shards(self, folder: Path) -> Any:
        """Return the encoder of shards in `folder`, which may contain a vocabulary."""
        return self.encoder(())

    def check_files(self) -> None:
        """Raise ConfigError if a file is missing."""


class Bytes(Tokenizer):
    """UTF-8 bytes; a document ends with byte 0."""

    kind: Literal["bytes"] = "bytes"
    is_byte_level = True

    @property
    def vocabulary(self) -> int:
        return 256

    def encoder(self, training: Iterable[str]) -> Any:
        return load("lit_attn.data.text.tokenizers:ByteEncoder")()


class Gpt2(Tokenizer):
    """GPT-2's byte-pair encoding; a document ends with <|endoftext|>.

    `folder` holds encoder.json and vocab.bpe. Without it tiktoken downloads them once.
    """

    kind: Literal["gpt2"] = "gpt2"
    folder: Path | None = outside_identity(
        None, "folder of encoder.json and vocab.bpe; null: download"
    )

    def check_files(self) -> None:
        if self.folder is not None:
            files = [self.folder / name for name in ("encoder.json", "vocab.bpe")]
            require_files("data.tokenizer.folder", files)

    @property
    def vocabulary(self) -> int:
        return 50_257

    def encoder(self, training: Iterable[str]) -> Any:
        return load("lit_attn.data.text.tokenizers:Gpt2Encoder")(self.folder)


class Words(Tokenizer):
    """Words between white space, as in WikiText and the Penn Treebank; a line ends with <eos>.

    The vocabulary is all words of the training text in order of decreasing frequency; `size` is
    their number with <eos> (267,735 for WikiText-103, 10,000 for the Penn Treebank).
    """

    kind: Literal["words"] = "words"
    is_word_level = True
    size: PositiveInt = Field(description="words in the vocabulary, <eos> included")

    @property
    def vocabulary(self) -> int:
        return self.size

    def encoder(self, training: Iterable[str]) -> Any:
        return load("lit_attn.data.text.tokenizers:WordEncoder").of(training, self.size)

    def encoder_of_shards(self, folder: Path) -> Any:
        return load("lit_attn.data.text.corpus:read_vocabulary")(folder)


class Tokens(TokenData):
    """Streams of tokens, cut into sequences of `context` tokens; each predicts the next token.

    An epoch is `epoch_steps` steps; if null, the number of complete batches in the tokens.
    """

    tokenizer: Tokenizer = Field(description="conversion of text to token ids")
    context: PositiveInt = Field(1024, description="tokens of a sequence")
    order: Literal["random", "shuffled", "sequential", "files", "columns"] = Field(
        "random",
        description="random: any offset, with replacement (nanoGPT); shuffled: each sequence once "
        "in a pass, whose order and first offset are drawn; sequential: in the order of the text; "
        "files: the same without the end of each file that fills no batch (modded-nanogpt); "
        "columns: `batch_size` equal parts of the text side by side, each in order",
    )
    epoch_steps: PositiveInt | None = Field(
        None, description="training steps of an epoch; null: one pass over the tokens"
    )
    eval_stride: PositiveInt | None = Field(
        None,
        description="tokens by which evaluation windows advance, and that each window scores; "
        "context if null, 1 for the sliding window of MGK",
    )
    eval_tokens: PositiveInt | None = Field(
        None, description="evaluate on that many tokens at the start of each split; all if null"
    )

    def signature(self) -> TokenStream:
        return TokenStream(self.tokenizer.vocabulary, self.context)

    def build(self, seed: int, device: "torch.device") -> Any:
        return load("lit_attn.data.text.batches:TextData")(self, seed, device)

    def texts(self) -> dict[str, list[tuple[str, str]]]:
        """Return (name, text) of every document of every split; raise ConfigError as `streams`."""
        raise ConfigError(f"data.kind: '{self.kind}' has tokens and no text")

    def streams(self) -> Any:
        """Return the `lit_attn.data.text.stream.Stream` of "train", "val" and perhaps "test".

        Raises ConfigError naming the file that is missing, empty or malformed.
        """
        return load("lit_attn.data.text.corpus:encode_texts")(self, self.texts())

    def encoder(self) -> Any:
        """Return the encoder between text and token ids."""
        training = self.texts()["train"] if self.tokenizer.is_word_level else []
        return self.tokenizer.encoder(text for _, text in training)

    def check_files(self) -> None:
        self.tokenizer.check_files()

    @model_validator(mode="after")
    def _scores_all_tokens(self) -> Self:
        if self.eval_stride is not None and self.eval_stride > self.context:
            raise ValueError(
                f"eval_stride: {self.eval_stride} would skip tokens; choose at most {self.context}"
            )
        return self


class PythonText(Tokens):
    """Text of Python's documentation topics and of its standard library, as bytes.

    It comes with the interpreter, so it needs no download. It differs between Python versions,
    which the fingerprint of the data in a result shows. Names decide on the split of each file.
    """

    kind: Literal["python-text"] = "python-text"
    tokenizer: Tokenizer = Field(Bytes(), description="conversion of text to token ids; bytes only")
    context: PositiveInt = Field(128, description="tokens of a sequence")
    parts: tuple[Literal["topics", "library"], ...] = Field(
        ("topics", "library"),
        min_length=1,
        description="texts to use: the documentation topics, the standard library",
    )

    @model_validator(mode="after")
    def _reads_bytes(self) -> Self:
        if self.tokenizer.kind != "bytes":
            raise ValueError("tokenizer: this text is read as bytes")
        return self

    def texts(self) -> dict[str, list[tuple[str, str]]]:
        texts: dict[str, list[tuple[str, str]]]
        texts = load("lit_attn.data.text.corpus:read_python_text")(self)
        return texts


class NamedTokens(Tokens):
    """Text of the user; `name` stands for it in identities and tables."""

    name: str = Field(description="name of the data set in identities and tables")


class TextFiles(NamedTokens):
    """UTF-8 text files; without `val`, the last `holdout` share of `train` is that split."""

    kind: Literal["text"] = "text"
    tokenizer: Tokenizer = Field(Bytes(), description="conversion of text to token ids")
    train: Path = outside_identity(..., "text file of the split train")
    val: Path | None = outside_identity(None, "text file of the split val")
    test: Path | None = outside_identity(None, "text file of the split test")
    holdout: float = Field(
        0.1,
        gt=0,
        lt=1,
        description="share of the training text that becomes the split `val`, if `val` is null",
    )

    def check_files(self) -> None:
        super().check_files()
        for key in ("train", "val", "test"):
            if (path := getattr(self, key)) is not None:
                require_files(f"data.{key}", [path])

    @property
    def splits(self) -> tuple[str, ...]:
        return ("val",) if self.test is None else ("test", "val")

    def texts(self) -> dict[str, list[tuple[str, str]]]:
        texts: dict[str, list[tuple[str, str]]]
        texts = load("lit_attn.data.text.corpus:read_text_files")(self)
        return texts


class Shards(NamedTokens):
    """Files of token ids in `folder`: train*.bin, val*.bin and, optionally, test*.bin.

    The formats are nanoGPT's (plain uint16), modded-nanogpt's (the same with a header) and that of
    `python -m lit_attn.data.prepare`, whose meta.json may name another integer type.
    """

    kind: Literal["shards"] = "shards"
    tokenizer: Tokenizer = Field(Gpt2(), description="tokeniser that made the ids")
    folder: Path = outside_identity(..., "folder of train*.bin and val*.bin")

    def check_files(self) -> None:
        super().check_files()
        try:
            self.streams()
        except ConfigError as error:
            raise ConfigError(f"data.folder: {error}") from error

    def streams(self) -> Any:
        return load("lit_attn.data.text.shards:streams")(self.folder, self.tokenizer.vocabulary)

    def encoder(self) -> Any:
        return self.tokenizer.encoder_of_shards(self.folder)
