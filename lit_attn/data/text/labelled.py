"""Batches of labelled token sequences, or of labelled pairs of them: ListOps and text files.

Shapes: B batch, n the context. tokens and present: (B, n), or (B, 2, n) for pairs of documents;
labels: (B,). `present` is False where a token is padding.
"""

import hashlib
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lit_attn.config.data.text import IGNORED, Labelled, LabelledText, ListOps
from lit_attn.data.module import EvaluationLoader, TokenDataModule, numpy_generator
from lit_attn.data.text import listops
from lit_attn.data.text.corpus import read_text
from lit_attn.files import write_atomic
from lit_attn.schema.errors import ConfigError

SPLITS = ("train", "val", "test")

# Generated data are the same for all seeds: a seed varies the training, not the data.
GENERATOR_SEED = 0

Batch = tuple[Tensor, Tensor, Tensor]


class Sample(NamedTuple):
    """One document, or a pair, as ids from 1 on, and its label."""

    documents: tuple[NDArray[np.uint16], ...]
    label: int


class LabelledData(TokenDataModule):
    """Labelled sequences. A pass over train has each sample once, in an order of its own.

    The splits are "val" and "test". Raises ConfigError if files are missing or malformed.
    """

    def __init__(self, data: Labelled, seed: int, device: torch.device) -> None:
        super().__init__(data, seed, device)
        self.data = data
        self.samples: dict[str, list[Sample]] = data.read_samples()
        self.splits = ["val", "test"]
        self.per_pass = len(self.samples["train"]) // data.batch_size
        if not self.per_pass:
            raise ConfigError(
                f"data.batch_size: {data.batch_size} is more than the "
                f"{len(self.samples['train'])} samples of train"
            )
        self.steps_per_epoch = data.epoch_steps or self.per_pass
        self._order = lru_cache(maxsize=1)(self._drawn)

    def fingerprint(self) -> str:
        """Return a hash of every sample."""
        digest = hashlib.sha256()
        for split in SPLITS:
            for documents, label in self.samples[split]:
                for ids in documents:
                    digest.update(len(ids).to_bytes(8, "big") + ids.tobytes())
                digest.update(label.to_bytes(8, "big"))
        return digest.hexdigest()[:12]

    def evaluation_loader(self, split: str) -> EvaluationLoader:
        """Return a loader of all samples of `split`; padding rows have no label."""
        samples = self.samples[split]
        return self.padded_loader(
            len(samples), lambda rows: self.collate(samples[rows.start : rows.stop], len(rows))
        )

    def batch(self, step: int) -> Batch:
        """Return this process's samples of training step `step`."""
        number, index = divmod(step, self.per_pass)
        size = self.batch_size
        chosen = self.share(self._order(number)[index * size : (index + 1) * size])
        return self.collate([self.samples["train"][i] for i in chosen], len(chosen))

    def collate(self, samples: list[Sample], rows: int) -> Batch:
        """Return tokens, present and labels of `rows` rows; padding rows have no label."""
        shape = (rows, 2 if self.data.pairs else 1, self.data.context)
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
        if not self.data.pairs:
            tokens, present = tokens[:, 0], present[:, 0]
        return (
            torch.from_numpy(tokens).to(self.device),
            torch.from_numpy(present).to(self.device),
            torch.from_numpy(labels).to(self.device),
        )

    def _drawn(self, number: int) -> NDArray[np.int64]:
        return numpy_generator(self.seed, "order", number).permutation(len(self.samples["train"]))


def write_listops(folder: Path, data: ListOps) -> None:
    """Generate `data` and write it as the arena's three files, for `ListOps.folder`."""
    for split, samples in _generated(data).items():
        lines = (
            f"{' '.join(listops.TOKENS[i] for i in sample.documents[0])}\t{sample.label}\n"
            for sample in samples
        )
        write_atomic(folder / f"basic_{split}.tsv", "Source\tTarget\n" + "".join(lines))


def read_listops(data: ListOps) -> dict[str, list[Sample]]:
    """Return every split's samples; raise ConfigError naming a malformed file and line."""
    if data.folder is None:
        return _generated(data)
    folder = data.folder
    return {split: _listops(folder / f"basic_{split}.tsv") for split in SPLITS}


def read_labelled_text(data: LabelledText) -> dict[str, list[Sample]]:
    """Return every split's samples; raise ConfigError naming a malformed file and line."""
    return {split: _labelled_text(data.folder / f"{split}.tsv", data) for split in SPLITS}


def _generated(data: ListOps) -> dict[str, list[Sample]]:
    counts = {"train": data.train, "val": data.val, "test": data.test}
    expressions = listops.generate(GENERATOR_SEED, data.lengths, data.depth, data.arguments)
    return {
        split: [
            Sample((np.asarray(ids, dtype=np.uint16),), value)
            for ids, value in islice(expressions, count)
        ]
        for split, count in counts.items()
    }


def _listops(path: Path) -> list[Sample]:
    """Read a file of the arena: a heading, then lines `expression<TAB>value`."""
    samples = []
    for number, line in enumerate(read_text(path).splitlines()[1:], start=2):
        expression, _, value = line.partition("\t")
        try:
            ids = listops.parse(expression)
            if listops.evaluate(ids) != int(value):
                raise ValueError(f"the value is {listops.evaluate(ids)}, not {value}")
        except ValueError as error:
            raise ConfigError(f"{path}:{number}: {error}") from error
        samples.append(Sample((np.asarray(ids, dtype=np.uint16),), int(value)))
    if not samples:
        raise ConfigError(f"{path}: has no samples")
    return samples


def _labelled_text(path: Path, data: LabelledText) -> list[Sample]:
    samples = []
    columns = 3 if data.pairs else 2
    for number, line in enumerate(read_text(path).removesuffix("\n").split("\n"), start=1):
        label, *texts = line.split("\t")
        if len(texts) != columns - 1 or not all(texts):
            raise ConfigError(f"{path}:{number}: needs {columns} columns with text in all of them")
        if not label.isdecimal() or int(label) >= data.classes:
            raise ConfigError(
                f"{path}:{number}: label '{label}' is not one of 0 to {data.classes - 1}"
            )
        # 0 is padding, so a byte's id is one more than the byte.
        ids = tuple(
            np.frombuffer(text.encode(), dtype=np.uint8).astype(np.uint16) + 1 for text in texts
        )
        samples.append(Sample(ids, int(label)))
    return samples
