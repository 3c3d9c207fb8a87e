"""Batches of sentence pairs for translation, by number of tokens, and their byte-pair encoding.

Shapes: B pairs, m source tokens, n target tokens. source: (B, m), inputs and targets: (B, n), all
int64. Sources end with END; inputs begin with END, and targets, one token later, end with it.
"""

import math
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field, PositiveInt
from torch import Tensor

from lit_attn.data.base import TokenData, require_path
from lit_attn.data.log import LOG
from lit_attn.data.module import EvaluationLoader, TokenDataModule, numpy_generator
from lit_attn.data.sets import digest
from lit_attn.data.splits import warn_of_shared_files
from lit_attn.data.text.ids import END, IGNORED, PADDING, SPLITS, UNKNOWN
from lit_attn.data.text.streams import read_lines
from lit_attn.extras import require
from lit_attn.floors.base import Floor
from lit_attn.floors.sentences import TRANSLATION_RULES, SentencePairs, translation_floors
from lit_attn.schema.base import outside_identity
from lit_attn.schema.errors import ConfigError
from lit_attn.signatures import ParallelTokens

if TYPE_CHECKING:
    from torchmetrics.text import SacreBLEUScore

SPECIAL = ["<pad>", "</s>", "<unk>"]  # Names of PADDING, END and UNKNOWN.

MULTIPLE = 8  # Factor of the number of pairs in a batch that has more of them, as in fairseq.

Ids = NDArray[np.uint32]
Pair = tuple[Ids, Ids]


class ParallelText(TokenData, kind="parallel-text"):
    """Translation from `source` to `target`: files NAME.LANGUAGE, line i of both is one pair.

    The text is tokenised; words are split at white space. Byte-pair encoding is learned from both
    languages of train. A batch has pairs of similar length, padded to the longest sentence.
    """

    floor_rules: ClassVar = TRANSLATION_RULES

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

    def build(self, seed: int, device: torch.device) -> "ParallelData":
        return ParallelData(self, seed, device)

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


class ParallelData(TokenDataModule):
    """Sentence pairs. Batches are formed once for a seed; every epoch has its own order of them.

    Evaluated pairs are ordered by length, so that batches have little padding. Raises ConfigError
    if files are missing or malformed, or evaluated sentences are too long.
    """

    def __init__(self, data: ParallelText, seed: int, device: torch.device) -> None:
        super().__init__(data, seed, device)
        self.data = data
        self.splits = ["val", "test"]
        for language in (0, 1):
            warn_of_shared_files({split: data.files(split)[language] for split in SPLITS})
        texts = {split: read_sides(data, split) for split in SPLITS}
        self.encoder = Subwords(texts["train"], data.vocabulary)
        self.pairs: dict[str, list[Pair]] = {}
        for split in SPLITS:
            sides = [self.encoder.encode(sentences) for sentences in texts[split]]
            self.pairs[split] = list(zip(*sides, strict=True))
            if split == "train":
                continue
            for path, side in zip(data.files(split), sides, strict=True):
                _require_context(path, side, data.context)
            self.pairs[split].sort(key=lambda pair: len(pair[0]))
        self.batches = self._form_batches()
        self.steps_per_epoch = len(self.batches)

    def _form_batches(self) -> list[list[int]]:
        """Return the rows of train in each batch, rows of similar lengths together.

        Warns of pairs that are too long for the context or a batch. Raises ConfigError if all are.
        """
        pairs = self.pairs["train"]
        limit = min(self.data.context, self.data.batch_size)
        # Lengths of source and target (pairs, 2), with the end of each.
        lengths = np.array([[len(source) + 1, len(target) + 1] for source, target in pairs])
        longer_sides = lengths.max(1)
        kept = np.flatnonzero(longer_sides <= limit)
        # Pairs of equal lengths stay in this random order.
        kept = numpy_generator(self.seed, "pairs", 0).permutation(kept)
        source_lengths, target_lengths = lengths[kept].T
        # The last key of lexsort is the first one to be compared.
        order = kept[np.lexsort((target_lengths, source_lengths))]
        batches = cut_batches(order, longer_sides, self.data.batch_size)
        if not batches:
            raise ConfigError("data.context: every pair of train is longer, or than a batch")
        left_out = len(pairs) - len(kept)
        if left_out:
            LOG.warning(
                "data.context: %s of %s training pairs are left out, because a side exceeds %s "
                "subwords",
                f"{left_out:,}",
                f"{len(pairs):,}",
                f"{limit:,}",
            )
        return batches

    def words(self, ids: list[int]) -> str:
        """Return the text of token ids, whose words BLEU compares."""
        return self.encoder.decode(ids)

    def floors(self, split: str, steps: int) -> list[Floor]:
        """Return the BLEU of rules that translate words or sentences."""
        train, evaluated = self._read_sentences("train"), self._read_sentences(split)
        return translation_floors(train, evaluated, measure_bleu)

    def _read_sentences(self, split: str) -> SentencePairs:
        """Return the texts of a split after encoding and decoding."""
        sources, targets = [], []
        for source, target in self.pairs[split]:
            sources.append(self.words(source.tolist()))
            targets.append(self.words(target.tolist()))
        return SentencePairs(sources, targets)

    def fingerprint(self) -> str:
        return digest(self._list_content())

    def _list_content(self) -> Iterator[bytes | Ids]:
        """Yield the ids of every sentence, with their number before them."""
        for split in SPLITS:
            for pair in self.pairs[split]:
                for ids in pair:
                    yield len(ids).to_bytes(8, "big")
                    yield ids

    def batch(self, step: int) -> tuple[Tensor, ...]:
        """Return source, inputs, targets, and the mean number of targets of a row (B,).

        The mean is that of the complete step, so the loss does not depend on how many processes
        and micro-batches share it.
        """
        epoch, index = divmod(step, self.steps_per_epoch)
        order = numpy_generator(self.seed, "order", epoch).permutation(len(self.batches))
        pairs = [self.pairs["train"][row] for row in self.batches[order[index]]]
        # Every micro-batch of every process has the same number of rows.
        shares = self.world * self.accumulate
        rows = shares * math.ceil(len(pairs) / shares)
        mean = sum(len(target) + 1 for _, target in pairs) / rows
        process_rows = rows // self.world
        tensors = self.collate(self.share(pairs), process_rows)
        return (*tensors, *self.tensors(np.full(process_rows, mean, np.float32)))

    def evaluation_loader(self, split: str) -> EvaluationLoader:
        return self.padded_loader(self.pairs[split], self.collate)

    def collate(self, pairs: list[Pair], rows: int) -> tuple[Tensor, ...]:
        """Return source, inputs and targets of `rows` rows; rows without a pair have no target."""
        m = 1 + max((len(from_ids) for from_ids, _ in pairs), default=0)
        n = 1 + max((len(to_ids) for _, to_ids in pairs), default=0)
        source = np.full((rows, m), PADDING, np.int64)
        inputs = np.full((rows, n), PADDING, np.int64)
        targets = np.full((rows, n), IGNORED, np.int64)
        # Also a row without a pair has one token, to which others can attend.
        source[len(pairs) :, 0] = END
        inputs[:, 0] = END
        for row, (from_ids, to_ids) in enumerate(pairs):
            source[row, : len(from_ids) + 1] = [*from_ids, END]
            inputs[row, 1 : len(to_ids) + 1] = to_ids
            targets[row, : len(to_ids) + 1] = [*to_ids, END]
        return self.tensors(source, inputs, targets)


def make_bleu() -> "SacreBLEUScore":
    """Return the metric of translations, whose words stand between spaces."""
    # Imported here, because torchmetrics takes seconds, and a dry run measures nothing.
    from torchmetrics.text import SacreBLEUScore

    return SacreBLEUScore(tokenize="none")


def mark_unknown(translation: str) -> str:
    """Return a translation in which no unknown character equals one of a reference."""
    unknown = SPECIAL[UNKNOWN]
    return translation.replace(unknown, f"<{unknown}>")


def measure_bleu(translations: list[str], references: list[str]) -> float:
    """Return the BLEU, from 0 to 1, of translations with one reference each."""
    bleu = make_bleu()
    marked = [mark_unknown(translation) for translation in translations]
    bleu.update(marked, [[reference] for reference in references])
    return float(bleu.compute())


class Subwords:
    """Byte-pair encoding of words, learned from both languages of the training pairs.

    The first subword of a word begins with "▁". Equal texts give an equal encoding.
    """

    def __init__(self, sides: list[list[str]], vocabulary: int) -> None:
        """Raise ConfigError if `tokenizers` is missing or the characters exceed the vocabulary."""
        library = require("tokenizers", "data.vocabulary", "text")
        # An end-of-word suffix would be numbered in the order of a hash table.
        self.tokenizer = library.Tokenizer(library.models.BPE(unk_token=SPECIAL[UNKNOWN]))
        self.tokenizer.pre_tokenizer = library.pre_tokenizers.Metaspace()
        self.tokenizer.decoder = library.decoders.Metaspace()
        trainer = library.trainers.BpeTrainer(
            vocab_size=vocabulary, special_tokens=SPECIAL, show_progress=False
        )
        self.tokenizer.train_from_iterator(chain(*sides), trainer)
        # The text may contain the names of the special tokens.
        self.tokenizer.encode_special_tokens = True
        size = self.tokenizer.get_vocab_size()
        if size > vocabulary:
            raise ConfigError(
                f"data.vocabulary: {vocabulary} is less than the {size} characters of train"
            )

    def encode(self, sentences: list[str]) -> list[Ids]:
        """Return the ids of every sentence, without its end."""
        encoded = self.tokenizer.encode_batch(sentences, add_special_tokens=False)
        return [np.asarray(part.ids, np.uint32) for part in encoded]

    def decode(self, ids: list[int]) -> str:
        """Return the text of `ids`, words between spaces."""
        return self.tokenizer.decode(ids, skip_special_tokens=False)


def _require_context(path: Path, sentences: list[Ids], context: int) -> None:
    """Raise ConfigError if a sentence with its end has more than `context` subwords."""
    lengths = [len(ids) + 1 for ids in sentences]
    longest = int(np.argmax(lengths))
    if lengths[longest] > context:
        raise ConfigError(
            f"{path}:{longest + 1}: has {lengths[longest]:,} subwords with its end; set "
            f"data.context to at least as many, not {context}"
        )


def read_sides(data: ParallelText, split: str) -> list[list[str]]:
    """Return the sources and the targets of `split`, and warn of pairs with an empty sentence.

    Raises ConfigError if one side has more lines.
    """
    paths = data.files(split)
    sources = _read_sentences(paths[0])
    targets = _read_sentences(paths[1])
    if len(sources) != len(targets):
        raise ConfigError(
            f"{paths[1]}: has {len(targets):,} lines, and {paths[0].name} has {len(sources):,}"
        )
    pairs = enumerate(zip(sources, targets, strict=True), start=1)
    empty = [number for number, pair in pairs if not all(pair)]
    if empty:
        LOG.warning(
            "%s and %s: %s of %s pairs have an empty sentence, the first in line %s; if lines are "
            "missing on one side, all pairs after them are wrong",
            paths[0],
            paths[1].name,
            f"{len(empty):,}",
            f"{len(sources):,}",
            f"{empty[0]:,}",
        )
    return [sources, targets]


def _read_sentences(path: Path) -> list[str]:
    """Return the sentence of every line, with one space between two words."""
    return [" ".join(line.split()) for line in read_lines(path)]


def cut_batches(order: NDArray[np.int64], sizes: NDArray[np.int64], limit: int) -> list[list[int]]:
    """Return batches of consecutive rows of `order` whose padded tokens do not exceed `limit`.

    A batch of more than MULTIPLE rows has a multiple of it; the rows beyond start the next batch.
    """
    batches: list[list[int]] = []
    batch: list[int] = []
    for row in order.tolist():
        while batch and (len(batch) + 1) * max(sizes[[*batch, row]]) > limit:
            size = len(batch)
            if size > MULTIPLE:
                size -= size % MULTIPLE
            batches.append(batch[:size])
            batch = batch[size:]
        batch.append(row)
    if batch:
        batches.append(batch)
    return batches
