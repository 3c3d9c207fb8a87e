"""Data for language modelling: texts, tokenizers, and how batches are cut from the tokens."""

from abc import abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

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

    @property
    @abstractmethod
    def vocabulary(self) -> int:
        """Number of token ids (exclusive upper bound)."""

    def check_files(self) -> None:
        """Raise ConfigError if a file is missing."""


class Bytes(Tokenizer):
    """UTF-8 bytes; a document ends with byte 0."""

    kind: Literal["bytes"] = "bytes"

    @property
    def vocabulary(self) -> int:
        return 256


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


class Words(Tokenizer):
    """Words between white space, as in WikiText and the Penn Treebank; a line ends with <eos>.

    The vocabulary is all words of the training text in order of decreasing frequency; `size` is
    their number with <eos> (267,735 for WikiText-103, 10,000 for the Penn Treebank).
    """

    kind: Literal["words"] = "words"
    size: PositiveInt = Field(description="words in the vocabulary, <eos> included")

    @property
    def vocabulary(self) -> int:
        return self.size


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
            load("lit_attn.data.text.shards:streams")(self.folder, self.tokenizer.vocabulary)
        except ConfigError as error:
            raise ConfigError(f"data.folder: {error}") from error
