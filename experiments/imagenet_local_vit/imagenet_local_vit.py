"""Plug-in for LocalViT "hs" (Li et al. 2021, arXiv:2104.05707): BeliefFormer, section 5.1.

The studies on ImageNet name this file under `parts`.

Source: github.com/BorealisAI/efficient-vit-training (docs/setups.md, section 5).

Shapes: images (B, C, H, W) -> logits (B, classes); d width, n patches, w FFN width.
"""

import math
from functools import partial
from typing import Any, Literal

import torch
from pydantic import Field
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn
from torch.nn import functional as F

from lit_attn.models.base import FFN, ffn_field
from lit_attn.models.layers import Device
from lit_attn.models.seeded_draws import draw_parameters, outside_composers
from lit_attn.models.vit import RESIZABLE, Shape, Transformer, assemble, separate_matrices
from lit_attn.schema.base import Share


class ReplacedPositions(VisionTransformer):
    """VisionTransformer with the untrained positions of the released LocalViT code.

    Before training at another image size, and before and after every evaluation, that code replaces
    the positions by resampled copies, which its optimiser does not train. `pos_embed` has the
    positions of the last evaluation, and `next_pos_embed` those of the next one, resampled to the
    grid of the training images and back.
    """

    def _pos_embed(self, x: Tensor) -> Tensor:
        side = x.shape[1]
        full = self.patch_embed.grid_size[0]
        positions = self.get_parameter("pos_embed")
        following = self.get_buffer("next_pos_embed")
        with torch.no_grad():
            if not self.training and side == full:
                positions.copy_(following)
            resampled = resample(positions, side)
            if self.training:
                following.copy_(resample(resampled, full))
        token = self.get_parameter("cls_token").expand(len(x), -1, -1)
        tokens = torch.cat([token, x.flatten(1, 2)], 1)
        return self.pos_drop(tokens + resampled)


def resample(positions: Tensor, side: int) -> Tensor:
    """Resample the positions of patches, after the class token's, to a grid with `side` rows."""
    grid = positions[:, 1:].unflatten(1, (math.isqrt(positions.shape[1] - 1), -1))
    grid = F.interpolate(grid.permute(0, 3, 1, 2), (side, side), mode="bicubic")
    return torch.cat([positions[:, :1], grid.flatten(2).mT], 1)


class LocalFFN(nn.Module):
    """Linear, h-swish, 3 x 3 depth-wise convolution, h-swish, Linear, without biases.

    (B, 1 + n, d) -> the same shape. The output for the class token is zero: it skips the FFN.
    """

    def __init__(self, dim: int, width: int, device: Device = None) -> None:
        super().__init__()
        self.fc1 = nn.Linear(dim, width, bias=False, device=device)
        self.conv = nn.Conv2d(width, width, 3, padding=1, groups=width, bias=False, device=device)
        self.fc2 = nn.Linear(width, dim, bias=False, device=device)

    def forward(self, x: Tensor) -> Tensor:
        patches = x[:, 1:]
        side = math.isqrt(patches.shape[1])
        if side * side != patches.shape[1]:
            raise ValueError(f"{patches.shape[1]} patches are not a square grid; use square images")
        hidden = F.hardswish(self.fc1(patches)).transpose(1, 2).unflatten(-1, (side, side))
        hidden = F.hardswish(self.conv(hidden)).flatten(2).transpose(1, 2)
        return F.pad(self.fc2(hidden), (0, 0, 1, 0))


def build_local(
    model: Any, image_shape: Shape, num_classes: int, device: Device = None
) -> VisionTransformer:
    """Build the LocalViT that `model` describes; initialise it except on the meta device."""
    options: dict[str, Any] = {"norm_layer": partial(nn.LayerNorm, eps=1e-6), **RESIZABLE}
    options["qkv_bias"] = False
    network = ReplacedPositions if model.positions == "replaced" else VisionTransformer
    vit = assemble(model, image_shape, num_classes, LocalFFN, device, network, **options)
    draw_parameters(vit, lambda: initialise_local(vit))
    if isinstance(vit, ReplacedPositions):
        positions = vit.get_parameter("pos_embed").requires_grad_(False)
        vit.register_buffer("next_pos_embed", positions.clone())
    return vit


def initialise_local(vit: VisionTransformer) -> None:
    """Draw every matrix (q, k and v apart), the class token and the positions Xavier-normal.

    Biases, convolutions and norms keep PyTorch's defaults.
    """
    for name in ("cls_token", "pos_embed"):
        nn.init.xavier_normal_(vit.get_parameter(name))
    for module in outside_composers(vit).values():
        if isinstance(module, nn.Linear | nn.Conv2d | nn.LayerNorm):
            module.reset_parameters()
    for _, _, matrix in separate_matrices(vit):
        nn.init.xavier_normal_(matrix)


class LocalViTConfig(Transformer, kind="local-vit"):
    """ViT-S/16 with a depth-wise convolution inside the FFN, which the class token skips.

    The model of BeliefFormer's ImageNet experiment (LocalViT "hs", Li et al. 2021). The released
    code also builds and counts 3,924 parameters in each layer that nothing uses; they are left out.
    With `positions: replaced`, as in that code, untrained copies replace the positions at every
    change of the image size and around every evaluation, resampled to the new grid.
    """

    runs_foreign_code = False  # Tests try it out, so a dry run need not.
    activations = ("hard-swish",)
    builder = (build_local, "shape", "outputs")
    positions: Literal["learned", "replaced"] = Field(
        "learned", description="replaced: untrained, resampled copies at each change of image size"
    )
    ffn: FFN | None = ffn_field(1536, "hard-swish")
    drop_path: Share = Field(0.1, description="drop-path rate of the last layer; linear from 0")
