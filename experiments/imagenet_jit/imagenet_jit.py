"""Plug-in for JiT (Li & He 2025, arXiv:2511.13720) as a classifier: Belief2, section 4.2.

The study `belief2-imagenet` names this file under `parts`.

Source: github.com/LTH14/JiT (docs/setups.md, section 6).

Shapes: B batch, n patches, d width, D head width, w FFN width, b bottleneck.
Images (B, C, H, W) -> logits (B, classes).
"""

import math
from functools import partial

import torch
from pydantic import Field, PositiveInt
from timm.layers import SwiGLU
from torch import Tensor, nn
from torch.nn import functional as F

from lit_attn.attention.layer import Attention, attn_layer
from lit_attn.attention.network import number_layers
from lit_attn.attention.rotary import Rotary, rotary
from lit_attn.attention.spec import AttentionSpec
from lit_attn.models.base import FFN, ffn_field, require_division
from lit_attn.models.layers import Device, HeadNorm, sincos_positions
from lit_attn.models.seeded_draws import draw_parameters
from lit_attn.models.vit import Shape, Transformer
from lit_attn.schema.base import consistency_check

EPS = 1e-6


class Block(nn.Module):
    """x + gate * attention(modulated norm(x)), then the same with SwiGLU; (B, n, d) -> (B, n, d).

    adaLN-zero (Peebles & Xie 2023): shift, scale and gate of each branch are a Linear of the
    condition. The Linear starts at zero, so the block starts as the identity.
    """

    def __init__(self, model: "JiTConfig", spec: AttentionSpec, device: Device) -> None:
        super().__init__()
        self.norm1 = nn.RMSNorm(model.dim, eps=EPS, device=device)
        build = partial(attn_layer(spec), model.dim, model.heads, device=device)
        self.attn: Attention = build(qkv_bias=True, qk_norm=True, norm_layer=HeadNorm)
        self.norm2 = self.ffn = None
        if model.ffn is not None:
            self.norm2 = nn.RMSNorm(model.dim, eps=EPS, device=device)
            self.ffn = SwiGLU(model.dim, model.ffn.width, device=device)
        branches = 1 if self.ffn is None else 2
        self.modulation = nn.Linear(model.dim, 3 * branches * model.dim, device=device)

    def forward(self, x: Tensor, condition: Tensor, turned: Rotary) -> Tensor:
        """Return the block's output for x (B, n, d) and `condition` (B, d)."""
        modulation = self.modulation(F.silu(condition)).unsqueeze(1)
        shift, scale, gate, *rest = modulation.split(x.shape[-1], dim=-1)
        x = x + gate * self.attn(self.norm1(x) * (1 + scale) + shift, rotary=turned)
        if self.ffn is None or self.norm2 is None:
            return x
        shift, scale, gate = rest
        return x + gate * self.ffn(self.norm2(x) * (1 + scale) + shift)


class JiTClassifier(nn.Module):
    """Bottleneck patch embedding, fixed sine and cosine positions, blocks, mean over patches.

    The condition of every block is the mean over the embedded patches (the paper names none).
    """

    cos: Tensor
    sin: Tensor
    positions: Tensor

    def __init__(
        self, model: "JiTConfig", image_shape: Shape, num_classes: int, device: Device = None
    ) -> None:
        """Build the network that `model` describes; initialise it except on the meta device."""
        super().__init__()
        channels, height, width = image_shape
        rows, columns = height // model.patch, width // model.patch
        size = (channels, model.bottleneck, model.patch, model.patch)
        self.patches = nn.Conv2d(*size, bias=False, device=device)
        self.embed = nn.Conv2d(model.bottleneck, model.dim, 1, device=device)
        specs = model.attention.by_layer(model.depth)
        self.blocks = nn.ModuleList(Block(model, spec, device) for spec in specs)
        number_layers(self)
        self.norm = nn.RMSNorm(model.dim, eps=EPS, device=device)
        self.head = nn.Linear(model.dim, num_classes, device=device)
        where = self.head.weight.device
        positions = sincos_positions(rows, columns, model.dim, model.dim // 4, where)
        self.register_buffer("positions", positions, persistent=False)
        turned = axial(rows, columns, model.dim // model.heads, device)
        self.register_buffer("cos", turned.cos, persistent=False)
        self.register_buffer("sin", turned.sin, persistent=False)
        draw_parameters(self, lambda: initialise(self))

    def forward(self, images: Tensor) -> Tensor:
        x = self.embed(self.patches(images)).flatten(2).transpose(1, 2)
        condition = x.mean(dim=1)
        x = x + self.positions
        for block in self.blocks:
            x = block(x, condition, Rotary(self.cos, self.sin))
        return self.head(self.norm(x).mean(dim=1))


def axial(rows: int, columns: int, head_dim: int, device: Device = None) -> Rotary:
    """Return rotary angles: half of a head turns by the patch's row, the other half by its column.

    The published code pairs neighbouring coordinates, this one pairs the halves. Both compute the
    same functions; the rows of the weights come in another order.
    """
    by_row = rotary(torch.arange(rows, device=device), head_dim // 2)
    by_column = rotary(torch.arange(columns, device=device), head_dim // 2)

    def join(row: Tensor, column: Tensor) -> Tensor:
        """Return the angles of all patches (n, D): n = rows x columns."""
        return torch.cat([row.repeat_interleave(columns, dim=0), column.repeat(rows, 1)], dim=-1)

    return Rotary(join(by_row.cos, by_column.cos), join(by_row.sin, by_column.sin))


def initialise(network: JiTClassifier) -> None:
    """Draw every matrix Xavier-uniform; biases, modulations and the head are zero.

    The gate and the input of SwiGLU count as one matrix, as in the released code.
    """
    for module in network.modules():
        if isinstance(module, nn.Linear | nn.Conv2d):
            nn.init.xavier_uniform_(module.weight.flatten(1))
            if module.bias is not None:
                nn.init.zeros_(module.bias)
    for block in network.blocks:
        assert isinstance(block, Block)
        nn.init.zeros_(block.modulation.weight)
        if block.ffn is not None:
            for part in (block.ffn.fc1_g, block.ffn.fc1_x):
                hidden, dim = part.weight.shape
                gain = math.sqrt((hidden + dim) / (2 * hidden + dim))
                nn.init.xavier_uniform_(part.weight, gain)
    nn.init.zeros_(network.head.weight)


class JiTConfig(Transformer, kind="jit"):
    """JiT-B/16 (Li & He 2025) as a classifier: SwiGLU, RMSNorm, QK-norm, 2-D RoPE, adaLN-zero.

    Belief2 (section 4.2) states neither the condition of the adaLN nor the pooling. Here the
    condition is the mean of the embedded patches, and the last layer is averaged over patches.
    `ffn.width` is the hidden width of SwiGLU.
    """

    runs_foreign_code = False  # Tests try it out, so a dry run need not.
    activations = ("swiglu",)
    has_one_size = True

    builder = (JiTClassifier, "shape", "outputs")

    dim: PositiveInt = Field(768, description="width of the residual stream")
    heads: PositiveInt = Field(12, description="attention heads of a block")
    ffn: FFN | None = ffn_field(2048, "swiglu")
    bottleneck: PositiveInt = Field(
        128, description="width between the maps of the patch embedding"
    )

    @consistency_check
    def _heads_rotate_by_row_and_column(self) -> None:
        if self.dim % 4:
            raise ValueError(f"dim: {self.dim} is not a multiple of 4, which each head needs")
        noun = "heads of a width that is a multiple of 4"
        require_division("heads", noun, self.heads, self.dim // 4, f"dim {self.dim}")
