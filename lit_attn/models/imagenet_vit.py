"""Vision transformers for ImageNet: timm's VisionTransformer with our attention, any image size.

Sources of the two shapes that the experiments use:
- DeiT-S/16 (Touvron et al. 2021, arXiv:2012.12877): github.com/facebookresearch/deit
- ViT-S/16 (Beyer et al. 2022, arXiv:2205.01580): github.com/google-research/big_vision

Shapes: images (B, C, H, W) -> logits (B, classes); d width.
"""

from collections.abc import Callable
from functools import partial

import torch
from timm.layers import GELUTanh, Mlp, lecun_normal_
from timm.models.vision_transformer import Block, VisionTransformer
from torch import nn

from lit_attn.attention.layer import Attention, attn_layer
from lit_attn.config.models.imagenet import ImageViTConfig, Transformer
from lit_attn.models.layers import Device
from lit_attn.models.seeded_draws import by_name
from lit_attn.models.vit import (
    AttentionBlock,
    Shape,
    initialise,
    require_tiles,
    separate_matrices,
)

FeedForward = Callable[[int, int, Device], nn.Module]


def build(
    model: ImageViTConfig, image_shape: Shape, num_classes: int, device: Device = None
) -> VisionTransformer:
    """Build the network that `model` describes; initialise it except on the meta device.

    Raises ConfigError if the patches do not tile the image.
    """
    vit = assemble(
        model,
        image_shape,
        num_classes,
        partial(perceptron, activation=model.ffn.activation if model.ffn else "gelu"),
        norm_eps=model.norm_eps,
        class_token=model.pool == "token",
        device=device,
    )
    if not vit.get_parameter("pos_embed").is_meta:
        with by_name(vit):
            if model.init == "flax":
                initialise_as_flax(vit)
            else:
                initialise(vit, model.init)
    if model.positions == "sincos":
        fix_positions(vit)
    return vit


def assemble(
    model: Transformer,
    image_shape: Shape,
    num_classes: int,
    feed_forward: FeedForward,
    *,
    norm_eps: float = 1e-6,
    qkv_bias: bool = True,
    class_token: bool = True,
    device: Device = None,
) -> VisionTransformer:
    """Build a network without initial values for images of `image_shape` (C, H, W).

    For images of another size the positions are resampled at each call, so that they stay trained.
    `feed_forward(d, width, device)` builds a block's FFN. Without a class token the mean over
    patches is classified. Raises ConfigError if the patches do not tile the image.
    """
    channels, height, width = image_shape
    require_tiles(model.patch, height, width)
    vit = VisionTransformer(
        img_size=(height, width),
        patch_size=model.patch,
        in_chans=channels,
        num_classes=num_classes,
        global_pool="token" if class_token else "avg",
        class_token=class_token,
        fc_norm=False,
        embed_dim=model.dim,
        depth=model.depth,
        num_heads=model.heads,
        qkv_bias=qkv_bias,
        drop_path_rate=model.drop_path,
        norm_layer=partial(nn.LayerNorm, eps=norm_eps),
        attn_layer=attn_layer(model.attention),
        dynamic_img_size=True,
        dynamic_img_pad=True,
        device=device,
    )
    for index, block in enumerate(vit.blocks):
        assert isinstance(block, Block)
        if model.ffn is None:
            vit.blocks[index] = AttentionBlock(block)
        else:
            # timm takes the width as a ratio of d, which cannot express every integer.
            block.mlp = feed_forward(model.dim, model.ffn.width, device)
    return vit


def perceptron(dim: int, width: int, device: Device, activation: str = "gelu") -> Mlp:
    """Return Linear, GELU (exact or by its tanh approximation), Linear."""
    gelu = GELUTanh if activation == "gelu-tanh" else nn.GELU
    return Mlp(dim, width, act_layer=gelu, device=device)


def initialise_as_flax(vit: VisionTransformer) -> None:
    """Fill every parameter as big_vision's flax code does.

    Every matrix (q, k and v apart) is Xavier-uniform, the patch embedding LeCun-normal, the head
    zero. Biases of the FFN are N(0, 1e-6), other biases and the class token zero, and learned
    positions N(0, 1/d).
    """
    nn.init.normal_(vit.get_parameter("pos_embed"), std=vit.embed_dim**-0.5)
    if vit.has_class_token:
        nn.init.zeros_(vit.get_parameter("cls_token"))
    for module in vit.modules():
        if isinstance(module, nn.Conv2d):
            lecun_normal_(module.weight)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.LayerNorm):
            module.reset_parameters()
    for name, module, matrix in separate_matrices(vit):
        if module is vit.head:
            nn.init.zeros_(matrix)
        else:
            nn.init.xavier_uniform_(matrix)
        if module.bias is not None:
            nn.init.normal_(module.bias, std=1e-6 if ".mlp." in name else 0.0)
    for module in vit.modules():
        if isinstance(module, Attention):
            module.copy_projection()


def fix_positions(vit: VisionTransformer) -> None:
    """Set the positions to the fixed sines and cosines of Beyer et al. 2022, untrained.

    Coordinate k of the w / 4 frequencies is 10,000^(-k / (w / 4 - 1)), for columns and rows alike.
    """
    assert not vit.has_class_token
    positions = vit.get_parameter("pos_embed")
    count = vit.embed_dim // 4
    exponents = torch.arange(count, device=positions.device) / max(1, count - 1)
    rows, columns = (
        torch.arange(size, device=positions.device)[:, None] * 10_000.0**-exponents
        for size in vit.patch_embed.grid_size
    )
    x, y = columns.repeat(len(rows), 1), rows.repeat_interleave(len(columns), dim=0)
    with torch.no_grad():
        positions.copy_(torch.cat([x.sin(), x.cos(), y.sin(), y.cos()], dim=1))
    positions.requires_grad_(False)
