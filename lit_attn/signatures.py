"""Signatures: what one sample of a data set is. Data, models and tasks meet in them.

A data configuration returns its signature; a model and a task name the signature types that they
take. This decides what fits together, so no module lists combinations. A new kind of sample
is one more class here, or in a file outside the package.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from lit_attn.schema.errors import ConfigError


@dataclass(frozen=True)
class Signature(ABC):
    """Base class of the signatures: immutable values that depend on the configuration alone."""

    sides: ClassVar[tuple[str, ...]] = ()
    """Fields with the sides of a network's output for one sample; empty for other outputs."""
    is_ordered: ClassVar[bool] = False
    """True if networks have layers in which no token sees a later one."""

    batch_names: ClassVar[tuple[str, ...]] = ()
    """Names of the tensors of a training batch, in their order; evaluation may lack the last."""

    @property
    def tokens(self) -> int | None:
        """Number of tokens of one sample, padding included; None for other samples."""
        return None

    @property
    def sample_count(self) -> int:
        """Number of samples in the inputs of `sample`, by which their FLOPs are divided."""
        return 1

    @property
    def has_fixed_shapes(self) -> bool:
        """True if all training batches have one shape, except a smaller last one of an epoch."""
        return False

    @abstractmethod
    def sample(self) -> tuple[Tensor, ...]:
        """Return the network's inputs for a batch of one sample, on the meta device."""

    def check_output(self, output: Any) -> None:
        """Raise ConfigError if a network's output for one sample has other sides than `sides`."""
        if not self.sides:
            return
        sides = [getattr(self, side) for side in self.sides]
        needed = [1, *sides]
        shape = list(getattr(output, "shape", ()))
        has_vocabulary = "vocabulary" in self.sides
        if has_vocabulary and shape:
            # The network may have more logits than there are token ids.
            needed[-1] = max(needed[-1], shape[-1])
        if shape != needed:
            raise ConfigError(
                f"must return a tensor of shape {needed} for one sample,"
                f" but returns {shape or type(output).__name__}"
            )


@dataclass(frozen=True)
class ImageSignature(Signature):
    """Images of `shape` (channels, height, width)."""

    shape: tuple[int, int, int]

    def sample(self) -> tuple[Tensor, ...]:
        return (torch.empty(1, *self.shape, device="meta"),)


@dataclass(frozen=True)
class ImageLabels(ImageSignature):
    """An image with one label.

    Batches are images (B, C, H, W) float and labels (B,), or probabilities (B, classes) in
    training. A network maps images to logits (B, classes). Epochs at the start of training may have
    images of `training_sizes` pixels along each side instead of `shape`.
    """

    batch_names = ("images", "labels")
    sides = ("outputs",)
    classes: int
    training_sizes: tuple[int, ...] = ()

    @property
    def outputs(self) -> int:
        """Number of logits of the network, as `ImageTargets.outputs`."""
        return self.classes

    @property
    def has_fixed_shapes(self) -> bool:
        return not self.training_sizes


@dataclass(frozen=True)
class ImageTargets(ImageSignature):
    """An image with `outputs` numbers to predict.

    Batches are images (B, C, H, W) and targets (B, outputs), both float32. A network maps images to
    (B, outputs), in the units of the targets.
    """

    batch_names = ("images", "targets")
    sides = ("outputs",)
    outputs: int

    @property
    def has_fixed_shapes(self) -> bool:
        return True


@dataclass(frozen=True)
class ImageMasks(ImageSignature):
    """An image with a label for every pixel, `ignore` where there is none.

    `shape` is that of a training window; evaluated images may be larger. Batches and networks are
    mmsegmentation's (data.py and segmenter.py of lit_attn.segmentation). `names` are the names of
    the classes, empty if only the files have them.
    """

    classes: int
    ignore: int
    names: tuple[str, ...] = ()


@dataclass(frozen=True)
class ColumnSignature(Signature):
    """Rows of a table: `numbers` columns of numbers, and columns of categories.

    Batches begin with numbers (B, `numbers`) float32 and categories (B, len(`categories`)) int64,
    which are the inputs of a network. `categories` has the number of values of each column, whose
    ids begin with 1; id 0 is a value that the training rows lack.
    """

    numbers: int
    categories: tuple[int, ...]

    @property
    def context(self) -> int:
        """Number of tokens: one of each column, and one for the prediction."""
        return 1 + self.numbers + len(self.categories)

    @property
    def tokens(self) -> int:
        return self.context

    @property
    def has_fixed_shapes(self) -> bool:
        return True

    def sample(self) -> tuple[Tensor, ...]:
        numbers = torch.empty(1, self.numbers, device="meta")
        categories = torch.empty(1, len(self.categories), dtype=torch.long, device="meta")
        return numbers, categories


@dataclass(frozen=True)
class ColumnLabels(ColumnSignature):
    """A row with one label; the third tensor of a batch has the labels (B,).

    A network returns logits (B, classes).
    """

    batch_names = ("numbers", "categories", "labels")
    sides = ("outputs",)
    classes: int

    @property
    def outputs(self) -> int:
        """Number of logits of the network, as `ColumnTargets.outputs`."""
        return self.classes


@dataclass(frozen=True)
class ColumnTargets(ColumnSignature):
    """A row with `outputs` numbers to predict; the third tensor of a batch is (B, outputs) float32.

    A network returns (B, outputs), in the units of the targets.
    """

    batch_names = ("numbers", "categories", "targets")
    sides = ("outputs",)
    outputs: int


@dataclass(frozen=True)
class TokenSignature(Signature):
    """Sequences of at most `context` token ids from 0 to `vocabulary` - 1."""

    vocabulary: int
    context: int

    @property
    def tokens(self) -> int:
        return self.context

    def sample(self) -> tuple[Tensor, ...]:
        return (torch.empty(1, self.context, dtype=torch.long, device="meta"),)


@dataclass(frozen=True)
class CausalTokens(TokenSignature):
    """Sequences for causal networks: tokens (B, n) to logits (B, n, vocabulary or more)."""

    sides = ("context", "vocabulary")
    is_ordered = True

    @property
    def document_end(self) -> int | None:
        """Token that separates the documents of a packed sequence, or None if there is none."""
        return None


@dataclass(frozen=True)
class TokenStream(CausalTokens):
    """Sequences cut from a stream, in which each token is to be predicted from those before it.

    Batches are inputs and targets (B, n); a target of -100 is not to be predicted.
    """

    batch_names = ("inputs", "targets")
    document_end: int | None = field(default=None, kw_only=True)

    @property
    def has_fixed_shapes(self) -> bool:
        return True


@dataclass(frozen=True)
class ParallelTokens(TokenSignature):
    """Sentence pairs, padded with id 0; a sample is one token in each language.

    Batches are source (B, m), inputs (B, n) and targets (B, n), one token after the inputs; a
    target of -100 is padding. Training batches have a fourth tensor (B,): the mean number of
    targets in a row of the complete step. A network maps source and inputs to logits
    (B, n, vocabulary).
    """

    batch_names = ("source", "inputs", "targets", "count")
    sides = ("sample_count", "vocabulary")
    is_ordered = True

    @property
    def tokens(self) -> int:
        return 1

    @property
    def sample_count(self) -> int:
        """Length of a typical sentence."""
        return min(self.context, 32)

    def sample(self) -> tuple[Tensor, ...]:
        tokens = torch.empty(1, self.sample_count, dtype=torch.long, device="meta")
        return tokens, tokens


@dataclass(frozen=True)
class PaddedTokens(TokenSignature):
    """Sequences with padding, for which a network predicts one of `classes`.

    Batches begin with tokens (B, n) int64 and a mask (B, n), False where a token is padding; they
    are the inputs of a network.
    """

    classes: int

    def sample(self) -> tuple[Tensor, ...]:
        (tokens,) = super().sample()
        return tokens, tokens.bool()


@dataclass(frozen=True)
class TaggedTokens(PaddedTokens):
    """A sequence with a class for each word.

    The third tensor of a batch has the classes (B, n), -100 for tokens that do not count. A network
    returns logits (B, n, classes). Training batches have a fourth tensor (B,): the mean number of
    counted tokens in a sequence of the complete step.
    """

    batch_names = ("tokens", "present", "tags", "count")
    sides = ("context", "classes")
    pairs: ClassVar = False
    are_tagged: ClassVar = True


@dataclass(frozen=True)
class LabelledTokens(PaddedTokens):
    """A sequence, or with `pairs` two of them, with one label.

    The third tensor of a batch has the labels (B,); with `pairs` tokens and mask are (B, 2, n). A
    network returns logits (B, classes). Rows with the label -100 pad a batch and do not count.
    """

    batch_names = ("tokens", "present", "labels")
    sides = ("classes",)
    pairs: bool = False
    are_tagged: ClassVar = False

    @property
    def tokens(self) -> int:
        return 2 * self.context if self.pairs else self.context

    def sample(self) -> tuple[Tensor, ...]:
        tokens, mask = super().sample()
        if not self.pairs:
            return tokens, mask
        return tokens[:, None].repeat(1, 2, 1), mask[:, None].repeat(1, 2, 1)
