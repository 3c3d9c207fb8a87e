"""Plug-in for the RandAugment of the ViT-small CIFAR set-up.

The studies of BeliefFormer and AttentionX on CIFAR name this file under `parts`. Its torch code is
in blanking_randaugment_images.py, which a cell imports when it is built.

Source: github.com/kentaroy47/vision-transformers-cifar10 at 5bb83d3 (docs/setups.md, section 1).
"""

from typing import Any, ClassVar

from pydantic import Field, PositiveInt

from lit_attn.data.augment.base import Augmentation
from lit_attn.data.base import method


class BlankingRandAugmentConfig(Augmentation, kind="blanking-randaugment"):
    """RandAugment whose translations exceed the width of an image of CIFAR.

    Two of its 16 operations move a 32-pixel image by 46.7 pixels at magnitude 14 of 30, so two
    draws make 23.4 % of the images black.
    """

    runs_foreign_code = False  # Tests try it out, so a dry run need not.
    stage = "bytes"
    ops: PositiveInt = Field(2, description="operations for each image")
    magnitude: int = Field(14, ge=0, le=30, description="strength of the operations")
    build: ClassVar = method("blanking_randaugment_images:BlankingRandAugment")

    def identity(self) -> dict[str, Any]:
        """Return the identity from the time when `randaugment` of the package had this flavour."""
        return {**super().identity(), "kind": "randaugment", "flavour": "blanking"}
