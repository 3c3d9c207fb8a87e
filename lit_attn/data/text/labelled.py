"""Batches of labelled token sequences, or of labelled pairs of them: ListOps and text files.

ListOps (Nangia & Bowman 2018, arXiv:1804.06028) has the lengths of the Long Range Arena (Tay et al.
2021, arXiv:2011.04006; github.com/google-research/long-range-arena). An expression like
`[MAX 4 3 [MIN 2 3 ] 1 0 [MED 1 5 8 9 2 ] ]` has the value 5, its class. MED is the median rounded
down, SM the sum modulo 10.

Shapes: B batch, n the context. tokens and present: (B, n), or (B, 2, n) for pairs of documents;
labels: (B,). `present` is False where a token is padding.
"""

import random
import statistics
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lit_attn.config.data.text import IGNORED, SPLITS, LabelledText, ListOps, PaddedText
from lit_attn.data.module import EvaluationLoader, TokenDataModule, numpy_generator
from lit_attn.data.sets import digest
from lit_attn.data.text.streams import read_text
from lit_attn.schema.errors import ConfigError

GENERATOR_SEED = 0  # Of the data for all cells: a seed varies the training, not the data.

# Id 0 is padding.
TOKENS = ("", *"0123456789", "[MIN", "[MAX", "[MED", "[SM", "]")
IDS = {token: number for number, token in enumerate(TOKENS)}
END = IDS["]"]

OPERATIONS: dict[int, Callable[[list[int]], int]] = {
    IDS["[MIN"]: min,
    IDS["[MAX"]: max,
    IDS["[MED"]: lambda values: int(statistics.median(values)),
    IDS["[SM"]: lambda values: sum(values) % 10,
}

NESTED = 0.25  # Share of the arguments that are expressions, as in both generators.

Batch = tuple[Tensor, Tensor, Tensor]


class Sample(NamedTuple):
    """Label of one document or of a pair of documents, whose ids are 1 or more."""

    documents: tuple[NDArray[np.uint16], ...]
    label: int


class LabelledData(TokenDataModule):
    """Labelled sequences. A pass over train has each sample once, in an order of its own."""

    def __init__(self, data: PaddedText, seed: int, device: torch.device) -> None:
        super().__init__(data, seed, device)
        self.data = data
        self.samples: dict[str, list[Sample]] = data.read_samples()
        self.splits = ["val", "test"]
        self.set_epoch(len(self.samples["train"]), drop_last=True)
        self.per_pass = self.steps_per_epoch
        self.steps_per_epoch = data.epoch_steps or self.per_pass

    def fingerprint(self) -> str:
        return digest(
            part
            for split in SPLITS
            for documents, label in self.samples[split]
            for part in (
                *(len(ids).to_bytes(8, "big") + ids.tobytes() for ids in documents),
                label.to_bytes(8, "big"),
            )
        )

    def evaluation_loader(self, split: str) -> EvaluationLoader:
        samples, size = self.samples[split], self.eval_batch_size
        if self.data.order == "random":
            return self.padded_loader(samples, self.collate)
        if size > len(samples):
            raise ConfigError(f"data.eval_batch_size: {split} has only {len(samples)} samples")
        trainer = self.trainer if split == "val" else None
        count = size * ((split == "val" and self.data.val_batches) or len(samples) // size)

        def collate(places: range, rows: int) -> Batch:
            every = trainer.check_val_every_n_epoch if trainer else None
            start = trainer.current_epoch // (every or 1) * count if trainer else 0
            chosen = self.read_on(split, start + places.start, len(places))
            return self.collate([samples[place] for place in chosen], rows)

        return self.padded_loader(range(count), collate)

    def read_on(self, split: str, start: int, count: int) -> NDArray[np.int64]:
        """Return the samples `start` to `start + count` (at most one pass) of an endless split."""
        samples = len(self.samples[split])
        number, offset = divmod(start, samples)
        passes = [
            numpy_generator(self.seed, split, n).permutation(samples) if n else np.arange(samples)
            for n in (number, number + 1)
        ]
        return np.concatenate(passes)[offset : offset + count]

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

    def batch(self, step: int) -> tuple[Tensor, ...]:
        """Return tokens, present, classes, and the mean number of classes in a sequence (B,).

        With this mean, which is that of all processes, the loss does not depend on their number.
        """
        rows = self.rows(step, self.draw_order, self.per_pass)
        limit = self.data.max_tokens or self.data.context
        tags = [self.samples["train"][row].documents[1][:limit] for row in rows]
        mean = np.full(len(rows), sum(map(np.count_nonzero, tags)) / len(rows), np.float32)
        return (*super().batch(step), *self.tensors(self.share(mean)))

    def collate(self, samples: list[Sample], rows: int) -> Batch:
        documents, present, _ = super().collate(samples, rows)
        tokens, tags = documents.unbind(1)
        return tokens, present[:, 0], torch.where(tags > 0, tags - 1, IGNORED)


def read_listops(data: ListOps) -> dict[str, list[Sample]]:
    """Return the samples of every split; raise ConfigError naming a malformed file and line."""
    if (folder := data.folder) is not None:
        return {split: _listops(folder / f"basic_{split}.tsv") for split in SPLITS}
    drawn = generate(GENERATOR_SEED, data.lengths, data.depth, data.arguments)
    samples = (Sample((np.asarray(ids, dtype=np.uint16),), value) for ids, value in drawn)
    return {split: list(islice(samples, getattr(data, split))) for split in SPLITS}


def _listops(path: Path) -> list[Sample]:
    """Read a file of the arena: a heading, then lines `expression<TAB>value`."""
    samples = []
    for number, line in enumerate(read_text(path).splitlines()[1:], start=2):
        expression, _, value = line.partition("\t")
        try:
            ids = parse(expression)
            if evaluate(ids) != int(value):
                raise ValueError(f"the value is {evaluate(ids)}, not {value}")
        except ValueError as error:
            raise ConfigError(f"{path}:{number}: {error}") from error
        samples.append(Sample((np.asarray(ids, dtype=np.uint16),), int(value)))
    if not samples:
        raise ConfigError(f"{path}: has no samples")
    return samples


def read_labelled_text(data: LabelledText) -> dict[str, list[Sample]]:
    """Return every split's samples; raise ConfigError naming a malformed file and line."""
    columns = 3 if data.pairs else 2
    splits: dict[str, list[Sample]] = {split: [] for split in SPLITS}
    for split, samples in splits.items():
        path = data.folder / f"{split}.tsv"
        for number, line in enumerate(read_text(path).removesuffix("\n").split("\n"), start=1):
            label, *texts = line.split("\t")
            if len(texts) != columns - 1 or not all(texts):
                raise ConfigError(f"{path}:{number}: needs {columns} columns with text in them")
            if not label.isdecimal() or int(label) >= data.classes:
                text = f"label '{label}' is not one of 0 to {data.classes - 1}"
                raise ConfigError(f"{path}:{number}: {text}")
            # 0 is padding, so a byte's id is one more than the byte.
            ids = (np.frombuffer(text.encode(), np.uint8).astype(np.uint16) + 1 for text in texts)
            samples.append(Sample(tuple(ids), int(label)))
    return splits


def evaluate(ids: list[int]) -> int:
    """Return the value of an expression; raise ValueError if `ids` are not one expression."""
    stack: list[int] = []
    for number in ids:
        if number != END:
            stack.append(number)
            continue
        digits = []
        while stack and stack[-1] not in OPERATIONS:
            digits.append(stack.pop() - 1)
        if not stack or not digits:
            raise ValueError("']' without an operation or its arguments")
        stack.append(1 + OPERATIONS[stack.pop()](digits))
    if len(stack) != 1 or stack[0] in OPERATIONS:
        raise ValueError("not one complete expression")
    return stack[0] - 1


def parse(text: str) -> list[int]:
    """Return the ids of an expression, without the parentheses that the data sets write."""
    ids = [IDS.get(token, -1) for token in text.split() if token not in ("(", ")")]
    if not ids or min(ids) < 1:
        raise ValueError(f"not a ListOps expression: {text[:60]}")
    return ids


def generate(
    seed: int, lengths: tuple[int, int], depth: int, arguments: int
) -> Iterator[tuple[list[int], int]]:
    """Yield distinct expressions (ids, value) of `lengths` tokens, both limits included, forever.

    Trees have at most `depth` levels, of which digits are the last, and operations have 2 to
    `arguments` arguments. The same seed gives the same expressions.
    """
    drawn = random.Random(seed)
    yielded: set[tuple[int, ...]] = set()
    while True:
        ids: list[int] = []
        try:
            value = _grow(drawn, ids, 1, depth, arguments, lengths[1])
        except OverflowError:
            continue
        if len(ids) >= lengths[0] and tuple(ids) not in yielded:
            yielded.add(tuple(ids))
            yield ids, value


def _grow(
    drawn: random.Random, ids: list[int], level: int, depth: int, arguments: int, limit: int
) -> int:
    """Append an expression of `level` to `ids` and return its value; raise if it is too long."""
    if level >= depth or drawn.random() > NESTED:
        digit = int(drawn.random() * 10)
        ids.append(1 + digit)
        return digit
    operation = 11 + int(drawn.random() * 4)
    ids.append(operation)
    count = 2 + int(drawn.random() * (arguments - 1))
    values = [_grow(drawn, ids, level + 1, depth, arguments, limit) for _ in range(count)]
    ids.append(END)
    if len(ids) > limit:
        raise OverflowError
    return OPERATIONS[operation](values)
