"""Batches for language models: training batches by step, evaluation over whole splits.

Shapes: inputs and targets (B, n) int64, n the context; targets are inputs one token later.
"""

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lit_attn.config.data.text import IGNORED, Tokens
from lit_attn.data.module import EvaluationLoader, TokenDataModule, numpy_generator
from lit_attn.data.text.streams import Stream
from lit_attn.schema.errors import ConfigError

Batch = tuple[Tensor, Tensor]


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
                text = f"{name} has {len(stream):,} tokens, at least {needed:,} needed"
                raise ConfigError(f"data.context: {text}")
        tokens, size = len(self.streams["train"]), data.batch_size * data.context
        files = [len(source.ids) for source in self.streams["train"].sources]
        # Steps before each file, for `order: files`.
        self.before_file = np.cumsum([0, *((count - 1) // size for count in files)])
        others = {
            "columns": math.ceil((tokens // data.batch_size - 1) / data.context),
            "files": int(self.before_file[-1]),
            "records": tokens // (data.context + 1) // data.batch_size,
        }
        self.per_pass = others.get(data.order, (tokens - 1) // data.context // data.batch_size)
        if not self.per_pass and data.order != "random":
            text = f"are more than the {len(self.streams['train']):,} tokens of train"
            where = f"data.batch_size: {data.batch_size} sequences of {data.context}"
            raise ConfigError(f"{where} {text}; `order: random` draws with replacement")
        self.steps_per_epoch = data.epoch_steps or max(1, self.per_pass)

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
            return self.tensors(*map(np.stack, zip(*windows, strict=True)))

        return self.padded_loader(self._windows(split), collate)

    def _windows(self, split: str) -> list[int]:
        """Return the numbers of the windows of `split` that are evaluated."""
        count = self._window_count(split)
        chosen = min(count, self.data.eval_windows or count)
        return [(2 * i + 1) * count // (2 * chosen) for i in range(chosen)]

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
        tokens, text_bytes = len(stream) - 1, stream.text_bytes
        chosen, ids = self._windows(split), None
        if len(chosen) < self._window_count(split):
            predicted = np.concatenate([self._window(stream, number)[1] for number in chosen])
            ids = predicted[predicted != IGNORED]
            tokens, text_bytes = len(ids), None
        if text_bytes is None and self.data.tokenizer.is_byte_level:
            # Of a part of a split every token but an end of a document is a byte.
            ids = stream.read(0, len(stream)) if ids is None else ids
            text_bytes = int(np.count_nonzero(ids))
        return None if text_bytes is None else text_bytes / tokens

    def batch(self, step: int) -> Batch:
        stream, count = self.streams["train"], self.data.context + 1
        starts = self.offsets(step)
        if self.data.order == "columns":  # The last segment of a pass ends with the columns.
            count = min(count, len(stream) // self.data.batch_size - int(starts[0]))
        (rows,) = self.tensors(
            np.stack([stream.read(int(start), count) for start in self.share(starts)])
        )
        return rows[:, :-1], rows[:, 1:]

    def offsets(self, step: int) -> NDArray[np.int64]:
        """Return the first positions of a step's sequences, over all processes; (batch_size,)."""
        n, size = self.data.context, self.data.batch_size
        if self.data.order == "random":
            drawn = numpy_generator(self.seed, "batch", step)
            return drawn.integers(len(self.streams["train"]) - n, size=size)
        index = step % self.per_pass
        places = np.arange(index * size, (index + 1) * size)
        if self.data.order in ("sequential", "records"):
            return places * (n if self.data.order == "sequential" else n + 1)
        if self.data.order == "files":
            file = int(np.searchsorted(self.before_file, index, side="right")) - 1
            first = index - int(self.before_file[file])
            start = int(self.streams["train"].starts[file])
            return start + np.arange(first * size, (first + 1) * size) * n
        return np.arange(size) * (len(self.streams["train"]) // size) + index * n

    def _window(
        self, stream: Stream, number: int | None
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return inputs and targets (n,) of a window, or padding for None; padding is IGNORED."""
        n = self.data.context
        inputs, targets = np.zeros(n, np.int64), np.full(n, IGNORED, np.int64)
        if number is None:
            return inputs, targets
        start = number * self._stride
        ids = stream.read(start, min(n + 1, len(stream) - start))
        inputs[: len(ids) - 1] = ids[:-1]
        new = max(0, n - self._stride) if number else 0
        targets[new : len(ids) - 1] = ids[1 + new :]
        return inputs, targets
