"""Plug-in for probes: small generated tasks that each need one ability of a sequence model.

This file has what all probes share: the data and the configuration of the task, which itself is in
probe_task.py. The probes themselves are in recall.py, memory.py, search.py and tracking.py; a study
names the files that it needs under `parts`. A probe of your own is one more class like those.

Shapes: B sequences, n tokens. tokens and targets: (B, n) int64; a target of -100 does not count.
"""

import inspect
from abc import abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field, PositiveInt
from torch import Tensor

from lit_attn.data.base import TokenData
from lit_attn.data.kept import keep_arrays
from lit_attn.data.module import EvaluationLoader, TokenDataModule, numpy_generator
from lit_attn.data.sets import digest
from lit_attn.data.text.ids import IGNORED
from lit_attn.floors.base import Floor
from lit_attn.schema.base import consistency_check, outside_identity
from lit_attn.signatures import TokenStream
from lit_attn.tasks.task import MetricInfo, Task, percent

Ids = NDArray[np.int64]

FIXED = 0
"""Seed of the evaluated sequences and of fixed tables, whatever the seed of the cell."""

GUESSING = "guessing"
"""Name of the floor."""

ROWS_AT_ONCE = 1000  # Fixed rows that are drawn or hashed together.
SOLVED = 0.9
"""Accuracy from which a probe counts as solved."""

LONGER = "longer"
"""Split with sequences that are longer than those of the training."""


@dataclass(frozen=True)
class ProbeTokens(TokenStream):
    """Generated sequences of `context` tokens at most; `floor` is an accuracy without the ability.

    Batches are tokens and targets (B, n); a target of -100 does not count.
    """

    floor: float = 0.0


class Probe(TokenData):
    """Base of the probes. An epoch is `epoch_steps` steps of new sequences, or of fixed `rows`.

    A member defines `vocabulary`, `floor` and `draw`. Evaluated sequences are equal for all seeds.
    """

    runs_foreign_code: ClassVar[bool] = False  # Tests try it out, so a dry run need not.
    floor_rules: ClassVar = (GUESSING,)

    length: PositiveInt = Field(64, description="tokens of a training sequence")
    longer: PositiveInt | None = Field(
        None, description="tokens of a sequence of the further split `longer`; null: no such split"
    )
    batch_size: PositiveInt = Field(64, description="sequences of a step, over all devices")
    epoch_steps: PositiveInt = Field(100, description="training steps of an epoch")
    rows: PositiveInt | None = Field(
        None,
        description="training sequences that are drawn once, equal for all seeds, and read in "
        "random orders; null: new sequences in each step",
    )
    root: Path = outside_identity(
        Path("data/probes"), "folder in which the first cell keeps the fixed `rows`"
    )
    eval_batch_size: PositiveInt = Field(256, description="sequences of an evaluation batch")
    eval_sequences: PositiveInt = Field(512, description="evaluated sequences of each split")

    @property
    @abstractmethod
    def vocabulary(self) -> int:
        """Number of token ids, special ones included."""

    @property
    @abstractmethod
    def floor(self) -> float:
        """Expected accuracy of the best rule that lacks the ability that the probe needs."""

    @property
    def floor_loss(self) -> float | None:
        """Loss of this rule in nats per target, or None if it is not known."""
        return None

    @abstractmethod
    def draw(
        self, generator: np.random.Generator, count: int, length: int, is_training: bool
    ) -> tuple[Ids, Ids]:
        """Return tokens and targets (count, length), where a target of -100 does not count."""

    @consistency_check
    def _rows_fill_a_batch(self) -> None:
        """Refuse fewer fixed rows than a batch has."""
        if self.rows is not None and self.rows < self.batch_size:
            raise ValueError(f"rows: {self.rows} fill no batch of {self.batch_size}; write more")

    @property
    def splits(self) -> tuple[str, ...]:
        return ("test", "val") if self.longer is None else ("test", "val", LONGER)

    @property
    def context(self) -> int:
        """Tokens of the longest sequence."""
        return max(self.length, self.longer or 0)

    def length_of(self, split: str) -> int:
        """Return the number of tokens of a sequence of `split`."""
        return self.context if split == LONGER else self.length

    def input_paths(self) -> list[Path]:
        """Return no files: kept rows follow from the keys."""
        return []

    def signature(self) -> ProbeTokens:
        return ProbeTokens(self.vocabulary, self.context, floor=self.floor)

    def build(self, seed: int, device: torch.device) -> "ProbeData":
        return ProbeData(self, seed, device)


class ProbeData(TokenDataModule):
    """Data module of a probe; the batch of a step is a function of the seed and the step."""

    def __init__(self, probe: Probe, seed: int, device: torch.device) -> None:
        super().__init__(probe, seed, device)
        self.probe = probe
        self.steps_per_epoch = probe.epoch_steps
        self.splits = ["val", "test"]
        if probe.longer is not None:
            self.splits.append(LONGER)
        self.fixed: tuple[NDArray[Any], NDArray[Any]] | None = None
        if probe.rows is not None:
            self.fixed = read_rows(probe, probe.rows)
        self.sequences: dict[str, tuple[Ids, Ids]] = {}
        for split in self.splits:
            drawn = numpy_generator(FIXED, split, 0)
            length = probe.length_of(split)
            self.sequences[split] = probe.draw(drawn, probe.eval_sequences, length, False)

    def fingerprint(self) -> str:
        training = self.fixed
        if training is None:
            training = self.probe.draw(
                numpy_generator(FIXED, "train", 0), 8, self.probe.length, True
            )
        evaluated = [array for arrays in self.sequences.values() for array in arrays]
        return digest(cut_to_ids([*training, *evaluated]))

    def batch(self, step: int) -> tuple[Tensor, ...]:
        if self.fixed is not None:
            # A pass has the complete batches of an order of its own.
            chosen = self.rows(step, self._draw_order, len(self.fixed[0]) // self.batch_size)
            tokens, targets = (array[chosen].astype(np.int64) for array in self.fixed)
        else:
            drawn = numpy_generator(self.seed, "batch", step)
            tokens, targets = self.probe.draw(drawn, self.batch_size, self.probe.length, True)
        batch: tuple[Tensor, ...] = self.tensors(self.share(tokens), self.share(targets))
        return batch

    def _draw_order(self, number: int) -> Ids:
        """Return the order of the fixed rows in a pass."""
        assert self.fixed is not None
        return numpy_generator(self.seed, "order", number).permutation(len(self.fixed[0]))

    def floors(self, split: str, steps: int) -> list[Floor]:
        # The rule's accuracy stays below SOLVED, however long it is trained.
        values = {"accuracy": self.probe.floor, "unsolved_steps": float(steps)}
        if self.probe.floor_loss is not None:
            values["loss"] = self.probe.floor_loss
        return [Floor(GUESSING, values, "computed, not measured")]

    def evaluation_loader(self, split: str) -> EvaluationLoader:
        tokens, targets = self.sequences[split]

        def collate(places: range, rows: int) -> tuple[Tensor, ...]:
            part = slice(places.start, places.stop)
            missing = rows - len(tokens[part])
            padded_tokens = np.pad(tokens[part], ((0, missing), (0, 0)))
            padded_targets = np.pad(targets[part], ((0, missing), (0, 0)), constant_values=IGNORED)
            batch: tuple[Tensor, ...] = self.tensors(padded_tokens, padded_targets)
            return batch

        return self.padded_loader(range(len(tokens)), collate)


def draw_distinct(
    generator: np.random.Generator, weights: np.ndarray, count: int, size: int
) -> Ids:
    """Draw `size` different places of `weights` (N,) for each of `count` sequences, (B, size).

    The places are drawn one after another, each with a probability proportional to its weight among
    those that are left. The order of the smallest exponential variates with these rates has exactly
    this distribution (Efraimidis and Spirakis 2006).
    """
    waiting_times = generator.standard_exponential((count, len(weights))) / weights
    order = np.argpartition(waiting_times, size - 1, axis=1)[:, :size]
    drawn_times = np.take_along_axis(waiting_times, order, axis=1)
    by_time = np.argsort(drawn_times, axis=1)
    return np.take_along_axis(order, by_time, axis=1).astype(np.int64)


def read_rows(probe: Probe, count: int) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return the tokens and targets of fixed training rows, which the first cell draws and keeps.

    A probe whose code has changed is drawn anew.
    """
    own_keys = set(type(probe).model_fields) - set(Probe.model_fields)
    keys = probe.model_dump(mode="json", include={*own_keys, "kind", "length"})
    classes = [member for member in type(probe).__mro__ if issubclass(member, Probe)]
    code = digest(Path(inspect.getfile(member)).read_bytes() for member in classes)
    recipe = [keys, count, code]
    kept = keep_arrays(probe.root, "rows", recipe, lambda: draw_rows(probe, count))
    return kept["tokens"], kept["targets"]


def draw_rows(probe: Probe, count: int) -> dict[str, NDArray[Any]]:
    """Return the tokens and targets of fixed training rows, as narrow integers.

    Some are drawn at a time, to save memory.
    """
    drawn = numpy_generator(FIXED, "rows", 0)
    narrow = np.min_scalar_type(min(-probe.vocabulary, IGNORED))
    shape = (count, probe.length)
    tokens, targets = np.empty(shape, narrow), np.empty(shape, narrow)
    for start in range(0, count, ROWS_AT_ONCE):
        part = slice(start, min(start + ROWS_AT_ONCE, count))
        size = part.stop - part.start
        tokens[part], targets[part] = probe.draw(drawn, size, probe.length, True)
    return {"tokens": tokens, "targets": targets}


def cut_to_ids(arrays: Iterable[NDArray[Any]]) -> Iterator[Ids]:
    """Yield all rows of the arrays as int64, some at a time, to save memory."""
    for array in arrays:
        for start in range(0, len(array), ROWS_AT_ONCE):
            yield array[start : start + ROWS_AT_ONCE].astype(np.int64)


class ProbeTaskConfig(Task, kind="probe"):
    """Tokens of a probe, with the accuracy of the targets and whether the probe is solved."""

    runs_foreign_code: ClassVar[bool] = False
    is_recordable = True
    # Its imports take two seconds, which a dry run does without.
    module = "probe_task:ProbeTask"
    takes = (ProbeTokens,)
    predicts = ("probabilities", "vocabulary")

    def metrics(self, signature: ProbeTokens) -> tuple[MetricInfo, ...]:
        return (
            percent("accuracy", "accuracy"),
            percent("solved", f"seeds with an accuracy of at least {SOLVED:.0%}"),
            percent("errors", "sequences with a wrong answer", goal="min"),
            MetricInfo("loss", "loss (nats per target)", best=0.0),
            MetricInfo(
                "unsolved_steps",
                "training steps before the probe is solved",
                event="solved",
                best=0.0,
            ),
        )
