"""Base of the data modules, their loaders, and the division of samples among processes.

The batch of training step s is a pure function of (seed, s), so a cell that resumes from a
checkpoint trains on exactly the batches that it would have trained on. With R processes, the
process of rank r reads the samples r, r + R, r + 2 R, ... of each batch and of each split.

So the batch of a process is a function of (seed, s, r), and worker processes can prepare it ahead
of the device (`loading.BatchWorkers`). The same function runs in this process without workers.
"""

import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from lit_attn.data.base import Data
from lit_attn.data.loading import BatchWorkers, choose_workers, start_copy
from lit_attn.floors.base import FREQUENT_CLASS, Floor
from lit_attn.schema.base import require_methods
from lit_attn.schema.errors import ConfigError


class DataModule(ABC):
    """Training batches and evaluation splits of one data set.

    A subclass sets `splits`, the names of the evaluated splits in the order of their loaders
    ("val" where there is one, then "test"), and `steps_per_epoch`, in optimiser steps.
    """

    splits: list[str]
    steps_per_epoch: int

    _order: tuple[int, Any] = (-1, None)

    largest_class: Mapping[str, tuple[float, int]] = {}
    """Share of the most frequent class, and the number of labels, of each split with classes."""

    last_batch = 0
    """Samples of an epoch's last batch if it is not full."""

    trainer: Any = None
    """Lightning's trainer during a training or an evaluation, which knows this process's rank."""

    inseparable = 1
    """Samples that one process must have together: 2 if a batch is mixed in pairs."""

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        require_methods(cls, "data module")

    def __init__(self, data: Data, seed: int, device: torch.device) -> None:
        self.workers = choose_workers(data.workers, data.prepares_on_cpu, device)
        self.signature: Any = data.signature()
        self.accumulate = data.micro_batches
        self.batch_size = data.batch_size
        self.eval_batch_size = data.eval_batch_size
        self.seed = seed
        self.device = device
        self.training_workers = self.make_workers(self.batch)
        self._stream: Iterator[Any] = iter(())
        self._stream_step: int | None = None
        self._stream_end = 0

    @abstractmethod
    def fingerprint(self) -> str:
        """Return a hash of the data that the cell trains and evaluates on."""

    @abstractmethod
    def batch(self, step: int) -> Any:
        """Return this process's samples of training step `step`, a function of `step` alone.

        With `data.workers` it is called in worker processes, where `device` is the CPU.
        """

    def finish(self, batch: Any) -> Iterable[Any]:
        """Return the micro-batches of a result of `batch`; called in the training process."""
        return [batch]

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Return a micro-batch, which is on the device now, as the task receives it."""
        return batch

    def train_batches(self, start: int, stop: int) -> Iterator[Any]:
        """Yield this process's micro-batches of the training steps from `start` up to `stop`.

        The workers do not stop at the end of an epoch: they prepare the next one while the cell is
        evaluated.
        """
        if self._stream_step != start or self._stream_end < stop:
            self._stream_end = stop if self.trainer is None else max(stop, self.trainer.max_steps)
            self._stream = self.training_workers.read(range(start, self._stream_end))
        for step in range(start, stop):
            # A stream that has raised an error has ended.
            self._stream_step = None
            batch = next(self._stream)
            self._stream_step = step + 1
            yield from self.finish(batch)

    def make_workers(self, make: Callable[[Any], Any]) -> BatchWorkers:
        """Return the `data.workers` processes that call `make`, which start at the first read."""
        is_pinned = self.device.type == "cuda"
        return BatchWorkers(make, self.workers, self.prepare_worker, is_pinned=is_pinned)

    def prepare_worker(self) -> None:
        """Set up a worker process before its first batch."""
        # A forked process cannot use the GPU of its parent.
        self.device = torch.device("cpu")

    def stop_workers(self) -> None:
        """End all worker processes of this module. A later read starts new ones."""
        self.training_workers.close()
        self._stream_step = None

    def rows(self, step: int, order: Callable[[int], Any], steps: int | None = None) -> Any:
        """Return the rows of a training step in `order(number)` of a pass of `steps` steps.

        The order of the last pass is kept; a pass is an epoch if `steps` is None.
        """
        number, index = divmod(step, steps or self.steps_per_epoch)
        if self._order[0] != number:
            self._order = (number, order(number))
        return self._order[1][index * self.batch_size : (index + 1) * self.batch_size]

    def set_epoch(self, samples: int, drop_last: bool) -> None:
        """Set the steps of an epoch of `samples` samples; raise ConfigError if there is none."""
        self.last_batch = 0 if drop_last else samples % self.batch_size
        self.steps_per_epoch = samples // self.batch_size + bool(self.last_batch)
        if self.steps_per_epoch < 1:
            raise ConfigError(
                f"data.batch_size: {self.batch_size} is more than the {samples} samples of an "
                f"epoch; {samples} at most"
            )

    def bytes_per_token(self, split: str) -> float | None:
        """Return the bytes of text per evaluated token of `split`, or None if they are unknown."""
        return None

    def floors(self, split: str, steps: int) -> list[Floor]:
        """Return what rules without attention reach on `split`.

        `steps` are the training steps of a cell, for rules that are fitted to as much as it sees.
        This base knows the most frequent class. `floor_rules` of the configuration names the rules.
        """
        if split not in self.largest_class:
            return []
        share, count = self.largest_class[split]
        return [Floor(FREQUENT_CLASS, {"accuracy": share}, f"{count:,} evaluated")]

    @abstractmethod
    def evaluation_loader(self, split: str) -> "EvaluationLoader":
        """Return the loader of this process's share of `split`."""

    def check(self) -> None:
        """Raise ConfigErrors that a cell would raise later; called once before the first cell."""
        self.val_dataloader()

    @property
    def rank(self) -> int:
        """Rank of this process among the `world` processes that share a batch."""
        return 0 if self.trainer is None else self.trainer.global_rank

    @property
    def world(self) -> int:
        """Number of processes that share a batch."""
        return 1 if self.trainer is None else self.trainer.world_size

    def share(self, samples: Any) -> Any:
        """Return every `world`-th of `samples` (a sequence, array or tensor) from `rank` on."""
        return samples[self.rank :: self.world]

    def require_even_shares(self) -> None:
        """Raise ConfigError if the processes cannot have equal shares of every batch."""
        micro_batch = self.batch_size // self.accumulate
        unit = self.world * self.inseparable
        if micro_batch % unit:
            pairs = " in pairs, which MixUp and CutMix need" if self.inseparable > 1 else ""
            raise ConfigError(
                f"data.batch_size: {self.world} devices cannot share a micro-batch of "
                f"{micro_batch} samples evenly{pairs}; make it a multiple of {unit}"
            )
        if self.last_batch % self.world:
            raise ConfigError(
                f"data.drop_last: {self.world} devices cannot share the epoch's last batch of "
                f"{self.last_batch} samples evenly; set data.drop_last: true"
            )

    def train_dataloader(self) -> "TrainLoader":
        """Return the loader of the training batches; raise as `require_even_shares`."""
        self.require_even_shares()
        return TrainLoader(self)

    def val_dataloader(self) -> "list[EvaluationLoader]":
        """Return one loader for each of `splits`; raise ConfigError for a loader without batches.

        A process that evaluates nothing would not take part when the processes add up metrics.
        """
        loaders = [self.evaluation_loader(split) for split in self.splits]
        for split, loader in zip(self.splits, loaders, strict=True):
            if len(loader) == 0:
                raise ConfigError(
                    f"data: the evaluation loader of {split} has no batch for process {self.rank} "
                    f"of {self.world}; it needs at least one, with padding (places from "
                    f"{loader.count} on in `units`), or set a smaller training.devices"
                )
        return loaders

    def padded_loader(
        self, samples: Sequence[Any], collate: Callable[[Any, int], Any]
    ) -> "EvaluationLoader":
        """Return a loader of `collate(part, rows)` for parts of `eval_batch_size` samples.

        Processes take parts in turn and have the same number of them. A part can have fewer samples
        than `rows`; `collate` must mark the other rows, which are padding, as not to be counted. A
        process that has no samples left gets the first sample, as padding.
        """
        size, count = self.eval_batch_size, len(samples)
        rounds = math.ceil(count / (size * self.world))
        parts: list[Sequence[Any]] = []
        places: list[range] = []
        for number in range(rounds):
            start = (number * self.world + self.rank) * size
            part = samples[start : start + size]
            parts.append(part if start < count else samples[:1])
            places.append(range(start, start + size))

        def load(parts: Sequence[Sequence[Any]]) -> Iterator[Any]:
            return (collate(part, size) for part in parts)

        return EvaluationLoader(parts, load, places, count)


class TrainLoader:
    """Micro-batches from the trainer's current step to the end of its epoch.

    The step is the loader's only state. Lightning resumes within an epoch only if the loader has
    the methods `state_dict` and `load_state_dict`, so it has them.
    """

    def __init__(self, data: DataModule) -> None:
        self.data = data

    def __len__(self) -> int:
        return self.data.steps_per_epoch * self.data.accumulate

    def __iter__(self) -> Iterator[Any]:
        steps = self.data.steps_per_epoch
        start = 0 if self.data.trainer is None else self.data.trainer.global_step
        return self.data.train_batches(start, (start // steps + 1) * steps)

    def state_dict(self) -> dict[str, int]:
        """Return an empty state."""
        return {}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Do nothing: the trainer's step says where to resume."""


@dataclass(eq=False)
class EvaluationLoader:
    """Batches of one split for one process: `load(batches)`, and their number.

    `units` has the places of each batch's rows among the `count` samples (images, sequences,
    windows) of the split; places from `count` on are padding. A process without samples has one
    batch of padding, so that it takes part when the processes add up their metrics.
    """

    batches: Sequence[Any]
    load: Callable[[Sequence[Any]], Iterator[Any]]
    units: Sequence[Sequence[int]]
    count: int

    def count_samples(self, number: int) -> int:
        """Return the number of rows of batch `number` that are not padding."""
        return sum(place < self.count for place in self.units[number])

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Any]:
        return self.load(self.batches)


class TokenDataModule(DataModule, ABC):
    """Data module whose batches are tensors of token ids, cut into `accumulate` micro-batches."""

    @abstractmethod
    def batch(self, step: int) -> tuple[torch.Tensor, ...]:
        """Return this process's samples of training step `step`, on `device`."""

    def tensors(self, *arrays: NDArray[Any]) -> Any:
        """Return `arrays` as tensors on the data's device."""
        return tuple(start_copy(torch.from_numpy(array), self.device) for array in arrays)

    def finish(self, batch: tuple[torch.Tensor, ...]) -> Iterable[tuple[torch.Tensor, ...]]:
        """Return the micro-batches of a batch."""
        parts = [tensor.chunk(self.accumulate) for tensor in batch]
        return zip(*parts, strict=True)


def numpy_generator(seed: int, purpose: str, number: int) -> np.random.Generator:
    """Return a NumPy generator for one purpose and number, independent of all others."""
    return np.random.default_rng([seed, *purpose.encode(), number])


def torch_generator(seed: int, purpose: str, number: int) -> torch.Generator:
    """Return a CPU generator for one purpose and number, independent of all others."""
    digest = hashlib.sha256(f"{seed} {purpose} {number}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
