"""Base of the augmentation steps for images with one label each, and of their configurations.

A list of steps is applied in the order in which it is written. Every step has two methods. `draw`
makes the random parameters on the CPU from a generator, one row for each image. `apply` changes the
images on their device. So a batch is the same on every device, and a process that trains on a part
of it needs only the rows of this part.

Shapes: images (N, C, H, W), uint8 before normalisation and float32 after it; labels (N,) class
indices, mixed targets (N, classes).
"""

from abc import abstractmethod
from typing import Any, ClassVar, Generic, Literal, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from lit_attn.schema.base import Kind

Stage = Literal["any", "bytes", "normalize", "normalized", "batch"]
Batch = tuple[Tensor, Tensor]
Parameters = tuple[Tensor, ...]


class ImageFormat(NamedTuple):
    """Training images that a step is built for."""

    shape: tuple[int, int, int]
    """(channels, height, width)"""
    classes: int
    mean: list[float]
    """Mean of each channel, 0 to 1."""
    std: list[float]
    """Standard deviation of each channel, 0 to 1."""


class Step(Protocol):
    """Step that changes every image by itself."""

    def draw(self, n: int, generator: torch.Generator) -> Parameters:
        """Draw the parameters of `n` images: CPU tensors with `n` rows."""

    def apply(self, images: Tensor, drawn: Parameters) -> Tensor:
        """Return the changed images; `images` does not change."""


class BatchStep(Protocol):
    """Step that mixes each image of a batch, and its label, with another one."""

    def draw(self, n: int, generator: torch.Generator) -> Any:
        """Draw the parameters of a batch of `n` images."""

    def partners(self, drawn: Any) -> Tensor | None:
        """Return the row (n,) that each row is mixed with, or None if the batch is not mixed."""

    def mix(
        self, images: Tensor, labels: Tensor, others: Tensor, other_labels: Tensor, drawn: Any
    ) -> Batch:
        """Return images mixed with `others`, and their targets as probabilities (N, classes)."""


class Augmentation(Kind):
    """Base of the augmentation steps for images with one label each."""

    stage: ClassVar[Stage]
    """Input of the step: `bytes` (uint8), `normalize` (bytes in, float out), `normalized` (float),
    `any` of both, or `batch` (the normalised images and the labels of a batch)."""

    @abstractmethod
    def build(self, images: ImageFormat) -> Any:
        """Return the step, a `Step` or a `BatchStep`."""

    def with_statistics(self, images: ImageFormat) -> ImageFormat:
        """Return `images` with the mean and deviation by which this step normalises."""
        return images


Config = TypeVar("Config", bound=Augmentation)


class Configured(Generic[Config]):
    """Base of the steps with a configuration, for training images of one format."""

    def __init__(self, config: Config, images: ImageFormat) -> None:
        self.config = config
        self.images = images
