"""Plug-in for LocalViT, the model of BeliefFormer's section 5.1.

The studies on ImageNet name this file under `parts`. The network is in
imagenet_local_vit_network.py, which a cell imports when it is built.

Source: github.com/BorealisAI/efficient-vit-training (docs/setups.md, section 5).
"""

from typing import Literal

from pydantic import Field

from lit_attn.config.models.base import FFN, ffn_field
from lit_attn.config.models.vision import Transformer
from lit_attn.schema.base import Share


class LocalViTConfig(Transformer, kind="local-vit"):
    """ViT-S/16 with a depth-wise convolution inside the FFN, which the class token skips.

    The model of BeliefFormer's ImageNet experiment (LocalViT "hs", Li et al. 2021). The released
    code also builds and counts 3,924 parameters in each layer that nothing uses; they are left out.
    With `positions: replaced`, as in that code, untrained copies replace the positions at every
    change of the image size and around every evaluation, resampled to the new grid.
    """

    runs_foreign_code = False  # Tests try it out, so a dry run need not import PyTorch.
    activations = ("hard-swish",)
    builder = ("imagenet_local_vit_network:build_local", "shape", "outputs")
    positions: Literal["learned", "replaced"] = Field(
        "learned", description="replaced: untrained, resampled copies at each change of image size"
    )
    ffn: FFN | None = ffn_field(1536, "hard-swish")
    drop_path: Share = Field(0.1, description="drop-path rate of the last layer; linear from 0")
