"""Augmentation of image batches on the device: the steps of `data.augment` in their order."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lit_attn.config.augment import ImageFormat
from lit_attn.config.data.images import Images
from lit_attn.data.augment.steps import BatchStep, Parameters, Step

Batch = tuple[Tensor, Tensor]


class Draw(NamedTuple):
    """Random parameters of one batch of `size` images: one entry for each step, and the mix."""

    size: int
    steps: list[Parameters]
    mix: Any


class Pipeline:
    """Augmentation of one data set, for one batch or for many batches at once.

    `mean` and `std` (per channel, 0 to 1) are the training images'; `normalize` can set its own.
    """

    def __init__(self, data: Images, mean: list[float], std: list[float]) -> None:
        classes = getattr(data, "num_classes", 0)
        images = ImageFormat(data.image_shape, classes, mean, std)
        for config in data.augment:
            images = config.with_statistics(images)
        built = [(config.stage, config.build(images)) for config in data.augment]
        self.normalize: Step = next(step for stage, step in built if stage == "normalize")
        self.steps: list[Step] = [step for stage, step in built if stage != "batch"]
        self.mix: BatchStep | None = next((s for stage, s in built if stage == "batch"), None)

    def draw(self, n: int, generator: torch.Generator) -> Draw:
        """Draw the parameters of one batch of `n` images."""
        steps = [step.draw(n, generator) for step in self.steps]
        return Draw(n, steps, None if self.mix is None else self.mix.draw(n, generator))

    def apply(self, images: Tensor, labels: Tensor, drawn: Sequence[Draw]) -> list[Batch]:
        """Return a batch for each of `drawn`, from their concatenated images and labels.

        A small operation takes a device as long as a large one, so many small batches are best
        augmented together. A batch does not depend on the batches that are augmented with it.
        """
        for position, step in enumerate(self.steps):
            parameters = zip(*(one.steps[position] for one in drawn), strict=True)
            images = step.apply(images, tuple(torch.cat(parts) for parts in parameters))
        sizes = [one.size for one in drawn]
        batches = list(zip(images.split(sizes), labels.split(sizes), strict=True))
        if self.mix is None:
            return batches
        return [self.mix.apply(*batch, one.mix) for batch, one in zip(batches, drawn, strict=True)]
