"""timm's VisionTransformer with our attention, for images of any size.

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
from lit_attn.models.seeded_draws import by_name
from lit_attn.models.vit import AttentionBlock, initialise
from lit_attn.schema.errors import ConfigError

Device = torch.device | str | None

Shape = tuple[int, int, int]

FeedForward = Callable[[int, int, Device], nn.Module]


def build(
    model: ImageViTConfig, image_shape: Shape, num_classes: int, device: Device = None
) -> VisionTransformer:
    """The network that `model` describes, initialised as timm does; raises as `assemble`."""
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
    """A network without initial values, whose own images are of `image_shape` (C, H, W).

    Another size is met by resampling the positions at each call, so that they go on learning.
    `feed_forward(d, width, device)` makes a block's FFN; without a class token the mean over
    patches is classified. Raises ConfigError where the patches do not tile the image.
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
            # timm takes the width as a ratio of d, which cannot say every integer.
            block.mlp = feed_forward(model.dim, model.ffn.width, device)
    return vit


def perceptron(dim: int, width: int, device: Device) -> Mlp:
    """Linear, GELU, Linear."""
    return Mlp(dim, width, device=device)


def require_tiles(patch: int, height: int, width: int) -> None:
    """ConfigError where patches of `patch` pixels do not tile an image of `height` x `width`."""
    if height % patch or width % patch:
        raise ConfigError(
            f"model.patch: patches of {patch} do not tile images of {height} x {width}"
        )


def fix_positions(vit: VisionTransformer) -> None:
    """Make the positions the fixed sines and cosines of Beyer et al. 2022; nothing trains there."""
    assert not vit.has_class_token
    positions = vit.get_parameter("pos_embed")
    grid = build_sincos2d_pos_embed(
        list(vit.patch_embed.grid_size), vit.embed_dim, device=positions.device
    )
    with torch.no_grad():
        positions.copy_(grid)
    positions.requires_grad_(False)
