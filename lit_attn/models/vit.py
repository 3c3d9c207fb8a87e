"""The vision transformers of the CIFAR studies: timm's VisionTransformer with our attention.

Shapes: images (B, C, H, W) -> logits (B, classes).
"""

import torch
from timm.layers import DropPath, Mlp
from timm.models.vision_transformer import Block, PatchEmbed, VisionTransformer
from torch import Tensor, nn

from lit_attn.attention.layer import Attention, attn_layer
from lit_attn.config.models.vit import ViTConfig
from lit_attn.models.patches import ShiftedPatchEmbed
from lit_attn.models.seeded_draws import by_name
from lit_attn.schema.errors import ConfigError


class AttentionBlock(nn.Module):
    """What is left of timm's block without its FFN and that FFN's norm."""

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


def build(
    model: ViTConfig,
    image_shape: tuple[int, int, int],
    num_classes: int,
    device: torch.device | str | None = None,
) -> VisionTransformer:
    """The network that `model` describes, initialised; ConfigError where patches do not tile."""
    channels, height, width = image_shape
    if height % model.patch or width % model.patch:
        raise ConfigError(
            f"model.patch: patches of {model.patch} do not tile images of {height} x {width}"
        )
    vit = VisionTransformer(
        img_size=(height, width),
        patch_size=model.patch,
        in_chans=channels,
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
    if vit.head.weight.device.type != "meta":
        with by_name(vit):
            initialise(vit, model.init)
    return vit


def initialise(vit: VisionTransformer, scheme: str) -> None:
    """Fill every parameter as `scheme` says: the published set-ups' "xavier" or "torch", or timm's.

    xavier: every matrix Xavier-normal, q, k and v as one matrix; biases zero. torch: PyTorch's own
    defaults. Both draw the class token and the position embedding from N(0, 1). What composes heads
    keeps the initialisation that it was published with.
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
    for module in vit.modules():
        if isinstance(module, Attention):
            module.copy_projection()


def _fitted(block: nn.Module, model: ViTConfig, device: torch.device | str | None) -> nn.Module:
    """Timm's block with the exact FFN width (or none) and, by choice, constant stochastic depth."""
    assert isinstance(block, Block)
    if model.drop_path_schedule == "constant" and model.drop_path > 0:
        block.drop_path1 = DropPath(model.drop_path)
        block.drop_path2 = DropPath(model.drop_path)
    if model.ffn is None:
        return AttentionBlock(block)
    # Block takes the width as a ratio of d, which cannot say every integer.
    block.mlp = Mlp(model.dim, model.ffn.width, drop=model.dropout, device=device)
    return block
