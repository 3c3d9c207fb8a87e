"""Data module of images in class folders, read and augmented with timm's transforms in workers.

All random numbers of training step s are a pure function of (seed, s), whatever the number of
workers or processes. (timm's own loader seeds its workers, so it cannot resume within an epoch.)
MixUp and CutMix mix the images of one process, so a mixed batch depends on the number of processes.

Shapes: images (B, 3, S, S) float, normalised; labels (B,); mixed targets (B, classes).
"""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from timm.data import Mixup
from timm.data.distributed_sampler import RepeatAugSampler
from torch import Tensor

from lit_attn.config.data.class_folders import ClassFolders
from lit_attn.data.class_folders import Read, Reader, Skipped, fingerprint, list_files, seeded
from lit_attn.data.loading import loader
from lit_attn.data.module import DataModule, EvaluationLoader, numpy_generator
from lit_attn.schema.errors import ConfigError

# DeiT's sampler, which timm copies, rounds an epoch of repeats down to a multiple of this.
REPEATS_ROUND = 256


class Batch(NamedTuple):
    """Training batch of step `step` before it is mixed."""

    images: Tensor
    labels: Tensor
    step: int


class ImageFolderData(DataModule):
    """Splits of one data set in class folders.

    Unreadable images are named in the log and skipped: in training the next one replaces them, in
    evaluation they are left out. Raises ConfigError if there are more than `data.unreadable` of
    them, and if the folders do not match `data`.
    """

    def __init__(self, data: ClassFolders, seed: int, device: torch.device) -> None:
        super().__init__(data, seed, device)
        self.data = data
        self.skipped = Skipped(data.unreadable)
        files = list_files(data)
        self.train = Reader(data, files["train"], augmented=True)
        self.splits: list[str] = [name for name in ("val", "test") if name in files]
        self.evaluated = {name: Reader(data, files[name], augmented=False) for name in self.splits}
        self._fingerprint = fingerprint(files)
        augment = data.augment
        self.mixup: Mixup | None = None
        if augment.mixes:
            self.inseparable = 2
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
        """Return a hash of all file names and labels, and of the sizes of the evaluated files.

        Reading the sizes of 1.3 million training files takes minutes on a network disk.
        """
        return self._fingerprint

    def train_batches(self, start: int, stop: int) -> Iterator[Batch]:
        steps = range(start, stop)
        batches = _Samples(self, steps)
        for step, read in zip(steps, self.read(self.train, batches), strict=True):
            yield Batch(read.images, read.labels, step)

    def evaluation_loader(self, split: str) -> EvaluationLoader:
        """Return a loader of each image of `split` once over all processes.

        All processes have the same number of batches, whose sizes differ by at most one image.
        """
        images = self.evaluated[split]
        count = math.ceil(len(images) / self.eval_batch_size)
        parts = np.array_split(self.share(np.arange(len(images))), count)
        units = [part.tolist() for part in parts]
        batches = [[(place, 0, self.data.size) for place in part] for part in units]
        return EvaluationLoader(
            batches,
            lambda batches: ((read.images, read.labels) for read in self.read(images, batches)),
            units,
            len(images),
        )

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Return (images, targets); a training batch is mixed here, on its device."""
        if not isinstance(batch, Batch):
            return batch
        if self.mixup is None:
            return batch.images, batch.labels
        drawn = numpy_generator(self.seed, f"mix {self.rank}", batch.step).integers(2**32)
        with seeded(int(drawn)):
            return self.mixup(batch.images, batch.labels)

    def samples(self, step: int) -> list[tuple[int, int, int]]:
        """Return this process's images of step `step`: index in `train`, seed, size in pixels."""
        epoch, index = divmod(step, self.steps_per_epoch)
        if epoch != self._epoch:
            self._epoch, self._order = epoch, self._order_of(epoch)
        size = self.data.batch_size
        places = self._order[index * size : (index + 1) * size]
        seeds = numpy_generator(self.seed, "sample", step).integers(2**32, size=size).tolist()
        pixels = self.data.size_in(epoch)
        drawn = self.share(list(zip(places, seeds, strict=True)))
        return [(place, seed, pixels) for place, seed in drawn]

    def read(self, images: Reader, batches: Any) -> Iterator[Read]:
        """Yield the batches that workers read of `batches`, lists of samples, in their order."""
        for read in loader(images, batches, images.collate, self.data.workers, pinned=True):
            self.skipped.record(read.failures)
            yield read

    def _order_of(self, epoch: int) -> list[int]:
        """Return the indices in `train` of an epoch's samples."""
        repeats = self.data.repeats
        sampler = RepeatAugSampler(
            range(len(self.train)),
            num_replicas=1,
            rank=0,
            num_repeats=repeats,
            selected_round=REPEATS_ROUND if repeats > 1 else 0,
        )
        sampler.set_epoch(int(numpy_generator(self.seed, "order", epoch).integers(2**63)))
        return list(sampler)


class _Samples:
    """Samples of training steps, drawn lazily: an epoch has millions of them."""

    def __init__(self, data: ImageFolderData, steps: range) -> None:
        self.data = data
        self.steps = steps

    def __len__(self) -> int:
        return len(self.steps)

    def __iter__(self) -> Iterator[list[tuple[int, int, int]]]:
        return map(self.data.samples, self.steps)
