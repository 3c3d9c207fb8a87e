"""Batches of labelled token sequences, or of labelled pairs of them, and text files of them.

Shapes: B batch, n the context. tokens and present: (B, n), or (B, 2, n) for pairs of documents;
labels: (B,). `present` is False where a token is padding.
"""

from abc import abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field, PositiveInt
from torch import Tensor

from lit_attn.data.base import TokenData, require_path
from lit_attn.data.labels import (
    measure_largest_class,
    require_used_classes,
    warn_of_missing_labels,
)
from lit_attn.data.module import EvaluationLoader, TokenDataModule, numpy_generator
from lit_attn.data.sets import digest
from lit_attn.data.splits import warn_of_shared_files
from lit_attn.data.text.ids import IGNORED, SPLITS
from lit_attn.data.text.streams import read_lines
from lit_attn.data.text.tokenizers import Bytes, Encoder, Tokenizer
from lit_attn.floors.base import FREQUENT_CLASS
from lit_attn.schema.base import consistency_check, outside_identity
from lit_attn.schema.errors import ConfigError
from lit_attn.signatures import LabelledTokens

Ids = NDArray[np.unsignedinteger]

Batch = tuple[Tensor, Tensor, Tensor]


class Sample(NamedTuple):
    """Label of one document or of a pair of documents, whose ids are 1 or more."""

    documents: tuple[Ids, ...]
    label: int


def sample_ids(document: NDArray[np.unsignedinteger], encoder: Encoder) -> Ids:
    """Return the ids of an encoded document as those of a sample, from 1 on, without its end.

    Id 0 is padding.
    """
    if encoder.ends_documents:
        document = document[:-1]
    # Narrow ids save memory.
    if encoder.vocabulary <= np.iinfo(np.uint16).max:
        return document.astype(np.uint16) + np.uint16(1)
    return document.astype(np.uint32) + np.uint32(1)


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
    def read_samples(self) -> dict[str, list[Sample]]:
        """Return the samples of "train", "test" and, if it exists, "val".

        Raises ConfigError naming the file and line that is missing or malformed.
        """

    @property
    def floor_rules(self) -> tuple[str, ...]:
        return (FREQUENT_CLASS,)

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

    def build(self, seed: int, device: torch.device) -> "LabelledData":
        return LabelledData(self, seed, device)


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


class LabelledData(TokenDataModule):
    """Labelled sequences. A pass over train has each sample once, in an order of its own."""

    def __init__(self, data: PaddedText, seed: int, device: torch.device) -> None:
        super().__init__(data, seed, device)
        self.data = data
        self.samples: dict[str, list[Sample]] = data.read_samples()
        labels = {split: self.list_labels(samples) for split, samples in self.samples.items()}
        if "classes" in type(data).model_fields:
            require_used_classes(labels, data.num_classes)
        warn_of_missing_labels(labels, data.num_classes)
        self.largest_class = measure_largest_class(labels)
        self.splits = [split for split in ("val", "test") if split in self.samples]
        self.set_epoch(len(self.samples["train"]), drop_last=True)
        self.per_pass = self.steps_per_epoch
        self.steps_per_epoch = data.epoch_steps or self.per_pass

    def list_labels(self, samples: list[Sample]) -> NDArray[np.int64]:
        """Return all classes of some samples."""
        return np.asarray([sample.label for sample in samples], np.int64)

    def fingerprint(self) -> str:
        return digest(self._list_content())

    def _list_content(self) -> Iterator[bytes]:
        """Yield the ids, with their number before them, and the label of every sample."""
        for split in SPLITS:
            for documents, label in self.samples.get(split, []):
                for ids in documents:
                    yield len(ids).to_bytes(8, "big") + ids.tobytes()
                yield label.to_bytes(8, "big")

    def evaluation_loader(self, split: str) -> EvaluationLoader:
        samples = self.samples[split]
        if self.data.order == "random":
            return self.padded_loader(samples, self.collate)
        size = self.eval_batch_size
        if size > len(samples):
            raise ConfigError(
                f"data.eval_batch_size: {size} is more than the {len(samples)} samples of {split}; "
                f"{len(samples)} at most"
            )
        batches = len(samples) // size
        if split == "val" and self.data.val_batches:
            batches = self.data.val_batches
        count = size * batches
        # Every evaluation on val goes on where the one before it ended.
        trainer = self.trainer if split == "val" else None

        def collate(places: range, rows: int) -> Batch:
            start = 0
            if trainer is not None:
                # The evaluation after the last step belongs to the epoch of this step.
                epoch = max(0, trainer.global_step - 1) // self.steps_per_epoch
                epochs_between = trainer.check_val_every_n_epoch or 1
                start = epoch // epochs_between * count
            chosen = self.read_on(split, start + places.start, len(places))
            return self.collate([samples[place] for place in chosen], rows)

        return self.padded_loader(range(count), collate)

    def read_on(self, split: str, start: int, count: int) -> NDArray[np.int64]:
        """Return the samples `start` to `start + count` (at most one pass) of an endless split."""
        first_pass, offset = divmod(start, len(self.samples[split]))
        two_passes = [self._order_pass(split, first_pass), self._order_pass(split, first_pass + 1)]
        return np.concatenate(two_passes)[offset : offset + count]

    def _order_pass(self, split: str, number: int) -> NDArray[np.int64]:
        """Return the order of the samples in a pass: that of the file first, then random ones."""
        samples = len(self.samples[split])
        if number == 0:
            return np.arange(samples)
        return numpy_generator(self.seed, split, number).permutation(samples)

    def batch(self, step: int) -> tuple[Tensor, ...]:
        chosen = self.share(self.rows(step, self.draw_order, self.per_pass))
        return self.collate([self.samples["train"][i] for i in chosen], len(chosen))

    def collate(self, samples: list[Sample], rows: int) -> Batch:
        """Return tokens, present and labels of `rows` rows; padding rows have no label."""
        shape = (rows, len(self.samples["train"][0].documents), self.data.context)
        tokens = np.zeros(shape, dtype=np.int64)
        labels = np.full(rows, IGNORED, dtype=np.int64)
        for row, (documents, label) in enumerate(samples):
            labels[row] = label
            for place, ids in enumerate(documents):
                cut = ids[: self.data.max_tokens or self.data.context]
                tokens[row, place, : len(cut)] = cut
        present = tokens > 0
        # Padding rows need a token to attend to.
        present[len(samples) :, :, 0] = True
        if shape[1] == 1:
            tokens, present = tokens[:, 0], present[:, 0]
        return self.tensors(tokens, present, labels)

    def draw_order(self, number: int) -> NDArray[np.int64]:
        if self.data.order == "endless":
            count = self.per_pass * self.batch_size
            return self.read_on("train", number * count, count)
        return numpy_generator(self.seed, "order", number).permutation(len(self.samples["train"]))


class TaggedData(LabelledData):
    """Sequences with a class for each word; the second document of a sample has class + 1, or 0."""

    def list_labels(self, samples: list[Sample]) -> NDArray[np.int64]:
        limit = self.data.max_tokens or self.data.context
        tags = np.concatenate([sample.documents[1][:limit] for sample in samples])
        return tags[tags > 0].astype(np.int64) - 1

    def batch(self, step: int) -> tuple[Tensor, ...]:
        """Return tokens, present, classes, and the mean number of classes in a sequence (B,).

        With this mean, which is that of all processes, the loss does not depend on their number.
        """
        rows = self.rows(step, self.draw_order, self.per_pass)
        limit = self.data.max_tokens or self.data.context
        classes = 0
        for row in rows:
            tags = self.samples["train"][row].documents[1][:limit]
            classes += int(np.count_nonzero(tags))
        mean = np.full(len(rows), classes / len(rows), np.float32)
        return (*super().batch(step), *self.tensors(self.share(mean)))

    def collate(self, samples: list[Sample], rows: int) -> Batch:
        documents, present, _ = super().collate(samples, rows)
        tokens, tags = documents.unbind(1)
        return tokens, present[:, 0], torch.where(tags > 0, tags - 1, IGNORED)


class LabelledText(OwnLabels, Labelled, kind="labelled-text"):
    """Labelled text as bytes: train.tsv, val.tsv and test.tsv with lines `label<TAB>text`.

    With `pairs` a line is `label<TAB>text<TAB>text` (document retrieval). Labels are 0, 1, ...
    """

    folder: Path = outside_identity(..., "folder of train.tsv, val.tsv and test.tsv")
    context: PositiveInt = Field(
        4000, description="bytes of a text; longer ones are cut, shorter ones padded with id 0"
    )

    def read_samples(self) -> dict[str, list[Sample]]:
        return read_labelled_text(self)

    def check_files(self) -> None:
        super().check_files()
        for split in SPLITS:
            require_path("data.folder", self.folder / f"{split}.tsv")


def read_labelled_text(data: LabelledText) -> dict[str, list[Sample]]:
    """Return every split's samples; raise ConfigError naming a malformed file and line."""
    splits: dict[str, list[Sample]] = {}
    paths = {split: data.folder / f"{split}.tsv" for split in SPLITS}
    warn_of_shared_files(paths, "data.folder")
    for split, path in paths.items():
        lines = enumerate(read_lines(path), start=1)
        splits[split] = [_read_line(data, f"{path}:{number}", line) for number, line in lines]
    return splits


def _read_line(data: LabelledText, where: str, line: str) -> Sample:
    """Return the sample of a line; raise ConfigError, which begins with `where`."""
    columns = 3 if data.pairs else 2
    label, *texts = line.split("\t")
    if len(texts) != columns - 1 or not all(texts):
        raise ConfigError(f"{where}: needs {columns} columns with text in them")
    if not label.isdecimal() or int(label) >= data.classes:
        # An escaped label shows characters that have no width.
        raise ConfigError(f"{where}: label {label!r} is not one of 0 to {data.classes - 1}")
    byte_values = [np.frombuffer(text.encode(), np.uint8) for text in texts]
    # 0 is padding, so a byte's id is one more than the byte.
    documents = tuple(values.astype(np.uint16) + 1 for values in byte_values)
    return Sample(documents, int(label))
