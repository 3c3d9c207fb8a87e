"""The augmentation of one set-up, for one batch or for many at once."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lit_attn.config.data import images as config
from lit_attn.data.augment import mixing, policies
from lit_attn.data.augment.steps import Crop, Erasing, Flip, Normalize, Parameters, Step

Batch = tuple[Tensor, Tensor]


class Drawn(NamedTuple):
    """What happens to one batch of `size` images: every step's parameters, and the mix."""

    size: int
    steps: list[Parameters]
    mix: mixing.Drawn | None


class Pipeline:
    """The steps of `data.augment`, in its order.

    `mean` and `std` (per channel, 0..1) stand where its `normalize` gives none.
    """

    def __init__(self, data: config.Images, mean: list[float], std: list[float]) -> None:
        *_, height, width = data.image_shape
        given = next(part for part in data.augment if isinstance(part, config.Normalize))
        mean, std = list(given.mean or mean), list(given.std or std)
        self.normalize = Normalize(mean, std)
        self.steps: list[Step] = []
        self.mix: mixing.Mix | None = None
        for part in data.augment:
            match part:
                case config.Flip():
                    self.steps.append(Flip(part))
                case config.Crop():
                    self.steps.append(Crop(part))
                case config.AutoAugment():
                    self.steps.append(policies.AutoAugment(part, width))
                case config.RandAugment(flavour="blanking"):
                    self.steps.append(policies.BlankingRandAugment(part))
                case config.RandAugment():
                    self.steps.append(policies.TorchvisionRandAugment(part, width))
                case config.Normalize():
                    self.steps.append(self.normalize)
                case config.Erasing():
                    self.steps.append(Erasing(part, mean, (height, width)))
                case config.Mix():
                    self.mix = mixing.Mix(part, data.num_classes)
                case _:
                    raise ValueError(f"no augmentation for '{part.kind}'")

    def draw(self, n: int, generator: torch.Generator) -> Drawn:
        """Parameters for one batch of `n` images."""
        steps = [step.draw(n, generator) for step in self.steps]
        return Drawn(n, steps, None if self.mix is None else self.mix.draw(n, generator))

    def apply(self, images: Tensor, labels: Tensor, drawn: Sequence[Drawn]) -> list[Batch]:
        """The batches that `drawn` describes, from their images and labels one after the other.

        Small operations take a device as long as large ones, so that many small batches are best
        augmented together; what each becomes does not depend on the others.
        """
        for place, step in enumerate(self.steps):
            together = zip(*(one.steps[place] for one in drawn), strict=True)
            images = step.apply(images, tuple(torch.cat(parts) for parts in together))
        sizes = [one.size for one in drawn]
        batches = list(zip(images.split(sizes), labels.split(sizes), strict=True))
        return [
            batch if self.mix is None or one.mix is None else self.mix.apply(*batch, one.mix)
            for batch, one in zip(batches, drawn, strict=True)
        ]
