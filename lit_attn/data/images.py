"""Image classification data held on the device and augmented there.

Each of n processes builds the whole batch, because CutMix and MixUp need all images, and trains on
every n-th image of it.

Shapes: images (N, C, H, W), uint8 on the device and float to the network; labels (N,).
"""

import math
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lit_attn.config.data.images import Images
from lit_attn.data import sets
from lit_attn.data.augment.steps import Batch, Pipeline
from lit_attn.data.labels import measure_largest_class
from lit_attn.data.module import DataModule, EvaluationLoader, torch_generator


class ImageData(DataModule):
    """Splits of one data set on one device."""

    def __init__(self, data: Images, seed: int, device: torch.device) -> None:
        super().__init__(data, seed, device)
        splits = sets.load(data)
        self.data = data
        if data.num_classes:
            labels = {name: split.labels for name, split in splits.items()}
            self.largest_class = measure_largest_class(labels)
        self.splits: list[str] = [name for name in ("val", "test") if name in splits]
        self._fingerprint = sets.fingerprint(splits)
        # Pillow works on bytes on the CPU; reading them back would wait for the GPU.
        is_on_host = any(step.stage == "bytes" for step in data.augment)
        places = {"train": torch.device("cpu") if is_on_host else device}
        self.tensors: dict[str, tuple[Tensor, ...]] = {}
        for name, split in splits.items():
            tensors = (torch.from_numpy(np.ascontiguousarray(array)) for array in split)
            self.tensors[name] = tuple(t.to(places.get(name, device)) for t in tensors)
        images = splits["train"].images
        self.pipeline = Pipeline(data, *statistics(images), device)
        self.set_epoch(data.epoch_length * len(images), data.drop_last)

    def fingerprint(self) -> str:
        return self._fingerprint

    def train_batches(self, start: int, stop: int) -> Iterator[Batch]:
        images, labels = self.tensors["train"]
        for step in range(start, stop):
            rows = self.rows(step, self.draw_order).to(images.device)
            generator = torch_generator(self.seed, "batch", step)
            augmented, targets = self.pipeline.apply(images[rows], labels[rows], generator)
            yield self.share(augmented), self.share(targets)

    def evaluation_loader(self, split: str) -> EvaluationLoader:
        all_images, all_labels = self.tensors[split]
        count = len(all_images)
        images, labels = self.share(all_images), self.share(all_labels)
        places: Sequence[int] = self.share(range(count))
        if not places:
            # More processes than images: this process evaluates the first one as padding.
            images, labels, places = all_images[:1], all_labels[:1], [count]
        size = max(1, self.eval_batch_size // self.world)
        batches = list(zip(images.split(size), labels.split(size), strict=True))
        units = [places[start : start + size] for start in range(0, len(places), size)]
        normalize = self.pipeline.normalize

        def load(batches: Sequence[Batch]) -> Iterator[Batch]:
            return ((normalize.apply(images, ()), labels) for images, labels in batches)

        return EvaluationLoader(batches, load, units, count)

    def draw_order(self, epoch: int) -> Tensor:
        """Return `epoch_length` shuffled passes over the samples, one after the other."""
        count, passes = len(self.tensors["train"][1]), self.data.epoch_length
        numbers = range(epoch * passes, (epoch + 1) * passes)
        generators = (torch_generator(self.seed, "order", number) for number in numbers)
        return torch.cat([torch.randperm(count, generator=drawn) for drawn in generators])


def statistics(images: NDArray[np.uint8]) -> tuple[list[float], list[float]]:
    """Return mean and standard deviation per channel, 0..1; 1 for a constant channel."""
    counts = np.zeros((images.shape[1], 256))
    # Histograms of 1000 images at a time: in float64 the set would need eight times its memory.
    for some in np.array_split(images, math.ceil(len(images) / 1000)):
        for channel in range(len(counts)):
            counts[channel] += np.bincount(some[:, channel].ravel(), minlength=256)
    shares, levels = counts / counts.sum(1, keepdims=True), np.arange(256) / 255
    mean = shares @ levels
    std = np.sqrt((shares * (levels - mean[:, None]) ** 2).sum(1))
    std[(counts > 0).sum(1) == 1] = 1
    return mean.tolist(), std.tolist()
