"""Adapters of timm's attention modules for `replace_attention`.

Shapes: B batch, n tokens, d width, H heads, D head width.
"""

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lit_attn.attention.compose import Composer, StaticConfig
from lit_attn.attention.layer import Attention
from lit_attn.attention.rotary import Rotary
from lit_attn.attention.spec import AttentionSpec
from lit_attn.replace.adapter import (
    Adapter,
    build_layer,
    check_options,
    check_projections,
    copy_marks,
)
from lit_attn.replace.projections import NormedLinear, Projections, QueryValueLinear, join, linear
from lit_attn.replace.rotary_layouts import pair_halves

QKV_NAMES = (
    ("qkv",),
    ("q", "k", "v"),
    ("q", "kv"),
    ("qk", "v"),
    ("wq", "wk", "wv"),
    ("q_proj", "k_proj", "v_proj"),
)
"""Names of the projections to q, k and v in timm's modules."""


def read(original: Any, **changes: Any) -> Projections:
    """Return the projections under timm's usual names, with `changes`."""
    if getattr(original, "gate", None) is not None:
        raise ValueError("its output is gated")
    fields: dict[str, Any] = {
        "heads": getattr(original, "num_heads", None),
        "qkv": read_qkv(original),
        "proj": read_proj(original),
        "scale": getattr(original, "scale", None),
        "q_norm": getattr(original, "q_norm", None),
        "k_norm": getattr(original, "k_norm", None),
        "attn_drop": read_rate(original, "attn_drop"),
        "proj_drop": read_rate(original, "proj_drop"),
    }
    fields |= changes
    return Projections(**fields)


def read_qkv(original: Any) -> nn.Linear:
    """Return the projection to q, k and v of a module of timm."""
    parts: list[Any]
    for names in QKV_NAMES:
        parts = [getattr(original, name, None) for name in names]
        if None not in parts:
            break
    else:
        raise ValueError("it has no projections to q, k and v under timm's usual names")
    qkv = join(*(as_linear(part) for part in parts))
    if getattr(original, "q_bias", None) is not None:
        qkv = QueryValueLinear(qkv, original.q_bias, original.v_bias)
    return qkv


def read_proj(original: Any) -> nn.Linear:
    """Return the output projection of a module of timm, with the norm before it if it has one."""
    proj = as_linear(original.proj)
    norm = getattr(original, "norm", None)
    if norm is None or isinstance(norm, nn.Identity):
        return proj
    return NormedLinear(norm, proj)


def read_rate(original: Any, name: str) -> float:
    """Return the rate of the dropout `name` of a module, or 0 if it has none."""
    rate: float = getattr(getattr(original, name, None), "p", 0.0)
    return rate


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
    copy_marks(layer, original, names)
    return layer


def mask_units(original: Any, spec: AttentionSpec) -> "MaskUnits | None":
    """Return Hiera's layer, or None where it pools its queries, which then are no tokens."""
    return None if original.q_stride > 1 else MaskUnits(original, spec)


class TimmAdapter(Adapter):
    """Adapter of a module with timm's usual names."""

    moved = (
        *Adapter.moved,
        "q",
        "k",
        "v",
        "kv",
        "qk",
        "wq",
        "wk",
        "wv",
        "q_proj",
        "k_proj",
        "v_proj",
        "q_bias",
        "k_bias",
        "v_bias",
    )
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

    keeps_tokens = True

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
        return pair_halves(source)

    def forward(
        self,
        x: Tensor,
        rope: Tensor | None = None,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Tensor:
        rotary = None if rope is None else self.read_rotary(rope)
        return self.layer(x, attn_mask, is_causal, rotary)

    def read_rotary(self, rope: Tensor) -> Rotary:
        """Return the rotation of all tokens for timm's `rope`, (n, 2 D): sines, then cosines.

        timm has each angle twice. Class and register tokens, which have no angles, are not rotated.
        """
        sin, cos = rope.chunk(2, -1)
        if self.rotate_half:
            # The angles of a head's first half are those of its second half.
            width = rope.shape[-1] // 4
            sin, cos = sin[..., :width], cos[..., :width]
        else:
            sin, cos = sin[..., ::2], cos[..., ::2]
        prefix = (0, 0, self.num_prefix_tokens, 0)
        return Rotary(F.pad(cos, prefix, value=1.0), F.pad(sin, prefix))


class ClassToken(Tokens):
    """CaiT's and CrossViT's class attention: the output of the first token alone."""

    def forward(self, x: Tensor) -> Tensor:
        return self.attend(x)[:, :1]


class TalkingHeads(Tokens):
    """CaiT's talking heads: the model's own maps mix the heads before and after the softmax."""

    keeps_tokens = True
    adds_to_logits = True
    moved = (*Tokens.moved, "proj_l", "proj_w")

    def __init__(self, original: Any, spec: AttentionSpec) -> None:
        if spec.compose.places():
            raise ValueError(f"compose: '{spec.compose.kind}' would mix heads that it mixes itself")
        mixing_spec = spec.model_copy(update={"compose": StaticConfig()})
        super().__init__(original, mixing_spec)
        self.layer.composers = nn.ModuleDict(
            {
                "pre": HeadMap(original.proj_l, self.layer),
                "post": HeadMap(original.proj_w, self.layer),
            }
        )


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
        # Neighbouring tokens belong to different units.
        by_unit = x.unflatten(1, (-1, units)).transpose(1, 2)
        out = self.attend(by_unit.flatten(0, 1)).view_as(by_unit)
        return out.transpose(1, 2).flatten(1, 2)


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
            raise ValueError(
                f"its keys belong to pooled tokens: {problem.partition(';')[0]}; name it in `skip` "
                "to keep it"
            )
        super().__init__(original, spec)

    def read(self, original: Any) -> Projections:
        # Its norm is that of the pooled tokens.
        return read(original, proj=original.proj)

    def forward(self, x: Tensor, size: tuple[int, int]) -> Tensor:
        if self.sr is None:
            return self.layer(x)
        grid = x.transpose(1, 2).unflatten(2, size)
        pool = getattr(self, "pool", None)
        if pool is not None:
            grid = pool(grid)
        memory = self.norm(self.sr(grid).flatten(2).transpose(1, 2))
        activation = getattr(self, "act", None)
        if activation is not None:
            memory = activation(memory)
        return self.layer(x, memory=memory)


class Windows(TimmAdapter):
    """Twins: attention within windows of a grid, (B, h w, d), padded to a number of windows."""

    adds_to_logits = False

    known = (*TimmAdapter.known, "ws")

    def forward(self, x: Tensor, size: tuple[int, int]) -> Tensor:
        height, width = size
        side = self.ws
        right, bottom = -width % side, -height % side
        grid = F.pad(x.unflatten(1, size), (0, 0, 0, right, 0, bottom))
        # (B, rows of windows, columns of windows, side, side, d)
        windows = grid.unflatten(2, (-1, side)).unflatten(1, (-1, side)).transpose(2, 3)
        attended = self.attend(windows.flatten(0, 2)).view_as(windows)
        grid = attended.transpose(2, 3).flatten(3, 4).flatten(1, 2)
        return grid[:, :height, :width].flatten(1, 2)


def sam2(original: Any, spec: AttentionSpec) -> Tokens | None:
    """Return the layer of SAM 2's Hiera, or None where it pools its queries."""
    return None if original.q_pool is not None else Tokens(original, spec)
