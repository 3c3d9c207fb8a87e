"""mmsegmentation's preprocessor of images, for networks that are built without memory."""

from typing import Any

import torch
from mmseg.models import SegDataPreProcessor
from torch import Tensor


class Preprocessor(SegDataPreProcessor):
    """mmsegmentation's preprocessor with its means and deviations as numbers.

    mmsegmentation stores them as buffers outside the state dict, which have no values in a network
    that is built on the meta device and then loads its weights. Here an empty buffer follows the
    type and the device of the network, and the numbers are written into its type in each call.
    `mean` and `std` have one number for each channel.
    """

    def __init__(self, *, mean: list[float], std: list[float], **options: Any) -> None:
        super().__init__(mean=mean, std=std, **options)
        self.means = tuple(mean)
        self.deviations = tuple(std)
        del self.mean, self.std
        self.register_buffer("place", torch.empty(0), persistent=False)

    @property
    def mean(self) -> Tensor:
        """Means of the colours, (C, 1, 1) in the type of the network."""
        return self._write(self.means)

    @property
    def std(self) -> Tensor:
        """Deviations of the colours, (C, 1, 1) in the type of the network."""
        return self._write(self.deviations)

    def _write(self, numbers: tuple[float, ...]) -> Tensor:
        """Return numbers as a tensor (C, 1, 1), without a copy from the CPU."""
        return torch.stack([self.place.new_full((1, 1), number) for number in numbers])
