"""Vision transformers: timm's VisionTransformer with our attention, for small and for large images.

Sources of the shapes that the experiments use:
- ViT with shifted patch tokenisation (SPT) and locality self-attention (LSA), Lee et al. 2021,
  arXiv:2112.13492: github.com/aanna0701/SPT_LSA_ViT
- ViT-small: github.com/kentaroy47/vision-transformers-cifar10
- DeiT-S/16 (Touvron et al. 2021, arXiv:2012.12877): github.com/facebookresearch/deit
- ViT-S/16 (Beyer et al. 2022, arXiv:2205.01580): github.com/google-research/big_vision

Shapes: images (B, C, H, W) -> logits (B, classes); d width, n patches, w FFN width, P side of a
patch in pixels.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from pydantic import Field, PositiveFloat, PositiveInt
from torch import Tensor, nn
from torch.nn import functional as F

from lit_attn.attention.layer import Attention, attn_layer
from lit_attn.attention.network import number_layers
from lit_attn.models.base import (
    FFN,
    FFN_MEANING,
    PackageModel,
    ffn_field,
    require_division,
    require_heads,
    require_one_size,
    require_tiling,
)
from lit_attn.models.layers import Device, HeadNorm, sincos_positions
from lit_attn.models.mup import WidthScaled
from lit_attn.models.seeded_draws import draw_parameters, outside_composers
from lit_attn.schema.base import Share, consistency_check
from lit_attn.signatures import ImageLabels, ImageTargets, Signature

if TYPE_CHECKING:
    from timm.models.vision_transformer import Block, VisionTransformer

Shape = tuple[int, int, int]

# Options of timm for images of any size: the positions are resampled at each call.
RESIZABLE: dict[str, Any] = {"fc_norm": False, "dynamic_img_size": True, "dynamic_img_pad": True}


class Transformer(PackageModel):
    """Base of the models of images; the defaults are those of ViT-S/16."""

    has_one_size: ClassVar[bool] = False
    """True for a model whose positions are for images of one size."""
    takes: ClassVar[tuple[type[Signature], ...]] = (ImageLabels, ImageTargets)

    dim: PositiveInt = Field(384, description="width of the residual stream")
    depth: PositiveInt = Field(12, description="number of blocks")
    heads: PositiveInt = Field(6, description="attention heads of a block")
    patch: PositiveInt = Field(16, description="side of a patch in pixels")
    ffn: FFN | None = ffn_field(1536)
    drop_path: Share = Field(0.0, description="drop-path rate of the last layer; linear from 0")

    @consistency_check
    def _heads_divide(self) -> None:
        """Refuse a number of heads that the width or the attention cannot have."""
        require_division("heads", "heads", self.heads, self.dim, f"dim {self.dim}")
        require_heads(self.attention, self.heads, self.depth)

    def check(self, signature: Any) -> None:
        """Raise ValueError if the patches do not tile images of every size."""
        if self.has_one_size:
            require_one_size(self.kind, signature)
        final_size = signature.shape[1:]
        training_sizes = [(side, side) for side in getattr(signature, "training_sizes", ())]
        require_tiling(self.patch, [final_size, *training_sizes])


class NormedTransformer(Transformer):
    """Base of the vision transformers whose heads can have norms of q and k."""

    qk_norm: bool = Field(False, description="RMSNorm with weight on each head's q and k")
    qk_norm_eps: PositiveFloat = Field(1e-6, description="epsilon of the norms of `qk_norm`")

    @consistency_check
    def _norms_have_an_effect(self) -> None:
        """Refuse the epsilon of norms that the heads do not have."""
        if not self.qk_norm and self.qk_norm_eps != 1e-6:
            raise ValueError("qk_norm_eps: needs `qk_norm: true`")


class AttentionBlock(nn.Module):
    """timm's transformer block without the FFN and its norm."""

    def __init__(self, block: "Block") -> None:
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
    model: "ViTConfig", image_shape: Shape, num_classes: int, device: Device = None
) -> "VisionTransformer":
    """Build the network that `model` describes; initialise it except on the meta device."""
    from timm.layers import DropPath, Mlp
    from timm.models.vision_transformer import PatchEmbed

    vit = assemble(
        model,
        image_shape,
        num_classes,
        lambda dim, width, device: Mlp(dim, width, drop=model.dropout, device=device),
        device,
        qkv_bias=model.qkv_bias,
        pos_drop_rate=model.embed_dropout,
        proj_drop_rate=model.dropout,
        norm_layer=nn.LayerNorm,
        embed_layer=ShiftedPatchEmbed if model.patchify == "shifted" else PatchEmbed,
        local_self_attention=model.local_self_attention,
        head_norm=choose_head_norm(model),
    )
    if model.drop_path_schedule == "constant" and model.drop_path > 0:
        for block in vit.blocks:
            block.drop_path1 = block.drop_path2 = DropPath(model.drop_path)
    draw_parameters(vit, lambda: initialise(vit, model.init))
    return vit


def build_image_vit(
    model: "ImageViTConfig", image_shape: Shape, num_classes: int, device: Device = None
) -> "VisionTransformer":
    """Build the network that `model` describes; initialise it except on the meta device."""
    from timm.layers import GELUTanh, Mlp

    activation: type[nn.Module] = nn.GELU
    if model.ffn is not None and model.ffn.activation == "gelu-tanh":
        activation = GELUTanh
    vit = assemble(
        model,
        image_shape,
        num_classes,
        lambda dim, width, device: Mlp(dim, width, act_layer=activation, device=device),
        device,
        **RESIZABLE,
        norm_layer=partial(nn.LayerNorm, eps=model.norm_eps),
        class_token=model.pool == "token",
        global_pool="token" if model.pool == "token" else "avg",
        head_norm=choose_head_norm(model),
    )
    fill: Callable[[VisionTransformer], None] = partial(initialise, scheme=model.init)
    if model.init == "flax":
        fill = initialise_as_flax
    draw_parameters(vit, lambda: fill(vit))
    if model.positions == "sincos":
        _fix_positions(vit)
    return vit


def choose_head_norm(model: NormedTransformer) -> Callable[..., nn.Module] | None:
    """Return the class of the norms of each head's q and k, or None without `qk_norm`."""
    return partial(HeadNorm, eps=model.qk_norm_eps) if model.qk_norm else None


def _fix_positions(vit: "VisionTransformer") -> None:
    """Set the positions to sines and cosines that are not trained."""
    rows, columns = vit.patch_embed.grid_size
    # Coordinate k of the d / 4 frequencies is 10,000^(-k / (d / 4 - 1)) (Beyer et al. 2022).
    divisor = max(1, vit.embed_dim // 4 - 1)
    positions = vit.get_parameter("pos_embed").requires_grad_(False)
    positions.copy_(sincos_positions(rows, columns, vit.embed_dim, divisor))


def assemble(
    model: Transformer,
    image_shape: Shape,
    num_classes: int,
    feed_forward: Callable[[int, int, Device], nn.Module],
    device: Device,
    network: "type[VisionTransformer] | None" = None,
    *,
    local_self_attention: bool = False,
    qkv_bias: bool = True,
    proj_drop_rate: float = 0.0,
    head_norm: Callable[..., nn.Module] | None = None,
    **options: Any,
) -> "VisionTransformer":
    """Build a `network` without initial values for images of `image_shape` (C, H, W).

    `feed_forward(d, width, device)` builds a block's FFN, and `head_norm(D)` the norm of each
    head's q or k, None without such norms; `options` are timm's. The default `network` is timm's
    VisionTransformer.
    """
    from timm.models.vision_transformer import Block, VisionTransformer

    layers = [
        attn_layer(spec, local_self_attention=local_self_attention)
        for spec in model.attention.by_layer(model.depth)
    ]
    vit = (network or VisionTransformer)(
        img_size=image_shape[1:],
        patch_size=model.patch,
        in_chans=image_shape[0],
        num_classes=num_classes,
        embed_dim=model.dim,
        depth=model.depth,
        num_heads=model.heads,
        drop_path_rate=model.drop_path,
        device=device,
        attn_layer=layers[0],
        qkv_bias=qkv_bias,
        proj_drop_rate=proj_drop_rate,
        **options,
    )
    for index, block in enumerate(vit.blocks):
        assert isinstance(block, Block)
        if head_norm is not None or layers[index] is not layers[0]:
            # timm builds all blocks with one class of layers, and their norms of q and k with the
            # class of the norms of blocks.
            block.attn = layers[index](
                model.dim,
                model.heads,
                qkv_bias=qkv_bias,
                qk_norm=head_norm is not None,
                proj_drop=proj_drop_rate,
                norm_layer=head_norm,
                device=device,
            )
        if model.ffn is None:
            vit.blocks[index] = AttentionBlock(block)
        else:
            # timm takes the width as a ratio of d, which cannot express every integer.
            block.mlp = feed_forward(model.dim, model.ffn.width, device)
    number_layers(vit)
    return vit


def initialise(vit: "VisionTransformer", scheme: str) -> None:
    """Fill every parameter as `scheme` says: "timm", "xavier" (SPT_LSA_ViT) or "torch" (ViT-small).

    xavier: every matrix Xavier-normal, with q, k and v as one matrix; biases zero. torch: PyTorch's
    defaults. Both draw the class token and the position embedding from N(0, 1).
    """
    if scheme == "timm":
        vit.init_weights("", needs_reset=True)
        return
    for name in ("cls_token", "pos_embed"):
        nn.init.normal_(vit.get_parameter(name))
    for module in outside_composers(vit).values():
        if isinstance(module, nn.Linear | nn.Conv2d | nn.LayerNorm):
            module.reset_parameters()
        if scheme == "xavier" and isinstance(module, nn.Linear | nn.Conv2d):
            # A patch embedding is a matrix on flattened patches, whatever its storage.
            nn.init.xavier_normal_(module.weight.flatten(1))
            if module.bias is not None:
                nn.init.zeros_(module.bias)


def separate_matrices(vit: "VisionTransformer") -> Iterator[tuple[str, nn.Linear, Tensor]]:
    """Yield (name, layer, matrix) of all Linears, with q, k and v of a layer as three matrices."""
    for name, module in outside_composers(vit).items():
        if not isinstance(module, nn.Linear):
            continue
        attention = vit.get_submodule(name.rpartition(".")[0])
        if isinstance(attention, Attention) and module is attention.qkv:
            for matrix in module.weight.split(attention.projected):
                yield name, module, matrix
        else:
            yield name, module, module.weight


def initialise_as_flax(vit: "VisionTransformer") -> None:
    """Fill every parameter as big_vision's flax code does.

    Every matrix (q, k and v apart) is Xavier-uniform, the patch embedding LeCun-normal, the head
    zero. Biases of the FFN are N(0, 1e-6), other biases and the class token zero, and learned
    positions N(0, 1/d).
    """
    from timm.layers import lecun_normal_

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
            is_of_ffn = ".mlp." in name
            nn.init.normal_(module.bias, std=1e-6 if is_of_ffn else 0.0)


class ImageViTConfig(NormedTransformer, kind="image-vit"):
    """timm's VisionTransformer for images of any size, with positions resampled to each size.

    The defaults are DeiT-S/16 (Touvron et al. 2021). With `pool: average`, which drops the class
    token, `positions: sincos` (fixed), `init: flax` and `ffn.activation: gelu-tanh` it is the
    ViT-S/16 of Beyer et al. 2022.
    """

    activations = ("gelu", "gelu-tanh")
    builder = (build_image_vit, "shape", "outputs")
    pool: Literal["token", "average"] = Field(
        "token", description="input of the classifier: class token, or average of the patches"
    )
    positions: Literal["learned", "sincos"] = Field(
        "learned", description="position embeddings: learned, or fixed sines and cosines"
    )
    init: Literal["timm", "flax"] = Field(
        "timm",
        description="initial values; timm: matrices N(0, 0.02), truncated; flax: as big_vision, "
        "Xavier-uniform matrices and a head of zeros",
    )
    norm_eps: PositiveFloat = Field(1e-6, description="epsilon of the LayerNorms")


class ViTConfig(WidthScaled, NormedTransformer, kind="vit"):
    """Pre-norm vision transformer with a class token, for images of one size."""

    has_one_size = True
    builder = (build, "shape", "outputs")
    dim: PositiveInt = Field(description="width of the residual stream")
    depth: PositiveInt = Field(description="number of blocks")
    heads: PositiveInt = Field(description="attention heads of a block")
    patch: PositiveInt = Field(description="side of a patch in pixels")
    ffn: FFN | None = Field(description=FFN_MEANING)
    qkv_bias: bool = Field(False, description="biases of the projections to q, k and v")
    patchify: Literal["plain", "shifted"] = Field(
        "plain", description="shifted: shifted patch tokenisation (SPT), four one-pixel shifts"
    )
    local_self_attention: bool = Field(
        False, description="LSA: learned temperature per layer, no token attends to itself"
    )
    dropout: Share = Field(0.0, description="dropout rate after W and inside the FFN")
    embed_dropout: Share = Field(0.0, description="dropout rate of the embeddings")
    drop_path: Share = Field(
        0.0, description="drop-path rate of the last layer (linear) or of all layers (constant)"
    )
    drop_path_schedule: Literal["linear", "constant"] = Field(
        "linear", description="drop-path rate over the layers: linear from 0, or constant"
    )
    init: Literal["xavier", "torch", "timm"] = Field(
        "timm", description="initial values of the Linears; timm: normal, deviation 0.02"
    )

    def find_mup_problem(self) -> str:
        if self.init != "timm":
            return f"needs `init: timm`, because the values of `{self.init}` depend on the width"
        return ""

    @consistency_check
    def _fits_local_self_attention(self) -> None:
        """Refuse local self-attention of a similarity without logits."""
        if not self.local_self_attention:
            return
        for spec in self.attention.mechanisms:
            if spec.mixer is not None:
                raise ValueError("local_self_attention: a layer of `kind: module` has no logits")
            if not spec.similarity.has_logits:
                raise ValueError(
                    f"local_self_attention: {spec.similarity.kind} keys never form the logits that"
                    " it would mask"
                )
