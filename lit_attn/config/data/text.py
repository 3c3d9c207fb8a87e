"""Token data: what is read, how it becomes tokens, how batches and evaluations are cut from it."""

from pathlib import Path
from typing import Literal, Self

from pydantic import Field, PositiveInt, model_validator

from lit_attn.config.data.base import Data
from lit_attn.schema.base import Kind, outside_identity

# A target that is not to be predicted: padding, or a token that an earlier window predicts.
IGNORED = -100


class Tokenizer(Kind):
    """How text becomes token ids."""

    @property
    def vocabulary(self) -> int:
        """Ids go from 0 to this, which is none."""
        raise NotImplementedError


class Bytes(Tokenizer):
    """The bytes of UTF-8; a document ends with byte 0."""

    kind: Literal["bytes"] = "bytes"

    @property
    def vocabulary(self) -> int:
        return 256


class Gpt2(Tokenizer):
    """GPT-2's byte-pair encoding; a document ends with <|endoftext|>.

    `folder` holds encoder.json and vocab.bpe; where null, tiktoken fetches and keeps them.
    """

    kind: Literal["gpt2"] = "gpt2"
    folder: Path | None = outside_identity(None, "of encoder.json and vocab.bpe")

    @property
    def vocabulary(self) -> int:
        return 50_257


class Words(Tokenizer):
    """Words between white space, as in WikiText and the Penn Treebank; a line ends with <eos>.

    The vocabulary is every word of the training text, in order of falling frequency; `size` is
    their number, <eos> included (267,735 for WikiText-103, 10,000 for the Penn Treebank).
    """

    kind: Literal["words"] = "words"
    size: PositiveInt

    @property
    def vocabulary(self) -> int:
        return self.size


class Tokens(Data):
    """Streams of tokens, cut into sequences of `context`, each predicting the token that follows.

    An epoch is `epoch_steps` steps; where null, as many as there are whole batches in the tokens.
    """

    tokenizer: Tokenizer
    context: PositiveInt = 1024
    batch_size: PositiveInt = Field(32, description="sequences of a step, over all devices")
    eval_batch_size: PositiveInt = Field(32, description="sequences, on one device")
    order: Literal["random", "shuffled", "sequential", "columns"] = Field(
        "random",
        description="random: any offset, with replacement (nanoGPT); shuffled: each sequence once "
        "a pass, in an order and from a first offset of the pass's own; sequential: as they stand; "
        "columns: `batch_size` equal parts of the text side by side, each in order",
    )
    epoch_steps: PositiveInt | None = None
    eval_stride: PositiveInt | None = Field(
        None,
        description="tokens by which evaluation windows advance, each scoring those alone; context "
        "where null, 1 for the sliding window of MGK",
    )
    eval_tokens: PositiveInt | None = Field(
        None, description="evaluate on that many tokens at the start of each split; all where null"
    )
    accumulate: PositiveInt = outside_identity(1, "micro-batches of a step, to save memory")

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.eval_stride is not None and self.eval_stride > self.context:
            raise ValueError(
                f"eval_stride: {self.eval_stride} would leave tokens out; at most {self.context}"
            )
        if self.batch_size % self.accumulate:
            raise ValueError(
                f"accumulate: {self.accumulate} does not divide the batch of {self.batch_size}"
            )
        return self


class PythonText(Tokens):
    """The text of Python's documentation topics and of its standard library, as bytes.

    It comes with the interpreter, so nothing is fetched, and it differs between Python versions:
    the data's fingerprint in a result says so. Files go to train, val and test by their names.
    """

    kind: Literal["python-text"] = "python-text"
    tokenizer: Tokenizer = Bytes()
    context: PositiveInt = 128
    parts: tuple[Literal["topics", "library"], ...] = Field(("topics", "library"), min_length=1)

    @model_validator(mode="after")
    def _bytes_alone(self) -> Self:
        if self.tokenizer.kind != "bytes":
            raise ValueError("tokenizer: this text is read as bytes")
        return self


class NamedTokens(Tokens):
    """Data of the user's: `name` stands for it in identities and tables."""

    name: str


class TextFiles(NamedTokens):
    """Plain text, UTF-8. Without `val`, the last `holdout` of the training text is that split."""

    kind: Literal["text"] = "text"
    tokenizer: Tokenizer = Bytes()
    train: Path = outside_identity(..., "a text file")
    val: Path | None = outside_identity(None, "a text file")
    test: Path | None = outside_identity(None, "a text file")
    holdout: float = Field(0.1, gt=0, lt=1)


class Shards(NamedTokens):
    """Files of token ids in `folder`: train*.bin, val*.bin and, where there is one, test*.bin.

    As nanoGPT writes them (uint16 and nothing else), as modded-nanogpt does (the same behind a
    header), or as `python -m lit_attn.data.prepare` does (which may say another type in meta.json).
    """

    kind: Literal["shards"] = "shards"
    tokenizer: Tokenizer = Gpt2()
    folder: Path = outside_identity(..., "of train*.bin and val*.bin")
