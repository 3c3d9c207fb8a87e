"""Adapters of timm's attention modules with position biases: BEiT, TinyViT, MaxViT, Swin.

Shapes: B batch, n tokens, d width, H heads, D head width.
"""

import math
from typing import Any

from torch import Tensor, nn

from lit_attn.replace.projections import Projections, by_head
from lit_attn.replace.timm_layers import TimmAdapter, as_linear, read

UNIT_NORM_EPS = 1e-24
"""Square of the 1e-12 with which F.normalize divides."""


class Beit(TimmAdapter):
    """BEiT and data2vec: relative position bias of the layer, or one that layers share."""

    keeps_tokens = True

    known = (
        *TimmAdapter.known,
        "num_relative_distance",
        "qkv_bias_separate",
        "relative_position_bias_table",
        "relative_position_index",
    )

    def forward(self, x: Tensor, shared_rel_pos_bias: Tensor | None = None) -> Tensor:
        bias = shared_rel_pos_bias
        if self.relative_position_bias_table is not None:
            bias = self._get_rel_pos_bias()
            if shared_rel_pos_bias is not None:
                bias = bias + shared_rel_pos_bias
        return self.attend(x, bias)


class TinyViT(TimmAdapter):
    """TinyViT: a norm before the projections, and a bias for each distance."""

    known = (
        *TimmAdapter.known,
        "attention_bias_cache",
        "attention_bias_idxs",
        "attention_biases",
        "attn_ratio",
        "key_dim",
        "out_dim",
        "resolution",
        "val_dim",
    )

    def read(self, original: Any) -> Projections:
        qkv = by_head(original.qkv, original.num_heads)
        return read(original, qkv=qkv, proj=original.proj)

    def forward(self, x: Tensor) -> Tensor:
        return self.attend(self.norm(x), self.get_attention_biases(x.device))


class RelPos(TimmAdapter):
    """Relative position bias of a module `rel_pos`, or one that layers share."""

    keeps_tokens = True

    known = (*TimmAdapter.known, "rel_pos")

    def forward(self, x: Tensor, shared_rel_pos: Tensor | None = None) -> Tensor:
        bias = shared_rel_pos if self.rel_pos is None else self.rel_pos.get_bias()
        return self.attend(x, bias)


class ChannelsLast(RelPos):
    """MaxViT and CoAtNet with channels last, (B, h, w, d)."""

    keeps_tokens = False

    known = (*RelPos.known, "dim_head", "head_first")

    def read(self, original: Any) -> Projections:
        qkv = as_linear(original.qkv)
        if original.head_first:
            qkv = by_head(qkv, original.num_heads)
        return read(original, qkv=qkv)


class Maps(ChannelsLast):
    """MaxViT and CoAtNet with channels first, (B, d, h, w)."""

    def forward(self, x: Tensor, shared_rel_pos: Tensor | None = None) -> Tensor:
        out = super().forward(x.permute(0, 2, 3, 1), shared_rel_pos)
        return out.permute(0, 3, 1, 2)


class Swin(TimmAdapter):
    """Swin: relative position bias, and a mask where windows are shifted."""

    known = (
        *TimmAdapter.known,
        "relative_position_bias_table",
        "relative_position_index",
        "window_area",
    )

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return the output for windows (windows B, n, d) and a mask (windows, n, n)."""
        bias = self._get_rel_pos_bias()
        if mask is not None:
            # The windows of one image after those of another.
            images = len(x) // len(mask)
            bias = (bias + mask.unsqueeze(1)).repeat(images, 1, 1, 1)
        return self.attend(x, bias)


class SwinV2(Swin):
    """Swin V2: scaled cosines of queries and keys, and a position bias of a network."""

    moved = (*TimmAdapter.moved, "logit_scale")

    known = (
        *Swin.known,
        "cpb_mlp",
        "pretrained_window_size",
        "qkv_bias_separate",
        "relative_coords_table",
    )

    def read(self, original: Any) -> Projections:
        width = original.qkv.in_features // original.num_heads
        q_norm = ScaledCosine(width, original.logit_scale)
        k_norm = nn.RMSNorm(width, UNIT_NORM_EPS, elementwise_affine=False)
        return read(original, q_norm=q_norm, k_norm=k_norm)

    def _get_rel_pos_bias(self) -> Tensor:
        table = self.cpb_mlp(self.relative_coords_table).flatten(0, -2)
        logits = table[self.relative_position_index].movedim(-1, 0)
        return 16 * logits.sigmoid()


class ScaledCosine(nn.RMSNorm):
    """Queries (B, n, H, D) whose logits with keys of length sqrt(D) are scaled cosines."""

    def __init__(self, width: int, logit_scale: nn.Parameter) -> None:
        super().__init__(width, UNIT_NORM_EPS, elementwise_affine=False)
        self.logit_scale = logit_scale

    def forward(self, x: Tensor) -> Tensor:
        scale = self.logit_scale.view(-1, 1).clamp(max=math.log(100)).exp()
        return super().forward(x) * scale / x.shape[-1] ** 0.5


class SwinV2CR(SwinV2):
    """Swin V2-CR: the original network computes the position bias, with dropout in training."""

    known = (
        *SwinV2.known,
        "in_features",
        "meta_mlp",
        "relative_coordinates_log",
        "sequential_attn",
    )

    def _get_rel_pos_bias(self) -> Tensor:
        return self._relative_positional_encodings()
