"""The attention layer: one module for every combination of parts, in its fast form.

Shapes: B batch, n tokens, d width, H heads, D head width (d / H where it is not given).

It takes timm's constructor arguments and uses timm's parameter names (`qkv`, `proj`), so it stands
wherever timm's own attention does: `timm.create_model("vit_tiny_patch16_224",
attn_layer=attn_layer("belief2"))`, pretrained weights included.
"""

import math
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lit_attn.attention.residual import RESIDUALS
from lit_attn.attention.rotary import Rotary, rotate
from lit_attn.attention.similarity import SIMILARITIES
from lit_attn.attention.spec import AttentionSpec, Split, preset


class Attention(nn.Module):
    """Multi-head self-attention with the parts that `spec` names.

    Subclasses made by `attn_layer` fix `spec` and `local_self_attention`.
    """

    spec: ClassVar[AttentionSpec] = AttentionSpec()
    local_self_attention: ClassVar[bool] = False

    def __init__(
        self,
        dim: int,
        num_heads: int = 8,
        attn_head_dim: int | None = None,
        qkv_bias: bool = False,
        qk_norm: bool = False,
        scale_norm: bool = False,
        proj_bias: bool = True,
        attn_drop: float = 0.0,
        proj_drop: float = 0.0,
        norm_layer: type[nn.Module] | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Raise ValueError where the heads do not divide `dim` or an argument has no meaning here.

        `attn_head_dim` is D, d / H where it is not given. `qk_norm` normalises each head's q and k
        with `norm_layer(D)`; z stays as it is.
        """
        super().__init__()
        if attn_head_dim is None and dim % num_heads:
            raise ValueError(f"{num_heads} heads do not divide a width of {dim}")
        if scale_norm:
            raise ValueError("scale_norm has no meaning where the residual part is a choice")
        if qk_norm and norm_layer is None:
            raise ValueError("qk_norm needs a norm_layer")
        like: dict[str, Any] = {"device": device, "dtype": dtype}
        self.num_heads = num_heads
        self.head_dim = attn_head_dim or dim // num_heads
        inner = num_heads * self.head_dim
        self.attn_drop = attn_drop
        self.qkv = nn.Linear(dim, 3 * inner, bias=qkv_bias, **like)
        self.q_norm = norm_layer(self.head_dim, **like) if norm_layer and qk_norm else nn.Identity()
        self.k_norm = norm_layer(self.head_dim, **like) if norm_layer and qk_norm else nn.Identity()
        self.similarity = SIMILARITIES[type(self.spec.similarity)](self.spec.similarity)
        self.z = nn.Linear(dim, inner, bias=False, **like) if self.spec.zz else None
        self.temperature = None
        if self.local_self_attention:
            # The logarithm of the scale is learned, one scalar a layer, starting at 1 / sqrt(D).
            start = -0.5 * math.log(self.head_dim)
            self.temperature = nn.Parameter(torch.full((), start, device=device, dtype=dtype))
        self.proj = nn.Linear(inner, dim, bias=proj_bias, **like)
        self.residual = RESIDUALS[type(self.spec.residual)](self.spec.residual, self.proj)
        self.proj_drop = nn.Dropout(proj_drop)
        self.register_load_state_dict_pre_hook(_complete_standard_weights)
        self.copy_projection()

    def forward(
        self,
        x: Tensor,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
        rotary: Rotary | None = None,
    ) -> Tensor:
        """(B, n, d) -> (B, n, d).

        `attn_mask` is what scaled-dot-product attention takes, broadcastable to (B, H, n, n):
        boolean (True may attend) or additive. `rotary` turns every head's q and k by position.
        """
        q, k, v = self.qkv(x).unflatten(-1, (3, self.num_heads, self.head_dim)).unbind(-3)
        q, k = self.q_norm(q).transpose(1, 2), self.k_norm(k).transpose(1, 2)
        if rotary is not None:
            q, k = rotate(q, rotary), rotate(k, rotary)
        q_features, k_features = self.similarity(q, k)
        if self.z is not None:
            z = self.z(x).unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2)
            q_features = torch.cat([q_features, z], -1)
            k_features = torch.cat([k_features, z], -1)
        scale = self.head_dim**-0.5
        if self.temperature is not None:
            q_features, scale = q_features * self.temperature.exp(), 1.0
            attn_mask = _without_self(x.shape[1], x.device, attn_mask)
        heads = weighted_sum(
            q_features, k_features, v.transpose(1, 2), attn_mask, is_causal, self._drop(), scale
        )
        return self.proj_drop(self.residual(heads.transpose(1, 2), v, self.proj))

    def copy_projection(self) -> None:
        """Start W_p as a copy of W where the split part says `init: copy` (Proposition 1).

        Its bias starts at zero: W's own is added already. Called again by whoever initialises a
        model's weights after building it.
        """
        if self.copies_projection:
            self.residual.load_state_dict(self._copied(self.proj.state_dict()))

    @property
    def copies_projection(self) -> bool:
        """Whether the split part starts W_p as W."""
        return isinstance(self.spec.residual, Split) and self.spec.residual.init == "copy"

    def _copied(self, projection: dict[str, Tensor]) -> dict[str, Tensor]:
        """The split part's parameters that make W_p compute what W does, W's bias left out."""
        copied = {"projected.weight": projection["weight"]}
        if "projected.bias" in self.residual.state_dict():
            copied["projected.bias"] = torch.zeros_like(projection["bias"])
        return copied

    def _drop(self) -> float:
        return self.attn_drop if self.training else 0.0


def attn_layer(
    chosen: AttentionSpec | str, *, local_self_attention: bool = False
) -> type[Attention]:
    """The class for timm's `attn_layer=`: `chosen` is a preset's name or a whole specification.

    With `local_self_attention` the temperature is learned and no token attends to itself (LSA, Lee
    et al. 2021, eq. 4-5). Raises ValueError for a name that is not a preset.
    """
    resolved = preset(chosen) if isinstance(chosen, str) else chosen
    fixed = {"spec": resolved, "local_self_attention": local_self_attention}
    return type("Attention", (Attention,), fixed)


def weighted_sum(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None,
    is_causal: bool,
    dropout: float,
    scale: float,
) -> Tensor:
    """softmax(scale q k^T) v for q, k of (B, H, n, E) and v of (B, H, n, D), D <= E.

    Values narrower than the features are padded with zeros: flash attention wants one width.
    """
    width = v.shape[-1]
    v = F.pad(v, (0, q.shape[-1] - width))
    out = F.scaled_dot_product_attention(
        q, k, v, attn_mask, dropout_p=dropout, is_causal=is_causal, scale=scale
    )
    return out[..., :width]


def _without_self(n: int, device: torch.device, attn_mask: Tensor | None) -> Tensor:
    """`attn_mask` with the diagonal forbidden."""
    others = ~torch.eye(n, dtype=torch.bool, device=device)
    if attn_mask is None:
        return others
    if attn_mask.dtype == torch.bool:
        return attn_mask & others
    return attn_mask.masked_fill(~others, float("-inf"))


def _complete_standard_weights(
    module: nn.Module, state: dict[str, Tensor], prefix: str, *_: object
) -> None:
    """Let the weights of a standard layer load into any layer.

    Where `state` has W but nothing of what this layer has beyond the standard one, what is missing
    keeps its initial value, or becomes a copy of W where the split part says so.
    """
    assert isinstance(module, Attention)
    own = {name for name, _ in module.named_parameters()}
    extra = {name for name in own if name.split(".")[0] in ("z", "residual", "similarity")}
    if prefix + "proj.weight" not in state or any(prefix + name in state for name in extra):
        return
    for name in extra:
        state[prefix + name] = module.get_parameter(name).detach()
    if module.copies_projection:
        standard = {name: state[prefix + "proj." + name] for name in module.proj.state_dict()}
        copied = module._copied(standard)
        state.update({f"{prefix}residual.{name}": value for name, value in copied.items()})
