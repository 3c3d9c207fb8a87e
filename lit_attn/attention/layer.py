"""The attention layer: one module for every combination of parts, in its fast form.

Shapes: B batch, n tokens, d width, H heads, D head width (d / H where it is not given).

It takes timm's constructor arguments and uses timm's parameter names (`qkv`, `proj`), so it stands
wherever timm's own attention does: `timm.create_model("vit_tiny_patch16_224",
attn_layer=attn_layer("belief2"))`, pretrained weights included.
"""

import copyreg
import functools
import math
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lit_attn.attention import chunked, fused
from lit_attn.attention.cache import Cache, KeyValues, RunningSums
from lit_attn.attention.choose import attention_spec
from lit_attn.attention.compose import Maps, all_maps, make_composers
from lit_attn.attention.linear import Linear
from lit_attn.attention.masks import Masks
from lit_attn.attention.residual import RESIDUALS
from lit_attn.attention.rotary import Rotary, rotate
from lit_attn.attention.similarity import SIMILARITIES, Dot, Shape, as_multiplied
from lit_attn.attention.spec import AttentionSpec, SplitConfig

# Children that hold what a layer has beyond the standard one.
EXTRA = ("composers", "residual", "similarity", "z")


class Look(NamedTuple):
    """What a layer computes on its way: `weights` (B, H, n, n), None where they are never formed,
    and H_m and v_m of every head, `heads` and `values` (B, n, H, D).
    """

    weights: Tensor | None
    heads: Tensor
    values: Tensor


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
        self.key_heads = self.spec.kv_heads or num_heads
        if num_heads % self.key_heads:
            raise ValueError(f"{self.key_heads} key heads do not divide {num_heads} heads")
        self.head_dim = attn_head_dim or dim // num_heads
        inner = num_heads * self.head_dim
        shape = Shape(dim, num_heads, self.key_heads, self.head_dim, qkv_bias, like)
        self.attn_drop = attn_drop
        self.qkv = nn.Linear(dim, inner + 2 * self.key_heads * self.head_dim, bias=qkv_bias, **like)
        self.q_norm = norm_layer(self.head_dim, **like) if norm_layer and qk_norm else nn.Identity()
        self.k_norm = norm_layer(self.head_dim, **like) if norm_layer and qk_norm else nn.Identity()
        self.composers = make_composers(self.spec.compose, shape)
        similarity, residual = self.spec.similarity, self.spec.residual
        self.similarity: Dot = _form(SIMILARITIES, "SIMILARITIES", similarity)(
            similarity, shape, "pre" in self.composers
        )
        self.z = nn.Linear(dim, inner, bias=False, **like) if self.spec.zz else None
        self.temperature = None
        if self.local_self_attention:
            # The logarithm of the scale is learned, one scalar a layer, starting at 1 / sqrt(D).
            start = -0.5 * math.log(self.head_dim)
            self.temperature = nn.Parameter(torch.full((), start, device=device, dtype=dtype))
        self.proj = nn.Linear(inner, dim, bias=proj_bias, **like)
        self.residual = _form(RESIDUALS, "RESIDUALS", residual)(residual, self.proj)
        self.proj_drop = nn.Dropout(proj_drop)
        self.register_load_state_dict_pre_hook(_complete_standard_weights)
        self.copy_projection()

    def forward(
        self,
        x: Tensor,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
        rotary: Rotary | None = None,
        cache: Cache | None = None,
    ) -> Tensor:
        """(B, n, d) -> (B, n, d).

        `attn_mask` is what scaled-dot-product attention takes, broadcastable to (B, H, n, n):
        boolean (True may attend) or additive. `rotary` turns every head's q and k by position.

        With a `cache` (from `new_cache`), x is what follows the tokens already in it, and is added
        to it. Raises ValueError where that has no meaning: with a mask, not causal, in training.
        """
        masks = Masks(attn_mask, is_causal, self.spec.window, self.local_self_attention)
        if cache is not None:
            if not is_causal or attn_mask is not None or self.training:
                raise ValueError("a cache is for causal attention without a mask, after eval()")
            masks = masks._replace(offset=cache.kept)
        q, keys, v = self.project(x, rotary)
        own = self._shared(v, 2)
        values = own.transpose(1, 2)
        if isinstance(self.similarity, Linear):
            assert cache is None or isinstance(cache, RunningSums)
            keys = self._shared(keys, 1)
            heads = self.similarity.attend(q, keys, values, masks, cache)
        else:
            assert cache is None or isinstance(cache, KeyValues)
            if cache is not None:
                keys = cache.extend("keys", keys)
                values = self._shared(cache.extend("values", v.transpose(1, 2)), 1)
            heads = self._softmax(x, q, self._shared(keys, 1), values, masks, cache)
        if cache is not None:
            cache.advance(x.shape[1])
        return self.proj_drop(self.residual(heads.transpose(1, 2), own, self.proj))

    def look(
        self,
        x: Tensor,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
        rotary: Rotary | None = None,
    ) -> Look:
        """What `forward` computes of the same arguments before the residual part; dropout is off.

        For those who want to see it (lit_attn.training.diagnostics): O(H n^2) memory at every n.
        """
        masks = Masks(attn_mask, is_causal, self.spec.window, self.local_self_attention)
        q, keys, v = self.project(x, rotary)
        own, keys = self._shared(v, 2), self._shared(keys, 1)
        values = own.transpose(1, 2)
        if isinstance(self.similarity, Linear):
            heads = self.similarity.attend(q, keys, values, masks)
            return Look(None, heads.transpose(1, 2), own)
        q, k, scale = self._features(q, keys, None)
        if self.z is not None:
            z = self._split_z(x)
            q, k = self._with_z(q, k, z, z)
        maps, all_of = self._maps(x, None), slice(0, x.shape[1])
        weights = chunked.weights(
            q,
            k,
            masks,
            self.similarity.hard,
            self.composers,
            maps,
            scale,
            all_of,
            all_of,
            values.dtype,
        )
        return Look(weights, (weights @ values).transpose(1, 2), own)

    def new_cache(self) -> Cache:
        """An empty cache, for decoding one batch of sequences."""
        if isinstance(self.similarity, Linear):
            return RunningSums()
        return KeyValues(self.spec.window)

    def project(self, x: Tensor, rotary: Rotary | None) -> tuple[Tensor, Tensor, Tensor]:
        """q (B, H, n, D), all keys (B, H', M, n, D) and v (B, n, H', D) of H' key heads."""
        parts = self.qkv(x).unflatten(-1, (-1, self.head_dim))
        q, k, v = parts.split([self.num_heads, self.key_heads, self.key_heads], dim=-2)
        q = self.q_norm(q).transpose(1, 2)
        keys = self.k_norm(self.similarity.keys(x, k)).permute(0, 3, 2, 1, 4)
        if rotary is not None:
            q, keys = rotate(q, rotary), rotate(keys, rotary)
        return q, keys, v

    def _shared(self, x: Tensor, axis: int) -> Tensor:
        """x of key heads, repeated for the heads that share them."""
        groups = self.num_heads // self.key_heads
        return x.repeat_interleave(groups, axis) if groups > 1 else x

    def _softmax(
        self,
        x: Tensor,
        q: Tensor,
        keys: Tensor,
        v: Tensor,
        masks: Masks,
        cache: KeyValues | None,
    ) -> Tensor:
        """The heads' sums (B, H, n, D): by flash attention where no logits have to be formed."""
        q, k, scale = self._features(q, keys, cache)
        self.similarity.observe(q, k, scale, masks)
        z = all_z = None if self.z is None else self._split_z(x)
        if z is not None and cache is not None:
            all_z = cache.extend("z", z)
        dropout = self.attn_drop if self.training else 0.0
        # Dropout takes a pair of tokens out with all of its keys. On a CPU, weights of few tokens
        # are cheaper formed, and added up over the keys, than computed twice.
        few = q.device.type == "cpu" and q.shape[-2] <= chunked.WHOLE_UP_TO
        mixed = k.shape[2] > 1 and (few or dropout > 0)
        formed = len(self.composers) > 0 or self.similarity.hard or mixed
        several = z is not None or k.shape[2] > 1
        # FLOPs are counted on the meta device, which knows those of torch's own calls.
        if several and not formed and masks.only_causal and not dropout and not q.is_meta:
            q, k, v = as_multiplied(q), as_multiplied(k), as_multiplied(v)
            z = None if z is None else as_multiplied(z)
            return fused.attend(q, k, z, v, masks.is_causal, scale)
        if z is not None and all_z is not None:
            q, k = self._with_z(q, k, z, all_z)
        if formed:
            maps = self._maps(x, cache)
            hard = self.similarity.hard
            return chunked.attend(q, k, v, masks, hard, self.composers, maps, scale, dropout)
        return one_call(q, k, v, masks, scale, dropout)

    def _features(
        self, q: Tensor, keys: Tensor, cache: KeyValues | None
    ) -> tuple[Tensor, Tensor, float]:
        """q' (B, H, n, E), k' (B, H, M, n, E) and what their products are scaled by: the logits."""
        q, k = self.similarity.features(q, keys, 0 if cache is None else cache.first)
        if self.temperature is not None:
            return q * self.temperature.exp(), k, 1.0
        return q, k, self.head_dim**-0.5

    def _split_z(self, x: Tensor) -> Tensor:
        """z (B, H, n, D)."""
        assert self.z is not None
        return self.z(x).unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2)

    def _with_z(self, q: Tensor, k: Tensor, z: Tensor, all_z: Tensor) -> tuple[Tensor, Tensor]:
        """[q'|z] and [k'|z], the keys' z of what is cached too."""
        if self.temperature is not None:
            z = z * self.temperature.exp()
        all_z = all_z.unsqueeze(2).expand(*k.shape[:-1], -1)
        return torch.cat([q, z], -1), torch.cat([k, all_z], -1)

    def _maps(self, x: Tensor, cache: KeyValues | None) -> dict[str, dict[str, Maps]]:
        """The composers' maps: of x as queries and, as keys, of what is cached too."""
        maps = all_maps(self.composers, x)
        if cache is not None:
            for place, sides in maps.items():
                if "key" in sides:
                    sides["key"] = cache.extend_maps(place, sides["key"])
        return maps

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
        return isinstance(self.spec.residual, SplitConfig) and self.spec.residual.init == "copy"

    def _copied(self, projection: dict[str, Tensor]) -> dict[str, Tensor]:
        """The split part's parameters that make W_p compute what W does, W's bias left out."""
        copied = {"projected.weight": projection["weight"]}
        if "projected.bias" in self.residual.state_dict():
            copied["projected.bias"] = torch.zeros_like(projection["bias"])
        return copied


def attn_layer(
    chosen: AttentionSpec | str | dict[str, Any], *, local_self_attention: bool = False
) -> type[Attention]:
    """The class for timm's `attn_layer=`; the same class for the same choice.

    `chosen` is what `attention:` of a YAML may be, a preset's name or a mapping as
    `{"preset": "belief2", "residual": {"activation": "silu"}}`, or a whole specification. With
    `local_self_attention` the temperature is learned and no token attends to itself (LSA, Lee et
    al. 2021, eq. 4-5). Raises ConfigError, a ValueError, for what is not a choice.
    """
    return _chosen_class(attention_spec(chosen, "attn_layer"), local_self_attention)


class _Chosen(type):
    """The type of the classes that `attn_layer` makes, which no module holds by a name."""


@functools.cache
def _chosen_class(chosen: AttentionSpec, local_self_attention: bool) -> type[Attention]:
    fixed = {"spec": chosen, "local_self_attention": local_self_attention}
    made: type = _Chosen("Attention", (Attention,), fixed)
    return made


def _pickled(made: type[Attention]) -> str | tuple[Any, ...]:
    """By what it was made of; a subclass that a user has written, by its name."""
    chosen = made.spec, made.local_self_attention
    return (_chosen_class, chosen) if _chosen_class(*chosen) is made else made.__qualname__


copyreg.pickle(_Chosen, _pickled)  # type: ignore[arg-type]


def _form(table: dict[Any, Any], name: str, part: Any) -> Any:
    """A part's fast form; ValueError where whoever wrote the part registered none."""
    if type(part) not in table:
        raise ValueError(f"{part.kind}: {name} has no fast form of {type(part).__name__}")
    return table[type(part)]


def one_call(q: Tensor, k: Tensor, v: Tensor, masks: Masks, scale: float, dropout: float) -> Tensor:
    """softmax(scale q k^T) v over all M n keys: q (B, H, n, E), k (B, H, M, n, E), v (B, H, n, D).

    There are fewer queries where the keys of earlier tokens are cached. Everything is padded with
    zeros to one width, a multiple of 8: flash attention wants both.
    """
    (queries, wide), (m, n), width = q.shape[-2:], k.shape[2:4], v.shape[-1]
    # To one new token nothing that is cached is hidden.
    alone = masks.offset > 0 and queries == 1 and not masks.without_self
    # Torch takes a mask or `is_causal`, not both.
    both = masks.is_causal and masks.attn_mask is not None
    apart = masks.window is None and not masks.without_self and not masks.offset and not both
    plain = m == 1 and apart
    mask = masks.attn_mask if plain or alone else masks.whole(n, q.device)
    if mask is not None and m > 1:
        mask = mask.expand(*mask.shape[:-1], n).repeat(*(1,) * (mask.ndim - 1), m)
    full = wide if wide == width else wide + -wide % 8
    out = F.scaled_dot_product_attention(
        _padded(q, full),
        _padded(k, full).flatten(2, 3),
        _padded(v, full).repeat(1, 1, m, 1) if m > 1 else _padded(v, full),
        mask,
        dropout_p=dropout,
        is_causal=masks.is_causal and plain,
        scale=scale,
    )
    return out[..., :width]


def _padded(x: Tensor, width: int) -> Tensor:
    """x with zeros up to `width`, itself where it is that wide: `pad` would copy it, at length."""
    return x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1]))


def _complete_standard_weights(
    module: nn.Module, state: dict[str, Tensor], prefix: str, *_: object
) -> None:
    """Let the weights of a standard layer load into any layer.

    Where `state` has W but nothing of what this layer has beyond the standard one, what is missing
    keeps its initial value, or becomes a copy of W where the split part says so.
    """
    assert isinstance(module, Attention)
    own = module.state_dict()
    extra = {name for name in own if name.split(".")[0] in EXTRA}
    if prefix + "proj.weight" not in state or any(prefix + name in state for name in extra):
        return
    for name in extra:
        state[prefix + name] = own[name]
    if module.copies_projection:
        standard = {name: state[prefix + "proj." + name] for name in module.proj.state_dict()}
        copied = module._copied(standard)
        state.update({f"{prefix}residual.{name}": value for name, value in copied.items()})
