"""Adapters of timm's attention modules for `replace_attention`.

Shapes: B batch, n tokens, d width, H heads, D head width.
"""

import copy
import math
from itertools import chain
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lit_attn.attention.compose import Composer
from lit_attn.attention.layer import Attention
from lit_attn.attention.parts import StaticConfig
from lit_attn.attention.rotary import Rotary
from lit_attn.attention.spec import AttentionSpec
from lit_attn.models.adapter import (
    Adapter,
    NormedLinear,
    Projections,
    QueryValueLinear,
    build_layer,
    by_head,
    check_options,
    check_projections,
    copy_trainability,
    join,
    linear,
)

QKV = [n.split() for n in ("qkv", "q k v", "q kv", "qk v", "wq wk wv", "q_proj k_proj v_proj")]
"""Names of the projections to q, k and v in timm's modules."""

EPS = 1e-24  # Square of the 1e-12 with which F.normalize divides.


def read(original: Any, **changes: Any) -> Projections:
    """Return the projections under timm's usual names, with `changes`."""
    if getattr(original, "gate", None) is not None:
        raise ValueError("its output is gated")
    proj, norm = as_linear(original.proj), getattr(original, "norm", None)
    if norm is not None and not isinstance(norm, nn.Identity):
        proj = NormedLinear(norm, proj)
    names = next(n for n in QKV if all(getattr(original, name, None) is not None for name in n))
    qkv = join(*(as_linear(getattr(original, name)) for name in names))
    if getattr(original, "q_bias", None) is not None:
        qkv = QueryValueLinear(qkv, original.q_bias, original.v_bias)
    optional = ("scale", "q_norm", "k_norm")
    fields: dict[str, Any] = {name: getattr(original, name, None) for name in optional}
    fields |= {"heads": getattr(original, "num_heads", None), "qkv": qkv, "proj": proj}
    for name in ("attn_drop", "proj_drop"):
        fields[name] = getattr(getattr(original, name, None), "p", 0.0)
    return Projections(**fields | changes)


def as_linear(module: nn.Linear | nn.Conv2d) -> nn.Linear:
    """Return `module`, or a convolution of 1 x 1 pixels as a Linear."""
    if isinstance(module, nn.Linear):
        return module
    shape = (module.kernel_size, module.stride, module.groups)
    if shape != ((1, 1), (1, 1), 1):
        raise ValueError("a convolution of several pixels or groups is part of its projections")
    return linear(module.weight.flatten(1), module.bias)


def plain(original: nn.Module, spec: AttentionSpec) -> Attention:
    """Return the layer itself: it has the parameter names and the `forward` of timm's module."""
    names = TimmAdapter.moved
    check_options(original, {*names, *TimmAdapter.known, "attention_dim"}, "plain")
    check_projections(original, names)
    with torch.no_grad():
        layer = build_layer(read(original), spec)
    copy_trainability(layer, original, names)
    return layer


def mask_units(original: Any, spec: AttentionSpec) -> "MaskUnits | None":
    """Return Hiera's layer, or None where it pools its queries, which then are no tokens."""
    return None if original.q_stride > 1 else MaskUnits(original, spec)


class TimmAdapter(Adapter):
    """Adapter of a module with timm's usual names."""

    moved = (*Adapter.moved, *chain(*QKV), "q_bias", "k_bias", "v_bias")
    known: ClassVar[tuple[str, ...]] = (
        "attn_dim",
        "dim",
        "dim_out",
        "fused_attn",
        "gate",
        "head_dim",
        "norm",
        "num_heads",
        "scale",
        "softmax",
        "window_size",
    )

    def read(self, original: Any) -> Projections:
        return read(original)

    def attend(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return the output for tokens in a grid or a row, (B, ..., d), and a position bias."""
        return self.layer(x.flatten(1, -2), bias).view(*x.shape[:-1], -1)


class Tokens(TimmAdapter):
    """Attention of all tokens, (B, ..., d), without masks and positions."""

    adds_to_logits = False
    known = (*TimmAdapter.known, "hidden_dim")

    def forward(self, x: Tensor) -> Tensor:
        return self.attend(x)


class Pixels(Tokens):
    """Attention of all pixels, channels first, (B, d, h, w): FastViT and Visformer."""

    def forward(self, x: Tensor) -> Tensor:
        return self.attend(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class Rotated(TimmAdapter):
    """ViTs with rotary embeddings: EVA02, DINOv3, PE; fused or separate projections."""

    moved = (*TimmAdapter.moved, "norm")

    known = (
        *TimmAdapter.known,
        "kv_dim",
        "num_kv_groups",
        "num_kv_heads",
        "num_prefix_tokens",
        "qkv_bias_separate",
        "rotate_half",
    )

    def read(self, original: Any) -> Projections:
        key_heads = getattr(original, "num_kv_heads", original.num_heads)
        source = read(original, key_heads=key_heads)
        if getattr(original, "rotate_half", False):
            return source
        # timm rotates neighbouring coordinates of q and k, our layer the halves of a head.
        rows, heads = torch.arange(source.qkv.out_features), original.num_heads + key_heads
        q_and_k, v = rows.tensor_split([len(rows) * heads // (heads + key_heads)])
        rows = torch.cat([q_and_k.view(heads, -1, 2).transpose(1, 2).flatten(), v])
        # The norms are the original's modules, which must stay unchanged.
        norms = [copy.deepcopy(norm) for norm in (source.q_norm, source.k_norm)]
        for module in (source.qkv, *norms):
            for name, parameter in () if module is None else module.named_parameters():
                if name != "v_bias":
                    parameter.copy_(parameter[rows[: len(parameter)].to(parameter.device)])
        return source._replace(q_norm=norms[0], k_norm=norms[1])

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


class Beit(TimmAdapter):
    """BEiT and data2vec: relative position bias of the layer, or one that layers share."""

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
            bias = self._get_rel_pos_bias() + (0 if bias is None else bias)
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

    known = (*TimmAdapter.known, "rel_pos")

    def forward(self, x: Tensor, shared_rel_pos: Tensor | None = None) -> Tensor:
        rel_pos = self.rel_pos
        return self.attend(x, shared_rel_pos if rel_pos is None else rel_pos.get_bias())


class ChannelsLast(RelPos):
    """MaxViT and CoAtNet with channels last, (B, h, w, d)."""

    known = (*RelPos.known, "dim_head", "head_first")

    def read(self, original: Any) -> Projections:
        qkv = as_linear(original.qkv)
        qkv = by_head(qkv, original.num_heads) if original.head_first else qkv
        return read(original, qkv=qkv)


class Maps(ChannelsLast):
    """MaxViT and CoAtNet with channels first, (B, d, h, w)."""

    def forward(self, x: Tensor, shared_rel_pos: Tensor | None = None) -> Tensor:
        return super().forward(x.permute(0, 2, 3, 1), shared_rel_pos).permute(0, 3, 1, 2)


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
            bias = (bias + mask.unsqueeze(1)).repeat(len(x) // len(mask), 1, 1, 1)
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
        norms = (ScaledNorm(width, original.logit_scale), nn.RMSNorm(width, EPS, False))
        return read(original, q_norm=norms[0], k_norm=norms[1])

    def _get_rel_pos_bias(self) -> Tensor:
        table = self.cpb_mlp(self.relative_coords_table).flatten(0, -2)
        return 16 * table[self.relative_position_index].movedim(-1, 0).sigmoid()


class ScaledNorm(nn.RMSNorm):
    """Queries (B, n, H, D) whose logits with keys of length sqrt(D) are scaled cosines."""

    def __init__(self, width: int, logit_scale: nn.Parameter) -> None:
        super().__init__(width, EPS, elementwise_affine=False)
        self.logit_scale = logit_scale

    def forward(self, x: Tensor) -> Tensor:
        scale = self.logit_scale.view(-1, 1).clamp(max=math.log(100)).exp()
        return super().forward(x) * scale / x.shape[-1] ** 0.5


class ClassToken(Tokens):
    """CaiT's and CrossViT's class attention: the output of the first token alone."""

    def forward(self, x: Tensor) -> Tensor:
        return self.attend(x)[:, :1]


class TalkingHeads(Tokens):
    """CaiT's talking heads: the model's own maps mix the heads before and after the softmax."""

    adds_to_logits = True
    moved = (*Tokens.moved, "proj_l", "proj_w")

    def __init__(self, original: Any, spec: AttentionSpec) -> None:
        if spec.compose.places():
            raise ValueError(f"compose: '{spec.compose.kind}' would mix heads that it mixes itself")
        super().__init__(original, spec.model_copy(update={"compose": StaticConfig()}))
        maps = {"pre": original.proj_l, "post": original.proj_w}
        self.layer.composers = nn.ModuleDict({p: HeadMap(m, self.layer) for p, m in maps.items()})


class HeadMap(Composer):
    """A map of the heads with bias, (B, H, c, m) -> the same shape."""

    def __init__(self, heads: nn.Linear, layer: Attention) -> None:
        nn.Module.__init__(self)
        self.part = layer.spec.compose
        self.heads = heads

    def forward(self, a: Tensor, query: None, key: None) -> Tensor:
        return self.heads(a.movedim(1, -1)).movedim(-1, 1)


class MaskUnits(Tokens):
    """Hiera: attention within mask units, or over all tokens."""

    known = (*Tokens.known, "heads", "q_stride", "use_mask_unit_attn")

    def read(self, original: Any) -> Projections:
        return read(original, heads=original.heads)

    def forward(self, x: Tensor) -> Tensor:
        units = x.shape[1] // self.window_size if self.use_mask_unit_attn else 1
        tokens = x.unflatten(1, (-1, units)).transpose(1, 2)
        return self.attend(tokens.flatten(0, 1)).view_as(tokens).transpose(1, 2).flatten(1, 2)


class Blocks(Tokens):
    """NesT: attention within blocks of the image, (B, blocks, n, d)."""

    def read(self, original: Any) -> Projections:
        # The output's coordinates are the heads of each head coordinate in turn.
        weight = original.proj.weight.unflatten(1, (-1, original.num_heads)).transpose(1, 2)
        return read(original, proj=linear(weight.flatten(1), original.proj.bias))

    def forward(self, x: Tensor) -> Tensor:
        return self.attend(x.flatten(0, 1)).view_as(x)


class PooledKeys(TimmAdapter):
    """PVT v2 and Twins: cross-attention from all tokens, (B, n, d), to pooled ones."""

    adds_to_logits = False

    known = (*TimmAdapter.known, "act", "pool", "sr", "sr_ratio")

    def __init__(self, original: Any, spec: AttentionSpec) -> None:
        problem = spec.find_cross_problem() if original.sr is not None else ""
        if problem:
            raise ValueError(f"its keys belong to pooled tokens: {problem.partition(';')[0]}")
        super().__init__(original, spec)

    def read(self, original: Any) -> Projections:
        # Its norm is that of the pooled tokens.
        return read(original, proj=original.proj)

    def forward(self, x: Tensor, size: tuple[int, int]) -> Tensor:
        if self.sr is None:
            return self.layer(x)
        grid = x.transpose(1, 2).unflatten(2, size)
        pool, activation = (getattr(self, name, None) for name in ("pool", "act"))
        pooled = self.sr(grid if pool is None else pool(grid)).flatten(2).transpose(1, 2)
        memory = self.norm(pooled)
        return self.layer(x, memory=memory if activation is None else activation(memory))


class Windows(TimmAdapter):
    """Twins: attention within windows of a grid, (B, h w, d), padded to a number of windows."""

    adds_to_logits = False

    known = (*TimmAdapter.known, "ws")

    def forward(self, x: Tensor, size: tuple[int, int]) -> Tensor:
        (height, width), side = size, self.ws
        grid = F.pad(x.unflatten(1, size), (0, 0, 0, -width % side, 0, -height % side))
        windows = grid.unflatten(2, (-1, side)).unflatten(1, (-1, side)).transpose(2, 3)
        grid = self.attend(windows.flatten(0, 2)).view_as(windows).transpose(2, 3)
        return grid.flatten(3, 4).flatten(1, 2)[:, :height, :width].flatten(1, 2)


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


def sam2(original: Any, spec: AttentionSpec) -> Tokens | None:
    """Return the layer of SAM 2's Hiera, or None where it pools its queries."""
    return None if original.q_pool is not None else Tokens(original, spec)
