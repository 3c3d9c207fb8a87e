"""Use of torchvision's private names; NAMES in lit_attn.private_names explains each."""

from typing import Any


def randaugment_table(bins: int, size: tuple[int, int]) -> dict[str, Any]:
    """Return RandAugment's strengths in `bins` steps, and if they have a sign, by operation."""
    from torchvision.transforms import RandAugment

    return RandAugment()._augmentation_space(bins, size)
