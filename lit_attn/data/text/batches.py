"""Tokens for language models: training batches by step, evaluation over whole splits.

Shapes: inputs and targets (B, n) int64, n the context; targets are inputs one token later.
"""

import math
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field, PositiveInt
from torch import Tensor

from lit_attn.data.base import TokenData
from lit_attn.data.module import EvaluationLoader, TokenDataModule, numpy_generator
from lit_attn.data.text.ids import IGNORED
from lit_attn.data.text.streams import Stream, encode_texts
from lit_attn.data.text.tokenizers import Bytes, Encoder, Tokenizer
from lit_attn.floors.base import Floor
from lit_attn.floors.counts import (
    COMPRESSOR,
    COUNT_RULES,
    Counts,
    Targets,
    compress_floor,
    count_floor,
    language_values,
)
from lit_attn.schema.base import consistency_check
from lit_attn.schema.errors import ConfigError
from lit_attn.signatures import TokenStream

Batch = tuple[Tensor, Tensor]

MOST_COUNTED = 2_000_000
"""Most training tokens that a floor counts or compresses."""

COUNTED_BLOCK = 10_000
"""Tokens of a block of a longer text, of which a floor reads as many as it may."""


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

    @property
    def floor_rules(self) -> tuple[str, ...]:
        return (*COUNT_RULES, COMPRESSOR) if self.tokenizer.is_byte_level else COUNT_RULES

    def build(self, seed: int, device: torch.device) -> "TextData":
        return TextData(self, seed, device)

    def texts(self) -> dict[str, list[tuple[str, str]]]:
        """Return (name, text) of every document of every split; raise ConfigError as `streams`."""
        raise ConfigError(f"data.kind: '{self.kind}' has tokens and no text")

    def streams(self) -> dict[str, Stream]:
        """Return the stream of "train", "val" and perhaps "test".

        Raises ConfigError naming the file that is missing, empty or malformed.
        """
        return encode_texts(self.tokenizer, self.texts())

    def encoder(self) -> Encoder:
        """Return the encoder between text and token ids."""
        if not self.tokenizer.is_learned:
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


class NamedTokens(Tokens):
    """Text of the user; `name` stands for it in identities and tables."""

    name: str = Field(description="name of the data set in identities and tables")


class TextData(TokenDataModule):
    """Training sequences and evaluation windows of one text.

    Raises ConfigError if files are missing or malformed, or do not fill a sequence.
    """

    def __init__(self, data: Tokens, seed: int, device: torch.device) -> None:
        super().__init__(data, seed, device)
        self.data = data
        self.streams: dict[str, Stream] = data.streams()
        self.splits = [name for name in ("val", "test") if name in self.streams]
        for name, stream in self.streams.items():
            needed = data.context + 1 if name == "train" else 2
            if len(stream) < needed:
                raise ConfigError(
                    f"data.context: {name} has {len(stream):,} tokens, at least {needed:,} needed"
                )
        # Steps before each file, for `order: files`; a step does not cross from one to the next.
        step_tokens = data.batch_size * data.context
        sources = self.streams["train"].sources
        steps_of_files = [(len(source.ids) - 1) // step_tokens for source in sources]
        self.before_file = np.cumsum([0, *steps_of_files])
        self.per_pass = self._count_steps_of_a_pass()
        if not self.per_pass and data.order != "random":
            raise ConfigError(
                f"data.batch_size: {data.batch_size} sequences of {data.context} are more than the "
                f"{len(self.streams['train']):,} tokens of train; `order: random` draws with "
                "replacement"
            )
        self.steps_per_epoch = data.epoch_steps or max(1, self.per_pass)

    def _count_steps_of_a_pass(self) -> int:
        """Return the number of complete steps in one pass over train, in the configured order."""
        tokens = len(self.streams["train"])
        context = self.data.context
        batch_size = self.data.batch_size
        if self.data.order == "columns":
            column = tokens // batch_size
            return math.ceil((column - 1) / context)
        if self.data.order == "files":
            return int(self.before_file[-1])
        if self.data.order == "records":
            records = tokens // (context + 1)
            return records // batch_size
        # The last token is only a target.
        sequences = (tokens - 1) // context
        return sequences // batch_size

    def fingerprint(self) -> str:
        return "-".join(stream.fingerprint[:6] for stream in self.streams.values())

    def evaluation_loader(self, split: str) -> EvaluationLoader:
        """Return a loader of the windows of `split`, each token but the first the target of one.

        Windows advance by the stride. If it is less than the context, a window predicts only the
        tokens that no earlier window predicts. With `eval_windows` some of them are left out.
        """
        stream = self.evaluated(split)

        def collate(numbers: list[int], rows: int) -> Batch:
            padding = [None] * (rows - len(numbers))
            windows = [self._window(stream, number) for number in (*numbers, *padding)]
            inputs = np.stack([window_inputs for window_inputs, _ in windows])
            targets = np.stack([window_targets for _, window_targets in windows])
            return self.tensors(inputs, targets)

        return self.padded_loader(self._windows(split), collate)

    def _windows(self, split: str) -> list[int]:
        """Return the numbers of the windows of `split` that are evaluated."""
        count = self._window_count(split)
        chosen = min(count, self.data.eval_windows or count)
        # The windows in the middle of `chosen` equal parts.
        return [(2 * part + 1) * count // (2 * chosen) for part in range(chosen)]

    def _window_count(self, split: str) -> int:
        """Return the number of windows that predict all tokens of `split`."""
        excess = max(0, len(self.evaluated(split)) - 1 - self.data.context)
        return 1 + math.ceil(excess / self._stride)

    @property
    def _stride(self) -> int:
        """Number of tokens by which evaluation windows advance."""
        if self.data.order == "records":
            return self.data.context + 1
        return self.data.eval_stride or self.data.context

    def evaluated(self, split: str) -> Stream:
        """Return the tokens of `split` that are evaluated."""
        limit = self.data.eval_tokens
        return self.streams[split] if limit is None else self.streams[split].head(limit + 1)

    def bytes_per_token(self, split: str) -> float | None:
        stream = self.evaluated(split)
        windows = self._windows(split)
        if len(windows) == self._window_count(split):
            # The first token is no target.
            tokens = len(stream) - 1
            if stream.text_bytes is not None:
                return stream.text_bytes / tokens
            ids = None
        else:
            targets = np.concatenate([self._window(stream, number)[1] for number in windows])
            ids = targets[targets != IGNORED]
            tokens = len(ids)
        if not self.data.tokenizer.is_byte_level:
            return None
        # In a part of a split every token but an end of a document (id 0) is a byte.
        if ids is None:
            ids = stream.read(0, len(stream))
        return int(np.count_nonzero(ids)) / tokens

    def batch(self, step: int) -> Batch:
        stream = self.streams["train"]
        count = self.data.context + 1
        starts = self.offsets(step)
        if self.data.order == "columns":
            # The last segment of a pass ends with the columns.
            column = len(stream) // self.data.batch_size
            count = min(count, column - int(starts[0]))
        sequences = [stream.read(int(start), count) for start in self.share(starts)]
        (rows,) = self.tensors(np.stack(sequences))
        return rows[:, :-1], rows[:, 1:]

    def floors(self, split: str, steps: int) -> list[Floor]:
        """Return counts fitted to the tokens that a cell sees and to all tokens, and xz of bytes.

        The number of preceding tokens is the best one on val, or without val on further batches.
        """
        evaluated = self._targets_of(split)
        # The steps after the last one of a cell are new batches of the training text.
        further = self._read_rows(range(steps, steps + 8))
        chosen_on = Targets(further, np.arange(further.shape[1]) > np.zeros((len(further), 1)))
        if "val" in self.splits and split != "val":
            chosen_on = self._targets_of("val")
        every_token = read_spread(self.streams["train"], MOST_COUNTED)
        tokens_of_step = self.batch_size * (self.data.context + 1)
        counted_steps = min(steps, max(1, MOST_COUNTED // tokens_of_step))
        fitted = {"seen": self._read_rows(range(counted_steps)), "all": every_token}
        floors = []
        for name, rows in fitted.items():
            counts = Counts(rows, self.signature.vocabulary)
            length, loss = count_floor(counts, chosen_on, evaluated)
            values = language_values(loss, self.bytes_per_token(split))
            conditions = f"{rows.size:,} training tokens"
            floors.append(Floor(f"counts of {length} tokens ({name})", values, conditions))
        if self.data.tokenizer.is_byte_level:
            floors.append(compress_floor(self._read_bytes("train"), self._read_bytes(split)))
        return floors

    def _read_rows(self, steps: range) -> NDArray[np.int64]:
        """Return the sequences of some steps with their last target, (R, n + 1).

        Without the shorter ones at the end of a pass in columns, unless there are no others.
        """
        rows = []
        for step in steps:
            inputs, targets = self.batch(step)
            rows.append(torch.cat([inputs, targets[:, -1:]], dim=1).cpu().numpy())
        longest = max(sequences.shape[1] for sequences in rows)
        return np.concatenate([part for part in rows if part.shape[1] == longest])

    def _targets_of(self, split: str) -> Targets:
        """Return the evaluated windows of a split, each with its last target."""
        stream = self.evaluated(split)
        rows, masks = [], []
        for number in self._windows(split):
            inputs, targets = self._window(stream, number)
            is_predicted = targets != IGNORED
            last_target = max(int(targets[-1]), 0)
            rows.append(np.append(inputs, last_target))
            masks.append(np.append(False, is_predicted))
        return Targets(np.stack(rows), np.stack(masks))

    def _read_bytes(self, split: str) -> bytes:
        """Return the text of a split of bytes, without the ends of documents (id 0)."""
        ids = read_spread(self.evaluated(split), MOST_COUNTED)
        return ids[ids > 0].astype(np.uint8).tobytes()

    def offsets(self, step: int) -> NDArray[np.int64]:
        """Return the first positions of a step's sequences, over all processes; (batch_size,)."""
        n = self.data.context
        size = self.data.batch_size
        stream = self.streams["train"]
        if self.data.order == "random":
            drawn = numpy_generator(self.seed, "batch", step)
            return drawn.integers(len(stream) - n, size=size)
        index = step % self.per_pass
        if self.data.order == "columns":
            column = len(stream) // size
            return np.arange(size) * column + index * n
        if self.data.order == "files":
            file = int(np.searchsorted(self.before_file, index, side="right")) - 1
            first = index - int(self.before_file[file])
            start = int(stream.starts[file])
            return start + np.arange(first * size, (first + 1) * size) * n
        numbers = np.arange(index * size, (index + 1) * size)
        # The last target of a sequence is the first token of the next one, but not of a record.
        advance = n + 1 if self.data.order == "records" else n
        return numbers * advance

    def _window(
        self, stream: Stream, number: int | None
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return inputs and targets (n,) of a window, or padding for None; padding is IGNORED."""
        n = self.data.context
        inputs = np.zeros(n, np.int64)
        targets = np.full(n, IGNORED, np.int64)
        if number is None:
            return inputs, targets
        start = number * self._stride
        ids = stream.read(start, min(n + 1, len(stream) - start))
        inputs[: len(ids) - 1] = ids[:-1]
        # The targets before this place belong to earlier windows.
        first_new = max(0, n - self._stride) if number else 0
        targets[first_new : len(ids) - 1] = ids[1 + first_new :]
        return inputs, targets


def read_spread(stream: Stream, most: int) -> NDArray[np.int64]:
    """Return all ids of a stream as one row, or blocks of at most `most` ids, evenly spread.

    The blocks are rows. The beginning alone may be one kind of text, such as documentation.
    """
    if len(stream) <= most:
        return stream.read(0, len(stream))[None]
    size = min(COUNTED_BLOCK, most)
    starts = np.linspace(0, len(stream) - size, most // size).astype(int)
    return np.stack([stream.read(int(start), size) for start in starts])
