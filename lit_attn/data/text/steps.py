"""What the data modules of tokens share: batches by step, divided among ranks and micro-batches."""

from abc import ABC, abstractmethod
from collections.abc import Iterator

import lightning as L
import numpy as np
import torch
from torch import Tensor

from lit_attn.config.data.composition import HeadCompositionConfig
from lit_attn.config.data.labelled import Labelled
from lit_attn.config.data.text import Tokens
from lit_attn.schema.errors import ConfigError


class SteppedData(L.LightningDataModule, ABC):
    """The batch of training step s is a pure function of (seed, s), whatever the number of devices:
    each of R ranks takes every R-th sequence of it.
    """

    splits: list[str]
    steps_per_epoch: int

    def __init__(
        self, data: Tokens | Labelled | HeadCompositionConfig, seed: int, device: torch.device
    ) -> None:
        super().__init__()
        self.seed = seed
        self.device = device
        self.batch_size = data.batch_size
        self.eval_batch_size = data.eval_batch_size
        self.accumulate = data.accumulate
        documents = 2 if isinstance(data, Labelled) and data.pairs else 1
        self.tokens_per_sample = documents * data.context

    @abstractmethod
    def batch(self, step: int) -> tuple[Tensor, ...]:
        """This rank's sequences of training step `step`, the same whenever they are asked for."""

    @property
    def rank(self) -> int:
        """This process among the `world` that share a batch."""
        return 0 if self.trainer is None else self.trainer.global_rank

    @property
    def world(self) -> int:
        """Number of processes; raises ConfigError where they do not divide a micro-batch."""
        world = 1 if self.trainer is None else self.trainer.world_size
        micro_batch = self.batch_size // self.accumulate
        if micro_batch % world:
            raise ConfigError(
                f"data.batch_size: {world} devices do not divide a micro-batch of {micro_batch}"
            )
        return world

    def train_dataloader(self) -> "TrainLoader":
        """One epoch's micro-batches, from wherever training stands."""
        return TrainLoader(self)


class TrainLoader:
    """Iterates over the rest of an epoch; stateful in Lightning's sense, by the step alone."""

    def __init__(self, data: SteppedData) -> None:
        self.data = data

    def __len__(self) -> int:
        return self.data.steps_per_epoch * self.data.accumulate

    def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
        trainer = self.data.trainer
        start = 0 if trainer is None else trainer.global_step
        stop = (start // self.data.steps_per_epoch + 1) * self.data.steps_per_epoch
        for step in range(start, stop):
            parts = (tensor.chunk(self.data.accumulate) for tensor in self.data.batch(step))
            yield from zip(*parts, strict=True)

    def state_dict(self) -> dict[str, int]:
        """Nothing beyond the trainer's own step; having it tells Lightning we resume mid-epoch."""
        return {}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Nothing to take up."""


def generator(seed: int, purpose: str, number: int) -> np.random.Generator:
    """Random numbers for one purpose and number; NumPy hashes them, so neighbours share nothing."""
    return np.random.default_rng([seed, *purpose.encode(), number])
