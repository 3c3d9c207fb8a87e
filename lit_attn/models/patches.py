"""Shifted patch tokenisation (SPT; Lee et al. 2021, eq. 1-3)."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class ShiftedPatchEmbed(nn.Module):
    """The image beside itself shifted left, right, up and down by one pixel, cut into patches.

    (B, C, H, W) -> (B, H W / P^2, d): five times C channels, LayerNorm(5 C P^2), Linear. Takes the
    arguments with which timm builds its `embed_layer`.
    """

    def __init__(
        self,
        img_size: tuple[int, int],
        patch_size: int,
        in_chans: int,
        embed_dim: int,
        bias: bool,
        dynamic_img_pad: bool,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.patch_size = patch_size
        self.num_patches = (img_size[0] // patch_size) * (img_size[1] // patch_size)
        features = 5 * in_chans * patch_size**2
        self.norm = nn.LayerNorm(features, device=device, dtype=dtype)
        self.proj = nn.Linear(features, embed_dim, bias=bias, device=device, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        padded = F.pad(x, (1, 1, 1, 1))
        height, width = x.shape[-2:]
        left = padded[..., 1 : 1 + height, 2 : 2 + width]
        right = padded[..., 1 : 1 + height, :width]
        up = padded[..., 2 : 2 + height, 1 : 1 + width]
        down = padded[..., :height, 1 : 1 + width]
        stacked = torch.cat([x, left, right, up, down], dim=1)
        patches = F.unfold(stacked, self.patch_size, stride=self.patch_size).transpose(1, 2)
        return self.proj(self.norm(patches))
