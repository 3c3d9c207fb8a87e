"""Pairs of sentences in two languages, as text files with one sentence a line."""

from pathlib import Path
from typing import ClassVar, Literal, Self

from pydantic import Field, PositiveInt, model_validator

from lit_attn.config.data.base import TokenData, method, require_files
from lit_attn.config.signatures import ParallelTokens
from lit_attn.schema.base import outside_identity

# Ids of every vocabulary: padding, the end of a sentence (also the decoder's first input), unknown.
PADDING, END, UNKNOWN = range(3)


class ParallelText(TokenData):
    """Translation from `source` to `target`: files NAME.LANGUAGE, line i of both is one pair.

    The text is tokenised; words are split at white space. Byte-pair encoding is learned from both
    languages of train. Step by step, a batch has pairs of similar length, with padding.
    """

    kind: Literal["parallel-text"] = "parallel-text"
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
        description="subwords of a sentence, its end included; longer training pairs are left out",
    )
    batch_size: PositiveInt = Field(
        4096, description="tokens of a step, over all devices: pairs times their longest sentence"
    )
    eval_batch_size: PositiveInt = Field(
        128, description="pairs of an evaluation batch, on one device"
    )

    build: ClassVar = method("lit_attn.data.text.parallel:ParallelData")

    def signature(self) -> ParallelTokens:
        return ParallelTokens(self.vocabulary, self.context)

    def files(self, split: str) -> tuple[Path, Path]:
        """Return the source file and the target file of `split`."""
        name = getattr(self, f"{split}_name")
        return self.folder / f"{name}.{self.source}", self.folder / f"{name}.{self.target}"

    def check_files(self) -> None:
        for split in ("train", "val", "test"):
            require_files(f"data.{split}_name", self.files(split))

    @model_validator(mode="after")
    def _batches_have_a_pair(self) -> Self:
        if self.context > self.batch_size:
            raise ValueError(
                f"context: a sentence of {self.context} tokens does not fit into a batch of "
                f"{self.batch_size}"
            )
        return self
