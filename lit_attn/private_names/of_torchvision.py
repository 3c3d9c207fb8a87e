"""Use of torchvision's private names; NAMES in lit_attn.private_names explains each."""

from typing import Any

from torchvision.transforms import RandAugment


def randaugment_table(bins: int, size: tuple[int, int]) -> dict[str, Any]:
    """Return RandAugment's strengths in `bins` steps, and if they have a sign, by operation."""
    return RandAugment()._augmentation_space(bins, size)
