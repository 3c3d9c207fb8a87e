"""ListOps: nested operations on digits, as in the Long Range Arena.

Sources: Nangia & Bowman 2018, arXiv:1804.06028; Tay et al. 2021, arXiv:2011.04006
(github.com/google-research/long-range-arena; docs/setups.md, section 9).
"""

from pathlib import Path
from typing import ClassVar, Literal

from pydantic import Field, PositiveInt

from lit_attn.data.base import method, require_path
from lit_attn.data.text.config import SPLITS, Labelled
from lit_attn.schema.base import consistency_check, outside_identity


class ListOps(Labelled, kind="listops"):
    """ListOps: nested operations on digits in ten classes, as in the Long Range Arena.

    The samples are generated and equal for all seeds. With `folder` they are read from the arena's
    basic_train.tsv, basic_val.tsv and basic_test.tsv.
    """

    context: PositiveInt = Field(
        2000, description="tokens of a sequence; longer ones are cut, shorter ones padded with id 0"
    )
    vocabulary: PositiveInt = Field(32, ge=16, description="number of embeddings of the model")
    pairs: Literal[False] = Field(False, description="a sample is one sequence")
    lengths: tuple[PositiveInt, PositiveInt] = Field(
        (500, 2000), description="least and greatest number of tokens of an expression"
    )
    depth: PositiveInt = Field(10, ge=2, description="levels of a tree; the last contains digits")
    arguments: PositiveInt = Field(10, ge=2, description="most arguments of an operation")
    train: PositiveInt = Field(96_000, description="training expressions")
    val: PositiveInt = Field(2000, description="validation expressions")
    test: PositiveInt = Field(2000, description="test expressions")
    folder: Path | None = outside_identity(None, "folder of basic_*.tsv; null: generated data")
    num_classes: ClassVar = 10

    read_samples: ClassVar = method("lit_attn.data.text.listops:read_listops")

    def check_files(self) -> None:
        super().check_files()
        if self.folder is not None:
            for split in SPLITS:
                require_path("data.folder", self.folder / f"basic_{split}.tsv")

    @consistency_check
    def _has_a_batch(self) -> None:
        """Refuse a batch that is larger than the training expressions of an epoch."""
        if self.folder is None:
            self.require_a_batch(self.train)

    @consistency_check
    def _lengths_are_likely(self) -> None:
        """Refuse lengths that random trees almost never have."""
        shortest, longest = self.lengths
        if shortest > longest:
            raise ValueError(f"lengths: {shortest} is more than {longest}")
        # A full tree has arguments^(depth - 1) digits. Trees of a fifth of that are rare, but they
        # are found in reasonable time.
        largest = self.arguments ** (self.depth - 1)
        if shortest > largest // 5:
            raise ValueError(
                f"lengths: trees of depth {self.depth} with {self.arguments} arguments almost"
                f" never reach {shortest} tokens"
            )
