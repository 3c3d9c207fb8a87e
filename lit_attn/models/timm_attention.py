"""Adapters of timm's attention modules for `replace_attention`.

Shapes: B batch, n tokens, d width, H heads, D head width.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lit_attn.attention.compose import Composer
from lit_attn.attention.layer import Attention
from lit_attn.attention.parts import StaticConfig
from lit_attn.attention.rotary import Rotary
from lit_attn.attention.spec import AttentionSpec
from lit_attn.models import replace
from lit_attn.models.replace import Adapter, NormedLinear, Projections, QueryValueLinear


def read(original: Any, **changes: Any) -> Projections:
    """Return the projections under timm's usual names, with `changes`."""
    if getattr(original, "gate", None) is not None:
        raise ValueError("its output is gated")
    proj, norm = original.proj, getattr(original, "norm", None)
    if isinstance(proj, nn.Linear) and norm is not None and not isinstance(norm, nn.Identity):
        proj = NormedLinear(norm, proj)
    qkv = changes.pop("qkv", None) or original.qkv
    if getattr(original, "q_bias", None) is not None:
        qkv = QueryValueLinear(qkv, original.q_bias, original.v_bias)
    fields = {"qkv": qkv, "proj": proj, "scale": getattr(original, "scale", None)}
    fields["heads"] = getattr(original, "num_heads", None)
    for name in ("attn_drop", "proj_drop"):
        fields[name] = getattr(getattr(original, name, None), "p", 0.0)
    for name in ("q_norm", "k_norm"):
        if not isinstance(norm := getattr(original, name, None), nn.Identity | None):
            fields[name] = norm
    return Projections(**fields | changes)


def plain(original: nn.Module, spec: AttentionSpec) -> Attention:
    """Return the layer itself: it has the parameter names and the `forward` of timm's module."""
    return replace.build_layer(read(original), spec)


def mask_units(original: Any, spec: AttentionSpec) -> "MaskUnits | None":
    """Return Hiera's layer, or None where it pools its queries, which then are no tokens."""
    return None if original.q_stride > 1 else MaskUnits(original, spec)


class TimmAdapter(Adapter):
    """Adapter of a module with timm's usual names."""

    def read(self, original: Any) -> Projections:
        return read(original)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


class Rotated(TimmAdapter):
    """ViTs with rotary embeddings: EVA02, DINOv3, PE; fused or separate projections."""

    moved = (*Adapter.moved, "q_proj", "k_proj", "v_proj", "q_bias", "k_bias", "v_bias", "norm")

    def read(self, original: Any) -> Projections:
        key_heads = getattr(original, "num_kv_heads", original.num_heads)
        qkv = original.qkv
        if qkv is None:
            qkv = replace.join(original.q_proj, original.k_proj, original.v_proj)
        source = read(original, qkv=qkv, key_heads=key_heads)
        if not getattr(original, "rotate_half", False):
            halve(source, original.num_heads + key_heads)
        return source

    def forward(
        self,
        x: Tensor,
        rope: Tensor | None = None,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Tensor:
        rotary = None
        if rope is not None:
            half = slice(rope.shape[-1] // 4) if self.rotate_half else slice(None, None, 2)
            sin, cos = (part[..., half] for part in rope.chunk(2, -1))
            # Class and register tokens are not rotated.
            before = (0, 0, self.num_prefix_tokens, 0)
            rotary = Rotary(F.pad(cos, before, value=1.0), F.pad(sin, before))
        return self.layer(x, attn_mask, is_causal, rotary)


def halve(source: Projections, heads: int) -> None:
    """Reorder the rows of `heads` q and k in place: even coordinates first, then odd ones.

    timm rotates neighbouring coordinates, our layer the halves of a head. Products are equal.
    """
    rows = torch.arange(source.qkv.out_features)
    width = len(rows) // (source.heads + 2 * (source.key_heads or source.heads))
    turned = rows[: heads * width].view(heads, -1, 2).transpose(1, 2).flatten()
    rows = torch.cat([turned, rows[heads * width :]])
    for module in (source.qkv, source.q_norm, source.k_norm):
        for name, parameter in () if module is None else module.named_parameters():
            if name != "v_bias":
                parameter.copy_(parameter[rows[: len(parameter)].to(parameter.device)])


class Beit(TimmAdapter):
    """BEiT and data2vec: relative position bias of the layer, or one that layers share."""

    moved = (*Adapter.moved, "q_bias", "k_bias", "v_bias")

    def forward(self, x: Tensor, shared_rel_pos_bias: Tensor | None = None) -> Tensor:
        bias = shared_rel_pos_bias
        if self.relative_position_bias_table is not None:
            bias = self._get_rel_pos_bias() + (0 if bias is None else bias)
        return self.layer(x, bias)


class RelPos(TimmAdapter):
    """Relative position bias of a module `rel_pos`, or one that layers share."""

    def forward(self, x: Tensor, shared_rel_pos: Tensor | None = None) -> Tensor:
        """Return the output for tokens in a grid or a row, (B, ..., d)."""
        rel_pos = self.rel_pos
        bias = shared_rel_pos if rel_pos is None else rel_pos.get_bias()
        return self.layer(x.flatten(1, -2), bias).view_as(x)


class ChannelsLast(RelPos):
    """MaxViT and CoAtNet with channels last, (B, h, w, d)."""

    def read(self, original: Any) -> Projections:
        qkv, proj = (as_linear(module) for module in (original.qkv, original.proj))
        qkv = replace.by_head(qkv, original.num_heads) if original.head_first else qkv
        return read(original, qkv=qkv, proj=proj)


class Maps(ChannelsLast):
    """MaxViT and CoAtNet with channels first, (B, d, h, w)."""

    def forward(self, x: Tensor, shared_rel_pos: Tensor | None = None) -> Tensor:
        return super().forward(x.permute(0, 2, 3, 1), shared_rel_pos).permute(0, 3, 1, 2)


def as_linear(module: nn.Linear | nn.Conv2d) -> nn.Linear:
    """Return `module`, or a convolution of 1 x 1 pixels as a Linear."""
    if isinstance(module, nn.Linear):
        return module
    return replace.linear(module.weight.flatten(1), module.bias)


class Swin(TimmAdapter):
    """Swin: relative position bias, and a mask where windows are shifted."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return the output for windows (windows B, n, d) and a mask (windows, n, n)."""
        bias = self._get_rel_pos_bias()
        if mask is not None:
            bias = (bias + mask.unsqueeze(1)).repeat(len(x) // len(mask), 1, 1, 1)
        return self.layer(x, bias)


class ClassToken(TimmAdapter):
    """CaiT's class attention: the output of the first token alone."""

    adds_to_logits = False
    moved = (*Adapter.moved, "q", "k", "v")

    def read(self, original: Any) -> Projections:
        return read(original, qkv=replace.join(original.q, original.k, original.v))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)[:, :1]


class TalkingHeads(TimmAdapter):
    """CaiT's talking heads: the model's own maps mix the heads before and after the softmax."""

    def __init__(self, original: Any, spec: AttentionSpec) -> None:
        if spec.compose.places():
            raise ValueError(f"compose: '{spec.compose.kind}' would mix heads that it mixes itself")
        mixed = spec.model_copy(update={"compose": StaticConfig()})
        super().__init__(original, mixed)
        maps = {"pre": original.proj_l, "post": original.proj_w}
        self.layer.composers = nn.ModuleDict({p: HeadMap(m, self.layer) for p, m in maps.items()})
        del original.proj_l, original.proj_w


class HeadMap(Composer):
    """A map of the heads with bias, (B, H, c, m) -> the same shape."""

    def __init__(self, heads: nn.Linear, layer: Attention) -> None:
        nn.Module.__init__(self)
        self.part = layer.spec.compose
        self.heads = heads

    def forward(self, a: Tensor, query: None, key: None) -> Tensor:
        return self.heads(a.movedim(1, -1)).movedim(-1, 1)


class MaskUnits(TimmAdapter):
    """Hiera: attention within mask units, or over all tokens."""

    adds_to_logits = False

    def read(self, original: Any) -> Projections:
        return read(original, heads=original.heads)

    def forward(self, x: Tensor) -> Tensor:
        units = x.shape[1] // self.window_size if self.use_mask_unit_attn else 1
        tokens = x.unflatten(1, (-1, units)).transpose(1, 2)
        out: Tensor = self.layer(tokens.flatten(0, 1)).view_as(tokens)
        return out.transpose(1, 2).flatten(1, 2)
