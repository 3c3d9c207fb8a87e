"""Augmentation on the device, in the order a set-up gives.

Shapes: images (N, C, H, W), uint8 before `normalize` and float after; labels (N,), or (N, classes)
once a mix made probabilities of them.

Every step is two: drawing its parameters from a generator, and applying them. The tests hold the
second to Pillow, torchvision and timm on the same draws.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lit_attn.config import data as config
from lit_attn.data.augment import policies, shapes
from lit_attn.data.augment.mixing import mix

Batch = tuple[Tensor, Tensor]
Step = Callable[[Tensor, Tensor, torch.Generator], Batch]


class Pipeline:
    """The steps of one set-up, called as `pipeline(images, labels, generator)`."""

    def __init__(self, steps: Sequence[Step], normalize: Step) -> None:
        self.steps = steps
        self.normalize = normalize

    def __call__(self, images: Tensor, labels: Tensor, generator: torch.Generator) -> Batch:
        for step in self.steps:
            images, labels = step(images, labels, generator)
        return images, labels

    def evaluation(self) -> "Pipeline":
        """Normalisation alone."""
        return Pipeline([self.normalize], self.normalize)


def pipeline(
    chosen: Sequence[config.Augmentation], mean: list[float], std: list[float], num_classes: int
) -> Pipeline:
    """The pipeline of `chosen`; `mean` and `std` (0..1) stand where `normalize` gives none."""
    normalization = next(step for step in chosen if isinstance(step, config.Normalize))
    used_mean = list(normalization.mean or mean)
    used_std = list(normalization.std or std)
    steps = [_step(part, used_mean, used_std, num_classes) for part in chosen]
    return Pipeline(steps, _normalize(used_mean, used_std))


def _step(part: config.Augmentation, mean: list[float], std: list[float], num_classes: int) -> Step:
    match part:
        case config.Normalize():
            return _normalize(mean, std)
        case config.Flip():
            return _on_images(lambda x, g: shapes.flip(x, _uniform(len(x), g) < part.p))
        case config.Crop():
            return _on_images(lambda x, g: _crop(x, part.padding, g))
        case config.Erasing():
            return _on_images(lambda x, g: _erase(x, part, mean, g))
        case config.Mix():
            return lambda x, y, g: mix(x, y, part, num_classes, g)
        case config.AutoAugment():
            return _policy(policies.AutoAugment(part))
        case config.RandAugment(flavour="blanking"):
            return _policy(policies.BlankingRandAugment(part))
        case config.RandAugment():
            return _policy(policies.TorchvisionRandAugment(part))
        case _:
            raise ValueError(f"no augmentation for '{part.kind}'")


def _on_images(change: Callable[[Tensor, torch.Generator], Tensor]) -> Step:
    return lambda images, labels, generator: (change(images, generator), labels)


def _policy(policy: policies.Policy) -> Step:
    return _on_images(lambda x, g: policy.apply(x, policy.draw(len(x), x.shape[-1], g)))


def _normalize(mean: list[float], std: list[float]) -> Step:
    def normalize(images: Tensor, generator: torch.Generator) -> Tensor:
        shift = torch.tensor(mean, device=images.device).view(1, -1, 1, 1)
        scale = torch.tensor(std, device=images.device).view(1, -1, 1, 1)
        return (images.float() / 255 - shift) / scale

    return _on_images(normalize)


def _crop(images: Tensor, padding: int, generator: torch.Generator) -> Tensor:
    top, left = (
        torch.randint(2 * padding + 1, (len(images),), generator=generator, device=images.device)
        for _ in range(2)
    )
    return shapes.crop(images, padding, top, left)


def _erase(
    images: Tensor, part: config.Erasing, mean: list[float], generator: torch.Generator
) -> Tensor:
    value = torch.tensor(mean, device=images.device)
    return shapes.erase(images, draw_boxes(images, part, generator), value)


def draw_boxes(images: Tensor, part: config.Erasing, generator: torch.Generator) -> Tensor:
    """(N, 4) of top, left, height, width: the first of 100 tries that fits, or none.

    Area uniform in `area` of the image, aspect ratio uniform in `aspect` (docs/setups.md).
    """
    n, (height, width) = len(images), images.shape[-2:]
    tries = 100
    happens, area, aspect, y, x = (_uniform(n * tries, generator).view(n, tries) for _ in range(5))
    area = (part.area[0] + area * (part.area[1] - part.area[0])) * height * width
    aspect = part.aspect[0] + aspect * (part.aspect[1] - part.aspect[0])
    tall, wide = (area * aspect).sqrt().round(), (area / aspect).sqrt().round()
    fits = (tall < height) & (wide < width)
    first = fits.float().argmax(1, keepdim=True)
    tall, wide = (side.gather(1, first) for side in (tall, wide))
    top = (y.gather(1, first) * (height - tall + 1)).floor()
    left = (x.gather(1, first) * (width - wide + 1)).floor()
    box = torch.cat([top, left, tall, wide], dim=1).long()
    used = (happens[:, :1] < part.p) & fits.any(1, keepdim=True)
    return torch.where(used, box, 0)


def _uniform(n: int, generator: torch.Generator) -> Tensor:
    return torch.rand(n, generator=generator, device=generator.device)
