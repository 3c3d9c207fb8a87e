"""The steps that are not policies: flip, crop, normalisation, random erasing.

Shapes: images (N, C, H, W), uint8 before normalisation and float after.
"""

from typing import Protocol

import torch
from torch import Tensor

from lit_attn.config.data import images as config
from lit_attn.data.augment import shapes

Parameters = tuple[Tensor, ...]


class Step(Protocol):
    """What a pipeline is made of."""

    def draw(self, n: int, generator: torch.Generator) -> Parameters:
        """Parameters for `n` images: CPU tensors of `n` rows."""

    def apply(self, images: Tensor, drawn: Parameters) -> Tensor:
        """The changed images; those given stay as they are."""


class Flip:
    """Mirror left-right. Drawn: which images (N,)."""

    def __init__(self, part: config.Flip) -> None:
        self.p = part.p

    def draw(self, n: int, generator: torch.Generator) -> Parameters:
        return (torch.rand(n, generator=generator) < self.p,)

    def apply(self, images: Tensor, drawn: Parameters) -> Tensor:
        return shapes.flip(images, *_beside(images, drawn))


class Crop:
    """Cut out of the zero-padded image. Drawn: top row and left column (N,) each."""

    def __init__(self, part: config.Crop) -> None:
        self.padding = part.padding

    def draw(self, n: int, generator: torch.Generator) -> Parameters:
        corners = torch.randint(2 * self.padding + 1, (2, n), generator=generator)
        return tuple(corners.unbind())

    def apply(self, images: Tensor, drawn: Parameters) -> Tensor:
        return shapes.crop(images, self.padding, *_beside(images, drawn))


class Normalize:
    """To float, minus `mean`, over `std`: per channel, of values from 0 to 1. Nothing is drawn."""

    def __init__(self, mean: list[float], std: list[float]) -> None:
        self.mean = torch.tensor(mean).view(-1, 1, 1)
        self.std = torch.tensor(std).view(-1, 1, 1)

    def draw(self, n: int, generator: torch.Generator) -> Parameters:
        return ()

    def apply(self, images: Tensor, drawn: Parameters) -> Tensor:
        mean, std = _beside(images, (self.mean, self.std))
        return images.float().div_(255).sub_(mean).div_(std)


class Erasing:
    """Random erasing (Zhong et al. 2020) of a normalised image, with the raw dataset mean.

    Drawn: boxes (N, 4) of top, left, height, width; a height of 0 where nothing is erased. The box
    is the first of 100 tries that fits: area uniform in `area` of the image, aspect ratio uniform
    in `aspect`, as in the CIFAR-100 set-up (docs/setups.md, section 2).
    """

    tries = 100

    def __init__(self, part: config.Erasing, mean: list[float], size: tuple[int, int]) -> None:
        self.part = part
        self.mean = torch.tensor(mean)
        self.size = size

    def draw(self, n: int, generator: torch.Generator) -> Parameters:
        (height, width), part = self.size, self.part
        happens, y, x = torch.rand(3, n, 1, generator=generator)
        area, aspect = torch.rand(2, n, self.tries, generator=generator)
        area = (part.area[0] + area * (part.area[1] - part.area[0])) * height * width
        aspect = part.aspect[0] + aspect * (part.aspect[1] - part.aspect[0])
        tall, wide = (area * aspect).sqrt().round(), (area / aspect).sqrt().round()
        fits = (tall < height) & (wide < width)
        first = fits.float().argmax(1, keepdim=True)
        tall, wide = (side.gather(1, first) for side in (tall, wide))
        top = (y * (height - tall + 1)).floor()
        left = (x * (width - wide + 1)).floor()
        used = (happens < part.p) & fits.any(1, keepdim=True)
        return (torch.cat([top, left, tall, wide], dim=1).long() * used,)

    def apply(self, images: Tensor, drawn: Parameters) -> Tensor:
        return shapes.erase(images, *_beside(images, (*drawn, self.mean)))


def _beside(images: Tensor, tensors: Parameters) -> Parameters:
    return tuple(tensor.to(images.device, non_blocking=True) for tensor in tensors)
