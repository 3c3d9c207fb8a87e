"""Data for sequence classification: token sequences, or pairs of them, with one label."""

from abc import abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

from pydantic import Field, PositiveInt, model_validator

from lit_attn.config.data.base import TokenData, require_files
from lit_attn.config.signatures import LabelledTokens
from lit_attn.schema.base import load, outside_identity

if TYPE_CHECKING:
    import torch


class Labelled(TokenData):
    """Labelled sequences, cut off at `max_tokens` tokens and padded to `context` with id 0.

    `vocabulary` is the number of embeddings of a model. The published models have more of them
    than the data use.
    """

    context: PositiveInt = Field(description="positions of the model, padding included")
    max_tokens: PositiveInt | None = Field(
        None, description="tokens of a sequence that are read; null: as many as `context`"
    )
    vocabulary: PositiveInt = Field(description="number of embeddings of the model")
    epoch_steps: PositiveInt | None = Field(
        None, description="training steps of an epoch; null: one pass over train"
    )
    pairs: bool = Field(False, description="a sample is a pair of sequences")

    def signature(self) -> LabelledTokens:
        return LabelledTokens(self.vocabulary, self.context, self.num_classes, self.pairs)

    def build(self, seed: int, device: "torch.device") -> Any:
        return load("lit_attn.data.text.labelled:LabelledData")(self, seed, device)

    @abstractmethod
    def read_samples(self) -> Any:
        """Return the `lit_attn.data.text.labelled.Sample` list of "train", "val" and "test".

        Raises ConfigError naming the file and line that is missing or malformed.
        """

    @property
    @abstractmethod
    def num_classes(self) -> int:
        """Number of classes."""

    @model_validator(mode="after")
    def _tokens_have_positions(self) -> Self:
        if self.max_tokens is not None and self.max_tokens > self.context:
            raise ValueError(
                f"max_tokens: {self.max_tokens} tokens do not fit into a context of {self.context}"
            )
        return self


class ListOps(Labelled):
    """ListOps: nested operations on digits in ten classes, as in the Long Range Arena.

    The samples are generated and equal for all seeds. With `folder` they are read from the arena's
    basic_train.tsv, basic_val.tsv and basic_test.tsv, which `lit_attn.data.prepare listops` writes.
    """

    kind: Literal["listops"] = "listops"
    context: PositiveInt = Field(
        2000, description="tokens of a sequence; longer ones are cut, shorter ones padded with id 0"
    )
    vocabulary: PositiveInt = Field(32, ge=16, description="number of embeddings of the model")
    pairs: Literal[False] = Field(False, description="a sample is one sequence")
    lengths: tuple[PositiveInt, PositiveInt] = Field(
        (500, 2000), description="least and greatest number of tokens of an expression"
    )
    depth: PositiveInt = Field(
        10, ge=2, description="levels of a tree; the last level contains digits"
    )
    arguments: PositiveInt = Field(10, ge=2, description="most arguments of an operation")
    train: PositiveInt = Field(96_000, description="training expressions")
    val: PositiveInt = Field(2000, description="validation expressions")
    test: PositiveInt = Field(2000, description="test expressions")
    folder: Path | None = outside_identity(None, "folder of basic_*.tsv; null: generated data")

    def check_files(self) -> None:
        if self.folder is not None:
            names = [f"basic_{split}.tsv" for split in ("train", "val", "test")]
            require_files("data.folder", [self.folder / name for name in names])

    def read_samples(self) -> Any:
        return load("lit_attn.data.text.labelled:read_listops")(self)

    @property
    def num_classes(self) -> int:
        return 10

    @model_validator(mode="after")
    def _has_a_batch(self) -> Self:
        if self.folder is None:
            self.require_a_batch(self.train)
        return self

    @model_validator(mode="after")
    def _lengths_are_likely(self) -> Self:
        shortest, longest = self.lengths
        if shortest > longest:
            raise ValueError(f"lengths: {shortest} is more than {longest}")
        # A full tree has arguments^(depth - 1) digits. Trees of a fifth of that are rare, but they
        # are found in reasonable time.
        largest = self.arguments ** (self.depth - 1)
        if shortest > largest // 5:
            raise ValueError(
                f"lengths: trees of depth {self.depth} with {self.arguments} arguments almost "
                f"never reach {shortest} tokens"
            )
        return self


class LabelledText(Labelled):
    """Labelled text as bytes: train.tsv, val.tsv and test.tsv with lines `label<TAB>text`.

    With `pairs` a line is `label<TAB>text<TAB>text` (document retrieval). Labels are 0, 1, ...
    """

    kind: Literal["labelled-text"] = "labelled-text"
    name: str = Field(description="name of the data set in identities and tables")
    folder: Path = outside_identity(..., "folder of train.tsv, val.tsv and test.tsv")
    context: PositiveInt = Field(
        4000, description="bytes of a text; longer ones are cut, shorter ones padded with id 0"
    )
    vocabulary: PositiveInt = Field(512, ge=257, description="number of embeddings of the model")
    classes: PositiveInt = Field(2, description="number of labels")

    def check_files(self) -> None:
        splits = ("train", "val", "test")
        require_files("data.folder", [self.folder / f"{split}.tsv" for split in splits])

    def read_samples(self) -> Any:
        return load("lit_attn.data.text.labelled:read_labelled_text")(self)

    @property
    def num_classes(self) -> int:
        return self.classes
