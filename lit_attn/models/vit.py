"""Vision transformers of the CIFAR studies: timm's VisionTransformer with our attention.

Sources of the two shapes that the experiments use:
- ViT with shifted patch tokenisation (SPT) and locality self-attention (LSA), Lee et al. 2021,
  arXiv:2112.13492: github.com/aanna0701/SPT_LSA_ViT
- ViT-small: github.com/kentaroy47/vision-transformers-cifar10

Shapes: images (B, C, H, W) -> logits (B, classes); d width, P side of a patch in pixels.
"""

from collections.abc import Iterator

import torch
from timm.layers import DropPath, Mlp
from timm.models.vision_transformer import Block, PatchEmbed, VisionTransformer
from torch import Tensor, nn
from torch.nn import functional as F

from lit_attn.attention.layer import Attention, attn_layer
from lit_attn.config.models.vision import ViTConfig
from lit_attn.models.layers import Device
from lit_attn.models.seeded_draws import draw_parameters

Shape = tuple[int, int, int]


class AttentionBlock(nn.Module):
    """timm's transformer block without the FFN and its norm."""

    def __init__(self, block: Block) -> None:
        super().__init__()
        self.norm1 = block.norm1
        self.attn = block.attn
        self.drop_path1 = block.drop_path1

    def forward(
        self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False
    ) -> Tensor:
        attended = self.attn(self.norm1(x), attn_mask=attn_mask, is_causal=is_causal)
        return x + self.drop_path1(attended)


class ShiftedPatchEmbed(nn.Module):
    """Shifted patch tokenisation, SPT (Lee et al. 2021): (B, C, H, W) -> (B, H W / P^2, d).

    The image and its four copies shifted left, right, up and down by one pixel are stacked to 5 C
    channels and cut into patches; LayerNorm(5 C P^2) and a Linear follow (eq. 1-3). The arguments
    are those with which timm builds its `embed_layer`.
    """

    def __init__(
        self,
        img_size: tuple[int, int],
        patch_size: int,
        in_chans: int,
        embed_dim: int,
        bias: bool,
        dynamic_img_pad: bool,
        device: Device = None,
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


def build(
    model: ViTConfig, image_shape: Shape, num_classes: int, device: Device = None
) -> VisionTransformer:
    """Build the network that `model` describes; initialise it except on the meta device."""
    vit = VisionTransformer(
        img_size=image_shape[1:],
        patch_size=model.patch,
        in_chans=image_shape[0],
        num_classes=num_classes,
        embed_dim=model.dim,
        depth=model.depth,
        num_heads=model.heads,
        qkv_bias=model.qkv_bias,
        pos_drop_rate=model.embed_dropout,
        proj_drop_rate=model.dropout,
        drop_path_rate=model.drop_path,
        norm_layer=nn.LayerNorm,
        embed_layer=ShiftedPatchEmbed if model.patchify == "shifted" else PatchEmbed,
        attn_layer=attn_layer(model.attention, local_self_attention=model.local_self_attention),
        device=device,
    )
    vit.blocks = nn.Sequential(*(_fitted(block, model, device) for block in vit.blocks))
    draw_parameters(vit, lambda: initialise(vit, model.init))
    return vit


def initialise(vit: VisionTransformer, scheme: str) -> None:
    """Fill every parameter as `scheme` says: "timm", "xavier" (SPT_LSA_ViT) or "torch" (ViT-small).

    xavier: every matrix Xavier-normal, with q, k and v as one matrix; biases zero. torch: PyTorch's
    defaults. Both draw the class token and the position embedding from N(0, 1). Compositions across
    heads keep the initial values of their own paper.
    """
    if scheme == "timm":
        vit.init_weights("", needs_reset=True)
    else:
        for name in ("cls_token", "pos_embed"):
            nn.init.normal_(vit.get_parameter(name))
        for name, module in vit.named_modules():
            if "composers" in name.split("."):
                continue
            if isinstance(module, nn.Linear | nn.Conv2d | nn.LayerNorm):
                module.reset_parameters()
            if scheme == "xavier" and isinstance(module, nn.Linear | nn.Conv2d):
                # A patch embedding is a matrix on flattened patches, whatever its storage.
                nn.init.xavier_normal_(module.weight.flatten(1))
                if module.bias is not None:
                    nn.init.zeros_(module.bias)


def separate_matrices(vit: VisionTransformer) -> Iterator[tuple[str, nn.Linear, Tensor]]:
    """Yield (name, layer, matrix) of all Linears, with q, k and v of a layer as three matrices.

    Compositions across heads are left out: they keep the initial values of their own paper.
    """
    for name, module in vit.named_modules():
        if not isinstance(module, nn.Linear) or "composers" in name.split("."):
            continue
        attention = vit.get_submodule(name.rpartition(".")[0])
        if isinstance(attention, Attention) and module is attention.qkv:
            shared = attention.key_heads * attention.head_dim
            sizes = (attention.num_heads * attention.head_dim, shared, shared)
            yield from ((name, module, matrix) for matrix in module.weight.split(sizes))
        else:
            yield name, module, module.weight


def _fitted(block: nn.Module, model: ViTConfig, device: Device) -> nn.Module:
    """Return timm's block with the configured FFN width (or no FFN) and stochastic depth."""
    assert isinstance(block, Block)
    if model.drop_path_schedule == "constant" and model.drop_path > 0:
        block.drop_path1 = DropPath(model.drop_path)
        block.drop_path2 = DropPath(model.drop_path)
    if model.ffn is None:
        return AttentionBlock(block)
    # timm takes the width as a ratio of d, which cannot express every integer.
    block.mlp = Mlp(model.dim, model.ffn.width, drop=model.dropout, device=device)
    return block
