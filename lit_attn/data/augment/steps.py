"""Steps of the augmentation, all but the policies: each with its configuration.

Shapes: images (N, C, H, W), uint8 before normalisation and float32 after it; labels (N,) class
indices, mixed targets (N, classes).
"""

import math
from typing import NamedTuple

import numpy as np
import torch
from pydantic import Field, PositiveInt
from torch import Tensor
from torch.nn import functional as F

from lit_attn.data.augment.base import Augmentation, Batch, Configured, ImageFormat, Parameters
from lit_attn.data.loading import start_copy

Statistics = tuple[float, ...] | None


class FlipConfig(Augmentation, kind="flip"):
    """Mirroring left-right."""

    stage = "any"
    p: float = Field(0.5, ge=0, le=1, description="probability for each image")

    def build(self, images: ImageFormat) -> "Flip":
        return Flip(self, images)


class Flip(Configured[FlipConfig]):
    """Mirroring left-right; parameters: a boolean for each image (N,)."""

    def draw(self, n: int, generator: torch.Generator) -> Parameters:
        return (torch.rand(n, generator=generator) < self.config.p,)

    def apply(self, images: Tensor, drawn: Parameters) -> Tensor:
        (is_flipped,) = _to_device_of(images, drawn)
        return torch.where(is_flipped.view(-1, 1, 1, 1), images.flip(-1), images)


class CropConfig(Augmentation, kind="crop"):
    """Padding of every side by zeros, and a random crop of the original size."""

    stage = "any"
    padding: PositiveInt = Field(4, description="zero pixels added to every side")

    def build(self, images: ImageFormat) -> "Crop":
        return Crop(self, images)


class Crop(Configured[CropConfig]):
    """Crop of the zero-padded image; parameters: the top row and the left column (N,) each."""

    def draw(self, n: int, generator: torch.Generator) -> Parameters:
        corners = torch.randint(2 * self.config.padding + 1, (2, n), generator=generator)
        return tuple(corners.unbind())

    def apply(self, images: Tensor, drawn: Parameters) -> Tensor:
        padded = F.pad(images, (self.config.padding,) * 4)
        if images.device.type == "cpu":
            return self._copy_windows(padded, drawn, torch.empty_like(images))
        top, left = _to_device_of(images, drawn)
        n, _, height, width = images.shape
        windows = padded.unfold(2, height, 1).unfold(3, width, 1)
        return windows[torch.arange(n, device=images.device), :, top, left]

    def _copy_windows(self, padded: Tensor, drawn: Parameters, cropped: Tensor) -> Tensor:
        """Copy one window after the other: on a CPU four times as fast as one index for all."""
        height, width = cropped.shape[2:]
        top, left = (corner.tolist() for corner in drawn)
        pixels = padded.numpy()
        for row, window in enumerate(cropped.numpy()):
            y, x = top[row], left[row]
            window[:] = pixels[row, :, y : y + height, x : x + width]
        return cropped


class NormalizeConfig(Augmentation, kind="normalize"):
    """Conversion of bytes to float, minus the mean, over the standard deviation, per channel."""

    stage = "normalize"
    mean: Statistics = Field(
        None, description="mean of each channel, 0 to 1; null: that of the training images"
    )
    std: Statistics = Field(
        None, description="deviation of each channel, 0 to 1; null: that of the training images"
    )

    def with_statistics(self, images: ImageFormat) -> ImageFormat:
        """Return `images` with the mean and the deviation of this configuration."""
        mean = self.mean or images.mean
        std = self.std or images.std
        return images._replace(mean=list(mean), std=list(std))

    def build(self, images: ImageFormat) -> "Normalize":
        return Normalize(self, images)


class Normalize:
    """Conversion to float, minus the mean, over the deviation of each channel."""

    def __init__(self, _: NormalizeConfig, images: ImageFormat) -> None:
        self.mean = torch.tensor(images.mean).view(-1, 1, 1)
        self.std = torch.tensor(images.std).view(-1, 1, 1)

    def draw(self, n: int, generator: torch.Generator) -> Parameters:
        return ()

    def apply(self, images: Tensor, drawn: Parameters) -> Tensor:
        mean, std = _to_device_of(images, (self.mean, self.std))
        return images.float().div_(255).sub_(mean).div_(std)


class ErasingConfig(Augmentation, kind="erasing"):
    """Random erasing (Zhong et al. 2020): a rectangle is set to the raw mean of the data set."""

    stage = "normalized"
    p: float = Field(0.25, ge=0, le=1, description="probability for each image")
    area: tuple[float, float] = Field((0.02, 0.4), description="range of the erased share")
    aspect: tuple[float, float] = Field((0.3, 3.33), description="range of height over width")

    def build(self, images: ImageFormat) -> "Erasing":
        return Erasing(self, images)


class Erasing(Configured[ErasingConfig]):
    """Random erasing (Zhong et al. 2020) of a normalised image, with the raw mean of the data set.

    Parameters: boxes (N, 4) of top, left, height, width; the height is 0 if nothing is erased. The
    box is the first of 100 tries that fits: its share of the image's area is uniform in `area`, its
    aspect ratio uniform in `aspect`, as in the CIFAR-100 set-up (docs/setups.md, section 2).
    """

    tries = 100

    def draw(self, n: int, generator: torch.Generator) -> Parameters:
        config = self.config
        _, height, width = self.images.shape
        happens, y, x = torch.rand(3, n, 1, generator=generator)
        area, aspect = torch.rand(2, n, self.tries, generator=generator)
        area = (config.area[0] + area * (config.area[1] - config.area[0])) * height * width
        aspect = config.aspect[0] + aspect * (config.aspect[1] - config.aspect[0])
        heights = (area * aspect).sqrt().round()
        widths = (area / aspect).sqrt().round()
        fits = (heights < height) & (widths < width)
        first = fits.float().argmax(1, keepdim=True)
        tall = heights.gather(1, first)
        wide = widths.gather(1, first)
        top = (y * (height - tall + 1)).floor()
        left = (x * (width - wide + 1)).floor()
        used = (happens < config.p) & fits.any(1, keepdim=True)
        return (torch.cat([top, left, tall, wide], dim=1).long() * used,)

    def apply(self, images: Tensor, drawn: Parameters) -> Tensor:
        boxes, mean = _to_device_of(images, (*drawn, torch.tensor(self.images.mean)))
        top, left, tall, wide = boxes.view(-1, 4, 1, 1).unbind(1)
        rows = torch.arange(images.shape[-2], device=images.device).view(1, -1, 1)
        columns = torch.arange(images.shape[-1], device=images.device).view(1, 1, -1)
        erased = (rows >= top) & (rows < top + tall) & (columns >= left) & (columns < left + wide)
        return torch.where(erased.unsqueeze(1), mean.view(-1, 1, 1).to(images.dtype), images)


class MixConfig(Augmentation, kind="mix"):
    """MixUp or CutMix, with one lambda for the batch."""

    stage = "batch"
    mixup: float = Field(1.0, ge=0, description="alpha of MixUp's Beta(alpha, alpha); 0: none")
    cutmix: float = Field(1.0, ge=0, description="alpha of CutMix's Beta(alpha, alpha); 0: none")
    p: float = Field(0.5, ge=0, le=1, description="probability for each batch")
    switch: float = Field(0.5, ge=0, le=1, description="share of CutMix if both are on")

    def build(self, images: ImageFormat) -> "Mix":
        return Mix(self, images)


class MixDraw(NamedTuple):
    """Parameters of `Mix` for one batch: "none", "mixup" or "cutmix", and lambda for the mixture.

    `centre` is (row, column) of CutMix's box relative to the image's size, and `others` has the
    index (N,) of the image that each image is mixed with.
    """

    kind: str
    weight: float
    centre: tuple[float, float]
    others: Tensor


class Mix(Configured[MixConfig]):
    """MixUp (Zhang et al. 2018) or CutMix (Yun et al. 2019) with a shuffled copy of the batch."""

    def draw(self, n: int, generator: torch.Generator) -> MixDraw:
        config = self.config
        happens, switch, row, column = torch.rand(4, generator=generator).tolist()
        others = torch.randperm(n, generator=generator)
        # torch's own sampler of the beta distribution takes no generator.
        seed = int(torch.randint(2**31, (), generator=generator))
        kind = "none"
        if happens < config.p and (config.mixup or config.cutmix):
            cut = config.cutmix > 0 and (config.mixup == 0 or switch < config.switch)
            kind = "cutmix" if cut else "mixup"
        alpha = config.cutmix if kind == "cutmix" else config.mixup
        weight = 1.0 if kind == "none" else float(np.random.default_rng(seed).beta(alpha, alpha))
        return MixDraw(kind, weight, (row, column), others)

    def partners(self, drawn: MixDraw) -> Tensor | None:
        return None if drawn.kind == "none" else drawn.others

    def mix(
        self, images: Tensor, labels: Tensor, others: Tensor, other_labels: Tensor, drawn: MixDraw
    ) -> Batch:
        targets = F.one_hot(labels, self.images.classes).to(images.dtype)
        if drawn.kind == "none":
            return images, targets
        weight = drawn.weight
        if drawn.kind == "cutmix":
            images, weight = cutmix(images, others, weight, *drawn.centre)
        else:
            images = weight * images + (1 - weight) * others
        other_targets = F.one_hot(other_labels, self.images.classes).to(images.dtype)
        return images, weight * targets + (1 - weight) * other_targets

    def apply(self, images: Tensor, labels: Tensor, drawn: MixDraw) -> Batch:
        """Return a batch whose images are mixed with each other."""
        others = start_copy(drawn.others, images.device)
        return self.mix(images, labels, images[others], labels[others], drawn)


def cutmix(
    images: Tensor, others: Tensor, weight: float, row: float, column: float
) -> tuple[Tensor, float]:
    """Replace a box of 1 - `weight` of the area, cut at the edges, by the other image's.

    Returns the images and the share of pixels that stayed.
    """
    height, width = images.shape[-2:]
    ratio = math.sqrt(1 - weight)
    tall, wide = int(height * ratio), int(width * ratio)
    y, x = int(row * height), int(column * width)
    top, bottom = max(0, y - tall // 2), min(height, y + tall // 2)
    left, right = max(0, x - wide // 2), min(width, x + wide // 2)
    mixed = images.clone()
    mixed[..., top:bottom, left:right] = others[..., top:bottom, left:right]
    return mixed, 1 - (bottom - top) * (right - left) / (height * width)


def _to_device_of(images: Tensor, tensors: Parameters) -> Parameters:
    return tuple(start_copy(tensor, images.device) for tensor in tensors)
