"""Image classification data that lives on the device, augmented there a whole batch at a time.

The batch of training step s is a pure function of (seed, s): a cell that goes on from a checkpoint
sees exactly the batches it would have seen.

Shapes: images (N, C, H, W), uint8 on the device and float to the network; labels (N,).
"""

import hashlib
import math
from collections.abc import Iterator

import lightning as L
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lit_attn.config.data import Images
from lit_attn.config.errors import ConfigError
from lit_attn.data import sets
from lit_attn.data.augment import Batch, pipeline


class ImageData(L.LightningDataModule):
    """The splits of one data set on one device.

    `splits` names the evaluation loaders in their order: "val" where there is one, then "test".
    Raises ConfigError where the data cannot be had.
    """

    def __init__(self, data: Images, seed: int, device: torch.device) -> None:
        super().__init__()
        found = sets.load(data)
        self.data = data
        self.seed = seed
        self.splits: list[str] = [name for name in ("val", "test") if name in found]
        self._fingerprint = sets.fingerprint(found)
        self._tensors = {
            name: (
                torch.from_numpy(split.images).to(device),
                torch.from_numpy(split.labels).to(device),
            )
            for name, split in found.items()
        }
        images = found["train"].images
        mean, std = _statistics(images)
        self._train = pipeline(data.augment, mean, std, data.num_classes)
        self._plain = self._train.evaluation()
        self.steps_per_epoch = _steps(
            data.epoch_length * len(images), data.batch_size, data.drop_last
        )

    def fingerprint(self) -> str:
        """Hash of the arrays trained and evaluated on."""
        return self._fingerprint

    def train_dataloader(self) -> "TrainLoader":
        """One pass over an epoch's batches, from wherever training stands."""
        return TrainLoader(self)

    def val_dataloader(self) -> "list[EvaluationLoader]":
        """One loader for each of `splits`."""
        return [EvaluationLoader(self, split) for split in self.splits]

    def batch(self, step: int) -> Batch:
        """The augmented batch of training step `step`, the same whenever it is asked for."""
        images, labels = self._tensors["train"]
        epoch, index = divmod(step, self.steps_per_epoch)
        order = self._order(epoch, len(images))
        size = self.data.batch_size
        chosen = order[index * size : (index + 1) * size].to(images.device)
        generator = torch.Generator(images.device).manual_seed(stream(self.seed, "batch", step))
        return self._train(images[chosen], labels[chosen], generator)

    def _order(self, epoch: int, count: int) -> Tensor:
        """`epoch_length` shuffled passes, one after the other."""
        passes = []
        for number in range(self.data.epoch_length):
            seed = stream(self.seed, "order", epoch * self.data.epoch_length + number)
            passes.append(torch.randperm(count, generator=torch.Generator().manual_seed(seed)))
        return torch.cat(passes)


class TrainLoader:
    """Iterates over the rest of an epoch; stateful in Lightning's sense, by the step alone."""

    def __init__(self, data: ImageData) -> None:
        self.data = data

    def __len__(self) -> int:
        return self.data.steps_per_epoch

    def __iter__(self) -> Iterator[Batch]:
        trainer = self.data.trainer
        start = 0 if trainer is None else trainer.global_step
        stop = (start // len(self) + 1) * len(self)
        return (self.data.batch(step) for step in range(start, stop))

    def state_dict(self) -> dict[str, int]:
        """Nothing beyond the trainer's own step; having it tells Lightning we resume mid-epoch."""
        return {}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Nothing to take up."""


class EvaluationLoader:
    """A whole split in its own order, normalised and not augmented."""

    def __init__(self, data: ImageData, split: str) -> None:
        self.data = data
        self.images, self.labels = data._tensors[split]

    def __len__(self) -> int:
        return math.ceil(len(self.labels) / self.data.data.eval_batch_size)

    def __iter__(self) -> Iterator[Batch]:
        size = self.data.data.eval_batch_size
        for start in range(0, len(self.labels), size):
            images, labels = self.images[start : start + size], self.labels[start : start + size]
            yield self.data._plain(images, labels, torch.Generator(images.device))


def stream(seed: int, purpose: str, number: int) -> int:
    """A 63-bit seed for one purpose and number: hashed, so that neighbours share nothing."""
    digest = hashlib.sha256(f"{seed} {purpose} {number}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def _statistics(images: NDArray[np.uint8]) -> tuple[list[float], list[float]]:
    """Mean and standard deviation per channel, 0..1; a constant channel has a deviation of 1."""
    pixels = images.transpose(1, 0, 2, 3).reshape(images.shape[1], -1)
    mean, std = pixels.mean(1) / 255, pixels.std(1) / 255
    std[std == 0] = 1
    return mean.tolist(), std.tolist()


def _steps(samples: int, batch_size: int, drop_last: bool) -> int:
    steps = samples // batch_size if drop_last else math.ceil(samples / batch_size)
    if not steps:
        raise ConfigError(
            f"data.batch_size: {batch_size} is more than the {samples} samples of an epoch"
        )
    return steps
