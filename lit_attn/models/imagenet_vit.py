"""Vision transformers for ImageNet: timm's VisionTransformer with our attention, any image size.

Sources of the two shapes that the experiments use:
- DeiT-S/16 (Touvron et al. 2021, arXiv:2012.12877): github.com/facebookresearch/deit
- ViT-S/16 (Beyer et al. 2022, arXiv:2205.01580): github.com/google-research/big_vision

Shapes: images (B, C, H, W) -> logits (B, classes); d width.
"""

from collections.abc import Callable
from functools import partial

import torch
from timm.layers import Mlp, build_sincos2d_pos_embed
from timm.models.vision_transformer import Block, VisionTransformer
from torch import nn

from lit_attn.attention.layer import attn_layer
from lit_attn.config.models.imagenet import ImageViTConfig, Transformer
from lit_attn.models.layers import Device
from lit_attn.models.seeded_draws import by_name
from lit_attn.models.vit import AttentionBlock, Shape, initialise, require_tiles

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
        perceptron,
        norm_eps=model.norm_eps,
        class_token=model.pool == "token",
        device=device,
    )
    if not vit.get_parameter("pos_embed").is_meta:
        with by_name(vit):
            initialise(vit, "timm")
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


def perceptron(dim: int, width: int, device: Device) -> Mlp:
    """Return Linear, GELU, Linear."""
    return Mlp(dim, width, device=device)


def fix_positions(vit: VisionTransformer) -> None:
    """Set the positions to the fixed sines and cosines of Beyer et al. 2022, untrained."""
    assert not vit.has_class_token
    positions = vit.get_parameter("pos_embed")
    grid = build_sincos2d_pos_embed(
        list(vit.patch_embed.grid_size), vit.embed_dim, device=positions.device
    )
    with torch.no_grad():
        positions.copy_(grid)
    positions.requires_grad_(False)
