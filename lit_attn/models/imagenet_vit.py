"""Vision transformers for ImageNet: timm's VisionTransformer with our attention, any image size.

Sources of the three shapes that the experiments use:
- DeiT-S/16 (Touvron et al. 2021, arXiv:2012.12877): github.com/facebookresearch/deit
- ViT-S/16 (Beyer et al. 2022, arXiv:2205.01580): github.com/google-research/big_vision
- LocalViT "hs" (Li et al. 2021, arXiv:2104.05707), for BeliefFormer's ImageNet study:
  github.com/BorealisAI/efficient-vit-training

Shapes: images (B, C, H, W) -> logits (B, classes); d width, n patches, w FFN width.
"""

import math
from collections.abc import Callable
from functools import partial

import torch
from timm.layers import GELUTanh, Mlp, lecun_normal_
from timm.models.vision_transformer import Block, VisionTransformer
from torch import Tensor, nn
from torch.nn import functional as F

from lit_attn.attention.layer import attn_layer
from lit_attn.config.models.vision import ImageViTConfig, LocalViTConfig, Transformer
from lit_attn.models.layers import Device, sincos_positions
from lit_attn.models.seeded_draws import draw_parameters
from lit_attn.models.vit import AttentionBlock, Shape, initialise, separate_matrices

FeedForward = Callable[[int, int, Device], nn.Module]


def build(
    model: ImageViTConfig, image_shape: Shape, num_classes: int, device: Device = None
) -> VisionTransformer:
    """Build the network that `model` describes; initialise it except on the meta device."""
    vit = assemble(
        model,
        image_shape,
        num_classes,
        partial(perceptron, activation=model.ffn.activation if model.ffn else "gelu"),
        norm_eps=model.norm_eps,
        class_token=model.pool == "token",
        device=device,
    )
    fill = initialise_as_flax if model.init == "flax" else partial(initialise, scheme=model.init)
    draw_parameters(vit, lambda: fill(vit))
    if model.positions == "sincos":
        fix_positions(vit)
    return vit


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
    model: LocalViTConfig, image_shape: Shape, num_classes: int, device: Device = None
) -> VisionTransformer:
    """Build the LocalViT that `model` describes; initialise it except on the meta device."""
    vit = assemble(model, image_shape, num_classes, LocalFFN, qkv_bias=False, device=device)
    draw_parameters(vit, lambda: initialise_local(vit))
    if model.positions == "fixed":
        vit.get_parameter("pos_embed").requires_grad_(False)
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
    patches is classified.
    """
    vit = VisionTransformer(
        img_size=image_shape[1:],
        patch_size=model.patch,
        in_chans=image_shape[0],
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


def initialise_local(vit: VisionTransformer) -> None:
    """Draw every matrix (q, k and v apart), the class token and the positions Xavier-normal.

    Biases, convolutions and norms keep PyTorch's defaults.
    """
    for name in ("cls_token", "pos_embed"):
        nn.init.xavier_normal_(vit.get_parameter(name))
    for name, module in vit.named_modules():
        is_composer = "composers" in name.split(".")
        if isinstance(module, nn.Linear | nn.Conv2d | nn.LayerNorm) and not is_composer:
            module.reset_parameters()
    for _, _, matrix in separate_matrices(vit):
        nn.init.xavier_normal_(matrix)


def fix_positions(vit: VisionTransformer) -> None:
    """Set the positions to the fixed sines and cosines of Beyer et al. 2022, untrained.

    Coordinate k of the w / 4 frequencies is 10,000^(-k / (w / 4 - 1)), for columns and rows alike.
    """
    assert not vit.has_class_token
    positions = vit.get_parameter("pos_embed")
    rows, columns = vit.patch_embed.grid_size
    last = max(1, vit.embed_dim // 4 - 1)
    with torch.no_grad():
        positions.copy_(sincos_positions(rows, columns, vit.embed_dim, last))
    positions.requires_grad_(False)
