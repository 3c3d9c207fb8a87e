"""LocalViT "hs" (Li et al. 2021, arXiv:2104.05707), for BeliefFormer's ImageNet study.

It follows github.com/BorealisAI/efficient-vit-training.

Shapes: B batch, n patches in a square grid of g x g, d width, w FFN width.
"""

import math

from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn
from torch.nn import functional as F

from lit_attn.attention.layer import Attention
from lit_attn.config.models.imagenet import LocalViTConfig
from lit_attn.models.imagenet_vit import assemble
from lit_attn.models.layers import Device
from lit_attn.models.seeded_draws import by_name
from lit_attn.models.vit import Shape, separate_matrices


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


def build(
    model: LocalViTConfig, image_shape: Shape, num_classes: int, device: Device = None
) -> VisionTransformer:
    """Build the network that `model` describes; initialise it except on the meta device.

    Raises ConfigError if the patches do not tile the image.
    """
    vit = assemble(model, image_shape, num_classes, LocalFFN, qkv_bias=False, device=device)
    if not vit.get_parameter("pos_embed").is_meta:
        with by_name(vit):
            initialise(vit)
    if model.positions == "fixed":
        vit.get_parameter("pos_embed").requires_grad_(False)
    return vit


def initialise(vit: VisionTransformer) -> None:
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
    for module in vit.modules():
        if isinstance(module, Attention):
            module.copy_projection()
