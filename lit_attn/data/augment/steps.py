"""Augmentation of image batches on the device: the pipeline, and all steps but the policies.

Every step has two methods. `draw` makes the random parameters on the CPU from a generator, one row
for each image. `apply` changes the images on their device. So a batch is the same on every device,
and a process that trains on a part of it needs only the rows of this part.

Shapes: images (N, C, H, W), uint8 before normalisation and float32 after it; labels (N,) class
indices, mixed targets (N, classes).
"""

import math
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from lit_attn.data.augment import base as augment
from lit_attn.data.images_config import Images

Batch = tuple[Tensor, Tensor]
Parameters = tuple[Tensor, ...]
Config = TypeVar("Config", bound=augment.Augmentation)


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


class Plan(NamedTuple):
    """Random parameters of one batch, for the rows that one process needs.

    `rows` chooses these rows from the batch: the samples of the process, and the images that they
    are mixed with. Among these rows, `samples` chooses the samples of the process and `partners`
    their partners, in the same order.
    """

    rows: Tensor | slice
    samples: Tensor | slice
    partners: Tensor | slice
    before: list[Parameters]
    """Parameters of the steps before the normalisation."""
    after: list[Parameters]
    """Parameters of the normalisation and of the steps after it."""
    mixture: Any


ALL = slice(None)


class Pipeline:
    """Augmentation of the batches of one data set.

    `mean` and `std` (per channel, 0 to 1) are the training images'; `normalize` can set its own.
    The steps before the normalisation work on bytes, wherever the images are: on the CPU, perhaps
    in a worker process, or on the device. The other steps work on `device`.
    """

    def __init__(
        self, data: Images, mean: list[float], std: list[float], device: torch.device
    ) -> None:
        images = augment.ImageFormat(data.image_shape, data.num_classes, mean, std)
        for config in data.augment:
            images = config.with_statistics(images)
        self.before: list[Step] = []
        self.after: list[Step] = []
        self.mix: BatchStep | None = None
        for config in data.augment:
            step = config.build(images)
            if config.stage == "batch":
                self.mix = step
            elif config.stage == "normalize" or self.after:
                self.after.append(step)
            else:
                self.before.append(step)
        self.device = device

    @property
    def normalize(self) -> Step:
        """Step that turns bytes into normalised floats."""
        return self.after[0]

    def plan(self, n: int, generator: torch.Generator, rank: int = 0, world: int = 1) -> Plan:
        """Draw the parameters of a batch of `n` images of which this process trains on a share.

        The generator decides on all parameters, in the order of the steps.
        """
        before = [step.draw(n, generator) for step in self.before]
        after = [step.draw(n, generator) for step in self.after]
        mixture = None
        partners = None
        if self.mix is not None:
            mixture = self.mix.draw(n, generator)
            partners = self.mix.partners(mixture)
        if world == 1:
            return Plan(ALL, ALL, ALL if partners is None else partners, before, after, mixture)
        samples = torch.arange(rank, n, world)
        mixed_with = samples if partners is None else partners[samples]
        rows = torch.cat([samples, mixed_with]).unique()
        return Plan(
            rows=rows,
            samples=torch.searchsorted(rows, samples),
            partners=torch.searchsorted(rows, mixed_with),
            before=[_choose(parameters, rows) for parameters in before],
            after=[_choose(parameters, rows) for parameters in after],
            mixture=mixture,
        )

    def prepare(self, images: Tensor, plan: Plan) -> Tensor:
        """Return the rows of a plan, in bytes, after the steps before the normalisation."""
        for step, parameters in zip(self.before, plan.before, strict=True):
            images = step.apply(images, parameters)
        return images

    def finish(self, images: Tensor, labels: Tensor, plan: Plan) -> Batch:
        """Return the samples of this process, on `device`, from prepared rows and their labels."""
        images = images.to(self.device, non_blocking=True)
        labels = labels.to(self.device, non_blocking=True)
        for step, parameters in zip(self.after, plan.after, strict=True):
            images = step.apply(images, parameters)
        samples = _to_device(plan.samples, self.device)
        if self.mix is None:
            return images[samples], labels[samples]
        partners = _to_device(plan.partners, self.device)
        return self.mix.mix(
            images[samples], labels[samples], images[partners], labels[partners], plan.mixture
        )

    def apply(self, images: Tensor, labels: Tensor, generator: torch.Generator) -> Batch:
        """Return an augmented batch; the generator decides on all of its parameters."""
        plan = self.plan(len(images), generator)
        return self.finish(self.prepare(images, plan), labels, plan)


def _choose(parameters: Parameters, rows: Tensor) -> Parameters:
    return tuple(parameter[rows] for parameter in parameters)


def _to_device(rows: Tensor | slice, device: torch.device) -> Tensor | slice:
    return rows if isinstance(rows, slice) else rows.to(device, non_blocking=True)


class Configured(Generic[Config]):
    """Base of the steps with a configuration, for training images of one format."""

    def __init__(self, config: Config, images: augment.ImageFormat) -> None:
        self.config = config
        self.images = images


class Flip(Configured[augment.FlipConfig]):
    """Mirroring left-right; parameters: a boolean for each image (N,)."""

    def draw(self, n: int, generator: torch.Generator) -> Parameters:
        return (torch.rand(n, generator=generator) < self.config.p,)

    def apply(self, images: Tensor, drawn: Parameters) -> Tensor:
        (is_flipped,) = _to_device_of(images, drawn)
        return torch.where(is_flipped.view(-1, 1, 1, 1), images.flip(-1), images)


class Crop(Configured[augment.CropConfig]):
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


class Normalize:
    """Conversion to float, minus the mean, over the deviation of each channel."""

    def __init__(self, _: augment.NormalizeConfig, images: augment.ImageFormat) -> None:
        self.mean = torch.tensor(images.mean).view(-1, 1, 1)
        self.std = torch.tensor(images.std).view(-1, 1, 1)

    def draw(self, n: int, generator: torch.Generator) -> Parameters:
        return ()

    def apply(self, images: Tensor, drawn: Parameters) -> Tensor:
        mean, std = _to_device_of(images, (self.mean, self.std))
        return images.float().div_(255).sub_(mean).div_(std)


class Erasing(Configured[augment.ErasingConfig]):
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


class MixDraw(NamedTuple):
    """Parameters of `Mix` for one batch: "none", "mixup" or "cutmix", and lambda for the mixture.

    `centre` is (row, column) of CutMix's box relative to the image's size, and `others` has the
    index (N,) of the image that each image is mixed with.
    """

    kind: str
    weight: float
    centre: tuple[float, float]
    others: Tensor


class Mix(Configured[augment.MixConfig]):
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
        others = drawn.others.to(images.device, non_blocking=True)
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
    return tuple(tensor.to(images.device, non_blocking=True) for tensor in tensors)
