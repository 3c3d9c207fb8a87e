"""Data sets of text: tokenizers, streams for language models, labelled sequences, translations."""

from abc import abstractmethod
from collections.abc import Iterable
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field, PositiveInt

from lit_attn.data.base import TokenData, method, require_path, require_split_folders
from lit_attn.files import read_text
from lit_attn.schema.base import Kind, consistency_check, load, outside_identity
from lit_attn.schema.errors import ConfigError
from lit_attn.signatures import LabelledTokens, ParallelTokens, TokenStream

# Target that is not to be predicted: padding, or a token that an earlier window predicts.
IGNORED = -100

# Ids in sentence pairs: padding, the end of a sentence (also the decoder's first input), unknown.
PADDING, END, UNKNOWN = range(3)

SPLITS = ("train", "val", "test")
VOCABULARY = "vocabulary.txt"  # File of the words beside shards, one word a line.
TOKEN_TYPES = ("uint8", "uint16", "uint32", "int32", "int64")  # Types of ids in shards.


class Tokenizer(Kind):
    """Family of the tokenizers: how text becomes token ids."""

    is_byte_level: ClassVar[bool] = False
    """True if every token, except the end of a document, is one byte."""

    is_word_level: ClassVar[bool] = False
    """True if every token is a word, so that the vocabulary comes from the training text."""

    document_end: ClassVar[int | None] = None
    """Id of the token that ends every document, or None if no token does."""

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


class Bytes(Tokenizer, kind="bytes"):
    """UTF-8 bytes; a document ends with byte 0."""

    is_byte_level = True
    document_end = 0
    vocabulary: ClassVar = 256

    def encoder(self, training: Iterable[str]) -> Any:
        return load("lit_attn.data.text.tokenizers:ByteEncoder")()


class Gpt2(Tokenizer, kind="gpt2"):
    """GPT-2's byte-pair encoding; a document ends with <|endoftext|>."""

    folder: Path | None = outside_identity(None, "folder of encoder.json and vocab.bpe; null: hub")
    document_end = 50_256
    vocabulary: ClassVar = 50_257
    encoder: ClassVar = method("lit_attn.data.text.tokenizers:load_gpt2")


class GptNeox(Tokenizer, kind="gpt-neox"):
    """GPT-NeoX's byte-pair encoding, of Pythia and the Pile; a document ends with <|endoftext|>."""

    document_end = 0
    file: Path | None = outside_identity(None, "tokenizer.json; null: from the hub")
    size: PositiveInt = Field(50_277, description="number of ids; more or fewer in released models")

    @property
    def vocabulary(self) -> int:
        return self.size

    def encoder(self, training: Iterable[str]) -> Any:
        load_subwords = load("lit_attn.data.text.tokenizers:load_subwords")
        return load_subwords("EleutherAI/gpt-neox-20b", self.file, "file", self.vocabulary)


class Words(Tokenizer, kind="words"):
    """Words between white space, as in WikiText and the Penn Treebank; a line ends with <eos>.

    The vocabulary is all words of the training text in order of decreasing frequency; `size` is
    their number with <eos> (267,735 for WikiText-103, 10,000 for the Penn Treebank).
    """

    is_word_level = True
    size: PositiveInt = Field(description="words in the vocabulary, <eos> included")

    @property
    def vocabulary(self) -> int:
        return self.size

    def encoder(self, training: Iterable[str]) -> Any:
        return load("lit_attn.data.text.tokenizers:WordEncoder").learn(training, self.size)

    def encoder_of_shards(self, folder: Path) -> Any:
        # Only line feeds end words.
        words = read_text(folder / VOCABULARY).removesuffix("\n").split("\n")
        return load("lit_attn.data.text.tokenizers:WordEncoder")(words)


class Tokens(TokenData):
    """Streams of tokens, cut into sequences of `context` tokens; each predicts the next token.

    An epoch is `epoch_steps` steps; if null, the number of complete batches in the tokens.
    """

    tokenizer: Tokenizer = Field(Bytes(), description="conversion of text to token ids")
    context: PositiveInt = Field(1024, description="tokens of a sequence")
    order: Literal["random", "sequential", "files", "columns", "records"] = Field(
        "random",
        description="random: any offset, with replacement (nanoGPT); sequential: in text order; "
        "files: the same without the end of each file that fills no batch (modded-nanogpt); "
        "columns: `batch_size` equal parts of the text side by side, each in order; records: "
        "stored sequences of `context` + 1 tokens in their order, also in evaluation (the Pile)",
    )
    epoch_steps: PositiveInt | None = Field(
        None, description="training steps of an epoch; null: one pass over the data"
    )
    eval_stride: PositiveInt | None = Field(
        None,
        description="tokens by which evaluation windows advance, and that each window scores; "
        "context if null, 1 for the sliding window of MGK",
    )
    eval_tokens: PositiveInt | None = Field(
        None, description="evaluate on that many tokens at the start of each split; null: all"
    )
    eval_windows: PositiveInt | None = Field(
        None, description="evaluate on that many windows, evenly spaced over each split; null: all"
    )

    def signature(self) -> TokenStream:
        return TokenStream(
            self.tokenizer.vocabulary, self.context, document_end=self.tokenizer.document_end
        )

    build: ClassVar = method("lit_attn.data.text.batches:TextData")

    def texts(self) -> dict[str, list[tuple[str, str]]]:
        """Return (name, text) of every document of every split; raise ConfigError as `streams`."""
        raise ConfigError(f"data.kind: '{self.kind}' has tokens and no text")

    def streams(self) -> Any:
        """Return the `lit_attn.data.text.streams.Stream` of "train", "val" and perhaps "test".

        Raises ConfigError naming the file that is missing, empty or malformed.
        """
        return load("lit_attn.data.text.streams:encode_texts")(self, self.texts())

    def encoder(self) -> Any:
        """Return the encoder between text and token ids."""
        if not self.tokenizer.is_word_level:
            return self.tokenizer.encoder([])
        training_texts = [text for _, text in self.texts()["train"]]
        return self.tokenizer.encoder(training_texts)

    @consistency_check
    def _scores_all_tokens(self) -> None:
        """Refuse evaluation windows that leave tokens out."""
        if self.eval_stride is not None and self.eval_stride > self.context:
            raise ValueError(
                f"eval_stride: {self.eval_stride} would skip tokens; choose at most {self.context}"
            )


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

    texts: ClassVar = method("lit_attn.data.text.streams:read_python_text")


class NamedTokens(Tokens):
    """Text of the user; `name` stands for it in identities and tables."""

    name: str = Field(description="name of the data set in identities and tables")


class TextFiles(NamedTokens, kind="text"):
    """UTF-8 text files; without `val`, the last tenth of `train` is that split."""

    train: Path = outside_identity(..., "text file of the split train")
    val: Path | None = outside_identity(None, "text file of the split val")
    test: Path | None = outside_identity(None, "text file of the split test")

    @property
    def splits(self) -> tuple[str, ...]:
        return ("val",) if self.test is None else ("test", "val")

    texts: ClassVar = method("lit_attn.data.text.streams:read_text_files")


class Shards(NamedTokens, kind="shards"):
    """Files of token ids in `folder`: .bin or .npy files of train, val and, optionally, test.

    A word in the name states the split, as in `fineweb_val_000001.bin`; letters beside a word are
    another word (`pretrain`). The formats are nanoGPT's (plain uint16), the same with the header of
    modded-nanogpt and llm.c, NumPy's .npy, and that of `python -m lit_attn.data.prepare`, whose
    meta.json states the integer type. For plain files of another type set `dtype`.
    """

    tokenizer: Tokenizer = Field(Gpt2(), description="tokeniser that made the ids")
    folder: Path = outside_identity(..., "folder of the files of train and val")
    dtype: Literal["uint8", "uint16", "uint32", "int32", "int64"] | None = outside_identity(
        None, "integer type of the ids in .bin files; null: as meta.json states, or uint16"
    )

    def streams(self) -> Any:
        read_streams = load("lit_attn.data.text.shards:streams")
        return read_streams(self.folder, self.tokenizer.vocabulary, self.dtype)

    def encoder(self) -> Any:
        return self.tokenizer.encoder_of_shards(self.folder)

    def check_files(self) -> None:
        super().check_files()
        load("lit_attn.data.text.shards:group_files")(self.folder)


class PaddedText(TokenData):
    """Sequences with classes, cut off at `max_tokens` tokens and padded to `context` with id 0.

    `vocabulary` is the number of embeddings of a model. The published models have more of them
    than the data use.
    """

    context: PositiveInt = Field(description="positions of the model, padding included")
    max_tokens: PositiveInt | None = Field(
        None, description="tokens of a sequence that are read; null: as many as `context`"
    )
    vocabulary: PositiveInt = Field(description="number of embeddings of the model")
    epoch_steps: PositiveInt | None = Field(
        None, description="training steps of an epoch; null: one pass over the data"
    )
    order: Literal["random", "endless"] = Field(
        "random",
        description="endless (Long Range Arena): train and val are endless sequences, first in the "
        "order of the files, then in random orders; evaluations have full batches only",
    )
    val_batches: PositiveInt | None = Field(
        None, description="with `order: endless`: batches of val that an evaluation reads"
    )

    @abstractmethod
    def read_samples(self) -> Any:
        """Return the `lit_attn.data.text.labelled.Sample` list of "train", "val" and "test".

        Raises ConfigError naming the file and line that is missing or malformed.
        """

    @property
    @abstractmethod
    def num_classes(self) -> int:
        """Number of classes."""

    @consistency_check
    def _makes_sense(self) -> None:
        """Refuse sequences beyond the context, and batches of val without their order."""
        if self.max_tokens is not None and self.max_tokens > self.context:
            raise ValueError(
                f"max_tokens: {self.max_tokens} tokens do not fit into a context of {self.context}"
            )
        if self.val_batches is not None and self.order != "endless":
            raise ValueError("val_batches: needs `order: endless`")


class Labelled(PaddedText):
    """Sequences, or pairs of them, with one label each."""

    pairs: bool = Field(False, description="a sample is a pair of sequences")

    def signature(self) -> LabelledTokens:
        return LabelledTokens(self.vocabulary, self.context, self.num_classes, self.pairs)

    build: ClassVar = method("lit_attn.data.text.labelled:LabelledData")


class OwnLabels(PaddedText):
    """Labelled texts of the user; `name` stands for them in identities and tables."""

    name: str = Field(description="name of the data set in identities and tables")
    vocabulary: PositiveInt = Field(512, ge=257, description="number of embeddings of the model")
    classes: PositiveInt = Field(2, description="number of classes")

    @property
    def num_classes(self) -> int:
        return self.classes


class TokenizedLabels(OwnLabels):
    """Labelled texts of the user in files of their own formats, with any tokenizer."""

    tokenizer: Tokenizer = Field(Bytes(), description="conversion of text to token ids")

    @consistency_check
    def _has_room_for_padding(self) -> None:
        """Refuse a vocabulary without an id for padding."""
        count = self.tokenizer.vocabulary
        if self.vocabulary <= count:
            raise ValueError(
                f"vocabulary: {self.vocabulary}, but the tokenizer has {count} ids and 0 is"
                f" padding; choose at least {count + 1}"
            )


class TextFolder(TokenizedLabels, Labelled, kind="text-folder"):
    """Text files in folders of classes: path/train/CLASS/*.txt, and path/test or path/val."""

    path: Path = outside_identity(..., "folder of train, and of test or val or both")
    pairs: Literal[False] = Field(False, description="a sample is one text")

    read_samples: ClassVar = method("lit_attn.data.text.text_folders:read_text_folder")

    def check_files(self) -> None:
        super().check_files()
        require_split_folders("data.path", self.path)


class LabelledText(OwnLabels, Labelled, kind="labelled-text"):
    """Labelled text as bytes: train.tsv, val.tsv and test.tsv with lines `label<TAB>text`.

    With `pairs` a line is `label<TAB>text<TAB>text` (document retrieval). Labels are 0, 1, ...
    """

    folder: Path = outside_identity(..., "folder of train.tsv, val.tsv and test.tsv")
    context: PositiveInt = Field(
        4000, description="bytes of a text; longer ones are cut, shorter ones padded with id 0"
    )

    read_samples: ClassVar = method("lit_attn.data.text.labelled:read_labelled_text")

    def check_files(self) -> None:
        super().check_files()
        for split in SPLITS:
            require_path("data.folder", self.folder / f"{split}.tsv")


class ParallelText(TokenData, kind="parallel-text"):
    """Translation from `source` to `target`: files NAME.LANGUAGE, line i of both is one pair.

    The text is tokenised; words are split at white space. Byte-pair encoding is learned from both
    languages of train. A batch has pairs of similar length, padded to the longest sentence.
    """

    name: str = Field(description="name of the data set in identities and tables")
    folder: Path = outside_identity(..., "folder of the text files")
    source: str = Field("de", description="language that is translated, the files' ending")
    target: str = Field("en", description="language of the translations, the files' ending")
    train_name: str = outside_identity("train", "training files without their ending")
    val_name: str = outside_identity("valid", "files of the split val without their ending")
    test_name: str = outside_identity("test", "files of the split test without their ending")
    vocabulary: PositiveInt = Field(10_000, ge=4, description="subwords of both languages together")
    context: PositiveInt = Field(
        1024,
        description="most subwords of a sentence with its end; longer training pairs, and those "
        "that no batch can contain, are left out",
    )
    batch_size: PositiveInt = Field(
        4096, description="tokens of a step, over all devices: pairs times their longest sentence"
    )

    build: ClassVar = method("lit_attn.data.text.parallel:ParallelData")

    def signature(self) -> ParallelTokens:
        return ParallelTokens(self.vocabulary, self.context)

    def files(self, split: str) -> tuple[Path, Path]:
        """Return the source file and the target file of `split`."""
        name = getattr(self, f"{split}_name")
        return self.folder / f"{name}.{self.source}", self.folder / f"{name}.{self.target}"

    def check_files(self) -> None:
        super().check_files()
        for split in SPLITS:
            for path in self.files(split):
                require_path(f"data.{split}_name", path)
