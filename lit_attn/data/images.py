"""Image classification data held in memory and augmented on the device.

With steps that work on bytes, as Pillow does, or with worker processes, the training images are in
the memory of the CPU, and the steps before the normalisation are applied there. The normalisation
and later steps are applied on the device in any case, so the bits do not depend on the workers.

Each of n processes trains on every n-th image of a batch. It augments these images and those that
CutMix or MixUp mixes them with.

Shapes: images (N, C, H, W), uint8 on the device and float to the network; labels (N,).
"""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lit_attn.data import sets
from lit_attn.data.augment.steps import Batch, Pipeline, Plan
from lit_attn.data.images_config import Images
from lit_attn.data.labels import measure_largest_class
from lit_attn.data.module import DataModule, EvaluationLoader, torch_generator
from lit_attn.floors.base import Floor
from lit_attn.floors.samples import Samples, class_floors, number_floors


class Prepared(NamedTuple):
    """Rows of a training batch before the normalisation, and what the later steps need."""

    images: Tensor
    labels: Tensor
    plan: Plan


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
        is_on_host = data.prepares_on_cpu or self.workers > 0
        self.tensors: dict[str, tuple[Tensor, Tensor]] = {}
        for name, split in splits.items():
            place = torch.device("cpu") if name == "train" and is_on_host else device
            split_images = torch.from_numpy(np.ascontiguousarray(split.images)).to(place)
            split_labels = torch.from_numpy(np.ascontiguousarray(split.labels)).to(place)
            self.tensors[name] = (split_images, split_labels)
        images = splits["train"].images
        self.pipeline = Pipeline(data, *statistics(images), device)
        self.set_epoch(data.epoch_length * len(images), data.drop_last)

    def fingerprint(self) -> str:
        return self._fingerprint

    def batch(self, step: int) -> Prepared:
        """Return the rows of a step that this process needs, before the normalisation."""
        images, labels = self.tensors["train"]
        order = self.rows(step, self.draw_order)
        generator = torch_generator(self.seed, "batch", step)
        plan = self.pipeline.plan(len(order), generator, self.rank, self.world)
        rows = order[plan.rows].to(images.device)
        prepared = self.pipeline.prepare(images[rows], plan)
        return Prepared(prepared, labels[rows], plan._replace(before=[]))

    def finish(self, batch: Prepared) -> list[Batch]:
        return [self.pipeline.finish(*batch)]

    def evaluation_loader(self, split: str) -> EvaluationLoader:
        all_images, all_labels = self.tensors[split]
        count = len(all_images)
        images = self.share(all_images)
        labels = self.share(all_labels)
        places: Sequence[int] = self.share(range(count))
        if not places:
            # More processes than images: this process evaluates the first one as padding.
            images = all_images[:1]
            labels = all_labels[:1]
            places = [count]
        size = max(1, self.eval_batch_size // self.world)
        batches = list(zip(images.split(size), labels.split(size), strict=True))
        units = [places[start : start + size] for start in range(0, len(places), size)]
        normalize = self.pipeline.normalize

        def load(batches: Sequence[Batch]) -> Iterator[Batch]:
            return ((normalize.apply(images, ()), labels) for images, labels in batches)

        return EvaluationLoader(batches, load, units, count)

    def floors(self, split: str, steps: int) -> list[Floor]:
        """Return the floors of pixels between 0 and 1, without augmentation."""
        train, evaluated = self._pixels("train"), self._pixels(split)
        if self.data.num_classes:
            return class_floors(train, evaluated)
        return number_floors(train, evaluated)

    def _pixels(self, split: str) -> Samples:
        """Return the images of a split as rows of pixels."""
        images, labels = self.tensors[split]
        return Samples(images.flatten(1).float().div(255).cpu().numpy(), labels.cpu().numpy())

    def draw_order(self, epoch: int) -> Tensor:
        """Return `epoch_length` shuffled passes over the samples, one after the other."""
        count = len(self.tensors["train"][1])
        passes = self.data.epoch_length
        orders = []
        for number in range(epoch * passes, (epoch + 1) * passes):
            generator = torch_generator(self.seed, "order", number)
            orders.append(torch.randperm(count, generator=generator))
        return torch.cat(orders)


def statistics(images: NDArray[np.uint8]) -> tuple[list[float], list[float]]:
    """Return mean and standard deviation per channel, 0..1; 1 for a constant channel."""
    counts = np.zeros((images.shape[1], 256))
    # Histograms of 1000 images at a time: in float64 the set would need eight times its memory.
    for some in np.array_split(images, math.ceil(len(images) / 1000)):
        for channel in range(len(counts)):
            counts[channel] += np.bincount(some[:, channel].ravel(), minlength=256)
    shares = counts / counts.sum(1, keepdims=True)
    levels = np.arange(256) / 255
    mean = shares @ levels
    std = np.sqrt((shares * (levels - mean[:, None]) ** 2).sum(1))
    std[(counts > 0).sum(1) == 1] = 1
    return mean.tolist(), std.tolist()
