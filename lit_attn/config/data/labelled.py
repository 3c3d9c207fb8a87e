"""Data for sequence classification: token sequences, or pairs of them, with a label each."""

from pathlib import Path
from typing import Literal, Self

from pydantic import Field, PositiveInt, model_validator

from lit_attn.config.data.base import Data
from lit_attn.schema.base import outside_identity


class Labelled(Data):
    """Sequences are cut off at `max_tokens` tokens and padded to `context`; id 0 is padding.

    `vocabulary` is how many embeddings a model gets: the published ones have more than they use.
    """

    batch_size: PositiveInt = Field(32, description="sequences of a step, over all devices")
    eval_batch_size: PositiveInt = Field(32, description="sequences, on one device")
    context: PositiveInt = Field(description="positions of the model, padding included")
    max_tokens: PositiveInt | None = Field(
        None, description="tokens of a sequence that are read; null: as many as `context`"
    )
    vocabulary: PositiveInt
    epoch_steps: PositiveInt | None = Field(None, description="one pass over train where null")
    accumulate: PositiveInt = outside_identity(1, "micro-batches of a step, to save memory")
    pairs: bool = False

    @property
    def num_classes(self) -> int:
        raise NotImplementedError

    @model_validator(mode="after")
    def _accumulate_divides(self) -> Self:
        if self.max_tokens is not None and self.max_tokens > self.context:
            raise ValueError(
                f"max_tokens: {self.max_tokens} tokens do not fit into a context of {self.context}"
            )
        if self.batch_size % self.accumulate:
            raise ValueError(
                f"accumulate: {self.accumulate} does not divide the batch of {self.batch_size}"
            )
        return self


class ListOps(Labelled):
    """Nested operations on digits, in ten classes, made to the Long Range Arena's measure.

    They are generated, the same for every seed of a cell, unless `folder` holds the arena's
    basic_train.tsv, basic_val.tsv and basic_test.tsv, which `lit_attn.data.prepare listops` writes.
    """

    kind: Literal["listops"] = "listops"
    context: PositiveInt = 2000
    vocabulary: PositiveInt = Field(32, ge=16)
    pairs: Literal[False] = False
    lengths: tuple[PositiveInt, PositiveInt] = (500, 2000)
    depth: PositiveInt = Field(10, ge=2, description="levels of a tree, digits being the last")
    arguments: PositiveInt = Field(10, ge=2, description="of an operation, at most")
    train: PositiveInt = 96_000
    val: PositiveInt = 2000
    test: PositiveInt = 2000
    folder: Path | None = outside_identity(None, "of basic_*.tsv; generated where null")

    @property
    def num_classes(self) -> int:
        return 10

    @model_validator(mode="after")
    def _a_batch_at_least(self) -> Self:
        if self.folder is None:
            self.require_a_batch(self.train)
        return self

    @model_validator(mode="after")
    def _lengths_can_be(self) -> Self:
        shortest, longest = self.lengths
        if shortest > longest:
            raise ValueError(f"lengths: {shortest} is more than {longest}")
        # A full tree has arguments^(depth - 1) digits; a fifth of it is rare enough to wait for.
        largest = self.arguments ** (self.depth - 1)
        if shortest > largest // 5:
            raise ValueError(
                f"lengths: {shortest} tokens are next to never reached with depth {self.depth} and "
                f"{self.arguments} arguments"
            )
        return self


class LabelledText(Labelled):
    """Bytes of text: `folder` has train.tsv, val.tsv and test.tsv with lines `label<TAB>text`.

    With `pairs` a line is `label<TAB>text<TAB>text` (document retrieval). Labels are 0, 1, ...
    """

    kind: Literal["labelled-text"] = "labelled-text"
    name: str = Field(description="stands for the data in identities and tables")
    folder: Path = outside_identity(..., "of train.tsv, val.tsv and test.tsv")
    context: PositiveInt = 4000
    vocabulary: PositiveInt = Field(512, ge=257)
    classes: PositiveInt = 2

    @property
    def num_classes(self) -> int:
        return self.classes
