"""Class folders of images, read and augmented in worker processes with timm's transforms.

The images of training step s, and every number drawn for them, are a pure function of (seed, s),
whatever the number of workers or of devices: a cell that goes on from a checkpoint sees exactly the
batches it would have seen. timm's own loader seeds its workers instead, and could not go on within
an epoch. MixUp and CutMix mix what one device has, so a mixed batch depends on their number.

Shapes: images (B, 3, S, S) float, normalised; labels (B,); mixed targets (B, classes).
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import lightning as L
import numpy as np
from timm.data import Mixup
from timm.data.distributed_sampler import RepeatAugSampler
from torch import Tensor

from lit_attn.config.data.class_folders import ClassFolders
from lit_attn.data.class_folders import Read, Reader, Skipped, find, fingerprint, seeded
from lit_attn.data.loading import loader
from lit_attn.data.text.steps import generator
from lit_attn.schema.errors import ConfigError

# As DeiT's sampler, which timm's is: an epoch of repeats is rounded down to a multiple of it.
REPEATS_ROUND = 256


class Batch(NamedTuple):
    """A training batch of step `step` before it is mixed."""

    images: Tensor
    labels: Tensor
    step: int


class ImageFolderData(L.LightningDataModule):
    """The splits of one data set; batches are of `data.batch_size` over all devices together.

    `splits` names the evaluation loaders in their order: "val" where images are held out, then
    "test". Images that cannot be read are named in the log and skipped: in training the next one
    takes their place, in evaluation they are left out. Raises ConfigError where there are more of
    them than `data.unreadable`, and where the folders are not what `data` says.
    """

    def __init__(self, data: ClassFolders, seed: int) -> None:
        super().__init__()
        self.data = data
        self.seed = seed
        self.skipped = Skipped(data.unreadable)
        found = find(data)
        self.train = Reader(data, found["train"], augmented=True)
        self.splits: list[str] = [name for name in ("val", "test") if name in found]
        self.evaluated = [Reader(data, found[name], augmented=False) for name in self.splits]
        self._fingerprint = fingerprint(found)
        augment = data.augment
        self.mixup: Mixup | None = None
        if augment.mixes:
            self.mixup = Mixup(
                augment.mixup,
                augment.cutmix,
                prob=augment.mix,
                switch_prob=augment.switch,
                label_smoothing=0.0,
                num_classes=data.classes,
            )
        self._epoch, self._order = 0, self._order_of(0)
        self.steps_per_epoch = len(self._order) // data.batch_size
        if not self.steps_per_epoch:
            raise ConfigError(
                f"data.batch_size: {data.batch_size} is more than the {len(self._order)} samples "
                "of an epoch"
            )

    def fingerprint(self) -> str:
        """Hash of every file's name, and of the sizes of those evaluated.

        To ask for 1.3 million sizes takes minutes on a disk behind a network.
        """
        return self._fingerprint

    def train_dataloader(self) -> "TrainLoader":
        """One pass over an epoch's batches, from wherever training stands.

        Raises ConfigError where the batches cannot be shared out evenly.
        """
        devices = self.share()[1]
        each = 2 * devices if self.mixup else devices
        if self.data.batch_size % each:
            pairs = " in pairs to mix" if self.mixup else ""
            raise ConfigError(
                f"data.batch_size: {self.data.batch_size} cannot be shared by {devices} "
                f"devices{pairs}"
            )
        return TrainLoader(self)

    def val_dataloader(self) -> "list[EvaluationLoader]":
        """One loader for each of `splits`, each device's with its own share of the images."""
        return [EvaluationLoader(self, images) for images in self.evaluated]

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Mix a training batch, on its device; (images, targets) to the task."""
        if not isinstance(batch, Batch):
            return batch
        if self.mixup is None:
            return batch.images, batch.labels
        drawn = generator(self.seed, f"mix {self.share()[0]}", batch.step).integers(2**32)
        with seeded(int(drawn)):
            return self.mixup(batch.images, batch.labels)

    def share(self) -> tuple[int, int]:
        """This process's rank and the number of processes that train together."""
        trainer = self.trainer
        return (0, 1) if trainer is None else (trainer.global_rank, trainer.world_size)

    def samples(self, step: int) -> list[tuple[int, int, int]]:
        """This device's images of training step `step`: place in `train`, seed, size in pixels."""
        epoch, index = divmod(step, self.steps_per_epoch)
        if epoch != self._epoch:
            self._epoch, self._order = epoch, self._order_of(epoch)
        size = self.data.batch_size
        places = self._order[index * size : (index + 1) * size]
        seeds = generator(self.seed, "sample", step).integers(2**32, size=size).tolist()
        rank, world = self.share()
        pixels = self.data.size_in(epoch)
        drawn = list(zip(places, seeds, strict=True))[rank::world]
        return [(place, seed, pixels) for place, seed in drawn]

    def read(self, images: Reader, batches: Any) -> Iterator[Read]:
        """What the worker processes read of `batches`, lists of samples, in their order."""
        for read in loader(images, batches, images.together, self.data.workers, pinned=True):
            self.skipped.note(read.failures)
            yield read

    def _order_of(self, epoch: int) -> list[int]:
        """The places in `train` of an epoch's samples, one after the other."""
        repeats = self.data.repeats
        sampler = RepeatAugSampler(
            range(len(self.train)),
            num_replicas=1,
            rank=0,
            num_repeats=repeats,
            selected_round=REPEATS_ROUND if repeats > 1 else 0,
        )
        sampler.set_epoch(int(generator(self.seed, "order", epoch).integers(2**63)))
        return list(sampler)


class TrainLoader:
    """Iterates over the rest of an epoch; stateful in Lightning's sense, by the step alone."""

    def __init__(self, data: ImageFolderData) -> None:
        self.data = data

    def __len__(self) -> int:
        return self.data.steps_per_epoch

    def __iter__(self) -> Iterator[Batch]:
        trainer = self.data.trainer
        start = 0 if trainer is None else trainer.global_step
        steps = range(start, (start // len(self) + 1) * len(self))
        batches = _Samples(self.data, steps)
        for step, read in zip(steps, self.data.read(self.data.train, batches), strict=True):
            yield Batch(read.images, read.labels, step)

    def state_dict(self) -> dict[str, int]:
        """Nothing beyond the trainer's own step; having it tells Lightning we resume mid-epoch."""
        return {}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Nothing to take up."""


class _Samples:
    """The samples of some steps, found as they are asked for: an epoch's are millions."""

    def __init__(self, data: ImageFolderData, steps: range) -> None:
        self.data = data
        self.steps = steps

    def __len__(self) -> int:
        return len(self.steps)

    def __iter__(self) -> Iterator[list[tuple[int, int, int]]]:
        return map(self.data.samples, self.steps)


class EvaluationLoader:
    """Every image of a split once, over all devices together: none is there to fill a batch up.

    All devices have the same number of batches, whose sizes differ by one image at most.
    """

    def __init__(self, data: ImageFolderData, images: Reader) -> None:
        self.data = data
        self.images = images

    def __len__(self) -> int:
        return -(-len(self.images) // self.data.data.eval_batch_size)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        rank, world = self.data.share()
        own = np.arange(rank, len(self.images), world)
        batches = [
            [(place, 0, self.data.data.size) for place in part.tolist()]
            for part in np.array_split(own, len(self))
        ]
        for read in self.data.read(self.images, batches):
            yield read.images, read.labels
