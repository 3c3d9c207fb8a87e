"""The attention layer: one module for every combination of parts.

It has timm's constructor arguments and timm's parameter names (`qkv`, `proj`), so it can replace
timm's attention, pretrained weights included: `timm.create_model("vit_tiny_patch16_224",
attn_layer=attn_layer("belief2"))`.

Shapes: B batch, n tokens, d width, H heads, H' key heads, M keys for every token, D head width
(d / H unless it is set).
"""

import contextlib
import copyreg
import functools
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from lit_attn.attention.cache import Cache, KeyValues
from lit_attn.attention.call import Inputs
from lit_attn.attention.layer_parts import LayerParts
from lit_attn.attention.masks import Masks, split_mask
from lit_attn.attention.mixer import TokenMixer
from lit_attn.attention.precision import without_autocast
from lit_attn.attention.projections import (
    HeadSizes,
    Projected,
    can_project_together,
    project_together,
    split_outputs,
)
from lit_attn.attention.rotary import Rotary, rotate
from lit_attn.attention.shared_keys import KeysValues, extend_cache
from lit_attn.attention.spec import AttentionSpec, attention_spec
from lit_attn.schema.errors import ConfigError


class LayerRecord(NamedTuple):
    """Intermediate values of a layer.

    `weights` is (B, H, n, n), or None if they are never formed; `heads` and `values` (B, n, H, D)
    are H_m and v_m of every head.
    """

    inputs: Inputs
    weights: Tensor | None
    heads: Tensor
    values: Tensor


class Attention(LayerParts):
    """Multi-head self-attention or cross-attention with the parts of `spec`.

    Subclasses made by `attn_layer` set `spec` and `local_self_attention`.
    """

    def forward(
        self,
        x: Tensor,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
        rotary: Rotary | None = None,
        cache: Cache | None = None,
        memory: Tensor | None = None,
        added_values: Tensor | None = None,
    ) -> Tensor:
        """Return the layer's output (B, n, d) for x (B, n, d).

        In cross-attention the keys and values come from `memory` (B, m, d). A cache then stores
        those of the memory: later calls for the same memory pass an empty one, (B, 0, d).

        `attn_mask` is a mask of scaled-dot-product attention, broadcastable to (B, H, n, n):
        boolean (True may attend) or additive (-inf and numbers up to `masks.HIDES_FROM` hide a key,
        others are added to its logit). The heads of a query that sees no key are zero. Distances
        are those of places in x (and in the cache): a token that is hidden between visible ones
        keeps its place for ALiBi, T5's buckets, windows, convolutions and blocks of keys, and
        padding on either side changes no output. A mask is not read for its order: T5's buckets are
        those of keys on both sides unless `is_causal` or a cache says otherwise. `rotary`
        rotates every head's q and k (and z if `zz: like-k`) by position. `added_values`
        (B, n, H', D) are added to v, before it is mixed with the values of the first layer.

        With a `cache` (from `new_cache`), x follows the tokens in the cache and is appended to it.
        Then `attn_mask` has a column for each of the `cache.length` stored tokens, those of a
        window alone, and for each new token, and `is_causal` can be left to it.
        Raises ValueError for a cache without both of them, or in training, and for a part that has
        no meaning in cross-attention.
        """
        is_ordered = is_causal or attn_mask is not None or memory is not None
        if cache is not None and (not is_ordered or self.training):
            raise ValueError("a cache needs `is_causal` or `attn_mask`, and evaluation mode")
        inputs = self.inputs(
            x, attn_mask, is_causal, rotary, cache, memory, added_values=added_values
        )
        if cache is None and 0 in x.shape[:2]:
            # Nothing attends; heads without elements have the shape of the queries, without the
            # further part that a latent adds to them.
            heads = inputs.q[..., : self.head_dim]
        else:
            with self._precision(x):
                sums = self.similarity.attend(inputs)
                if inputs.is_absorbed and self.latent is not None:
                    sums = self.latent.expand_sums(sums)
                heads = self._finish(sums)
        heads = self.pair(x, heads)
        values = self._values_of_heads(inputs.v)
        out = self.output(x, heads.transpose(1, 2), values, inputs.masks, cache)
        if cache is not None:
            cache.advance(inputs.memory.shape[1])
        return self.proj_drop(out)

    def _finish(self, heads: Tensor) -> Tensor:
        """Return the weighted sums (B, H, n, D) after what follows them in each head."""
        return self.filter.finish(self.normaliser.finish(heads))

    def _values_of_heads(self, v: Tensor) -> Tensor:
        """Return the values (B, n, H, D) of all heads from those of the key heads."""
        repeats = self.num_heads // self.key_heads
        return v if repeats == 1 else v.repeat_interleave(repeats, 2)

    def output(
        self, x: Tensor, heads: Tensor, values: Tensor, masks: Masks, cache: Cache | None = None
    ) -> Tensor:
        """Return the output (B, n, d) of the layer, for heads and values (B, n, H, D)."""
        out: Tensor = self.residual(x, heads, values, self.gate(x, self.proj))
        if self.convolution.is_identity:
            return out
        return self.convolution("output", out, masks.present_tokens(x.shape[1]), cache)

    def record(
        self,
        x: Tensor,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
        rotary: Rotary | None = None,
        first_values: Tensor | None = None,
        added_values: Tensor | None = None,
        keys_values: KeysValues | None = None,
    ) -> LayerRecord:
        """Return what `forward` computes before the residual part, without dropout.

        For diagnostics (lit_attn.training.diagnostics): it needs O(H n^2) memory for any n.
        `first_values` are the values (B, n, H', D) of the network's first layer, and `keys_values`
        those of the layer whose keys and values this one shares.
        """
        inputs = self.inputs(
            x,
            attn_mask,
            is_causal,
            rotary,
            first_values=first_values,
            added_values=added_values,
            keys_values=keys_values,
        )
        inputs = inputs._replace(dropout=0.0)
        values = self._values_of_heads(inputs.v)
        with self._precision(x):
            weights = self.similarity.weights(inputs)
            if weights is None:
                heads = self.similarity.attend(inputs)
            else:
                heads = weights @ inputs.shared(inputs.v, 2).transpose(1, 2)
            finished = self._finish(heads)
        if weights is not None:
            weights = self.pair(x, weights)
        heads = self.pair(x, finished).transpose(1, 2)
        return LayerRecord(inputs=inputs, weights=weights, heads=heads, values=values)

    def new_cache(self) -> Cache:
        """Return an empty cache for decoding one batch of sequences."""
        return self.similarity.new_cache(self.spec.window)

    def inputs(
        self,
        x: Tensor,
        attn_mask: Tensor | None,
        is_causal: bool,
        rotary: Rotary | None,
        cache: Cache | None = None,
        memory: Tensor | None = None,
        first_values: Tensor | None = None,
        added_values: Tensor | None = None,
        keys_values: KeysValues | None = None,
    ) -> Inputs:
        """Return everything that the similarity needs for one call of the layer.

        `first_values` replaces the values (B, n, H', D) of the network's first layer, and
        `keys_values` those of the layer whose keys and values this one shares.
        """
        offset = 0 if cache is None else cache.length
        is_cross = memory is not None
        if memory is None:
            memory = x
        else:
            self._check_cross_attention(is_causal, rotary)
            offset += memory.shape[1] - x.shape[1]
        visibility, bias = split_mask(self.pair.repeat_mask(attn_mask))
        masks = Masks(
            visibility,
            bias,
            is_causal,
            self.spec.window,
            without_self=self.local_self_attention,
            offset=offset,
            is_cross=is_cross,
        )
        all_tokens: KeysValues | None = None
        is_absorbed = False
        if self.latent is not None:
            self._check_rotary(rotary)
            q, z = self._project_queries(self.latent.compress_queries(x))
            compressed = self.latent.compress(x, rotary)
            keys, values = self.latent.expand(compressed)
            v = self._mix_values(values.transpose(1, 2), first_values)
            if cache is not None:
                is_absorbed = self.spec.similarity.is_product and self.latent.can_absorb
                all_tokens = self._read_latents(compressed, cache, is_absorbed)
        elif self.spec.shares_keys:
            q, z = self._project_queries(x)
            all_tokens = self._read_keys(keys_values, offset + x.shape[1])
            keys = all_tokens.keys[..., -x.shape[1] :, :]
            v = all_tokens.values[..., -x.shape[1] :, :].transpose(1, 2)
        else:
            q, keys, v, z = self._project(x, memory, masks, cache)
            if added_values is not None:
                v = v + added_values.to(v.dtype)
            v = self._mix_values(v, first_values)
            keys = self.k_norm(keys).permute(0, 3, 2, 1, 4)
            if rotary is not None:
                keys = rotate(keys, rotary)
            if self.shared_keys is not None:
                all_tokens = extend_cache(KeysValues(keys, v.transpose(1, 2)), cache)
                self.shared_keys.write(*all_tokens)
        q = self.q_norm(q).transpose(1, 2)
        if rotary is not None:
            q = rotate(q, rotary)
        if is_absorbed and self.latent is not None:
            q = self.latent.absorb_queries(q)
        if z is not None:
            z = self.pair.repeat(self.z_norm(z).transpose(1, 2))
            if rotary is not None and self.spec.zz == "like-k":
                z = rotate(z, rotary)
        masks = self.bias.add_to(masks, x, cache)
        call = Inputs(
            x=x,
            memory=memory,
            q=q,
            keys=keys,
            v=v,
            z=z,
            masks=masks,
            composers=self.composers,
            normaliser=self.normaliser,
            filter=self.filter,
            temperature=self.temperature,
            factor=self.scale(masks, x.shape[1], masks.offset + x.shape[1], x.device),
            dropout=self.attn_drop if self.training else 0.0,
            cache=cache,
            all_tokens=None if cache is None else all_tokens,
            is_absorbed=is_absorbed,
        )
        return call.widened() if self.in_float32 else call

    def _mix_values(self, v: Tensor, first_values: Tensor | None) -> Tensor:
        """Return the values that the layer uses; a first layer passes its own to later layers."""
        reads_first = self.spec.values.reads_first
        if self.first_values is None and not reads_first:
            # Compiled code of equal layers depends on no attribute in which the first one differs.
            return v
        if self.is_first:
            if self.first_values is not None:
                self.first_values.write(v)
            return v
        if not reads_first:
            return v
        if first_values is None:
            if self.first_values is None:
                raise RuntimeError(
                    "values: this layer has no connection to the first layer of its network; "
                    "call lit_attn.attention.network.number_layers(network) once"
                )
            first_values = self.first_values.read()
        if first_values.shape != v.shape:
            raise RuntimeError(
                f"values: this layer has values of shape {tuple(v.shape)}, and the first layer of "
                f"its network {tuple(first_values.shape)}; layers of other tokens need a network "
                "of their own in `number_layers`, or `values: own`"
            )
        return self.values(v, first_values)

    def _read_keys(self, keys_values: KeysValues | None, tokens: int) -> KeysValues:
        """Return the keys and values of the layer before, unless `keys_values` replaces them.

        Raises RuntimeError if they do not belong to the `tokens` of this call and of its cache.
        """
        if keys_values is not None:
            return keys_values
        if self.shared_keys is None:
            raise RuntimeError(
                "kv_from: this layer has no connection to the layer before it; "
                "call lit_attn.attention.network.number_layers(network) once"
            )
        shared = self.shared_keys.read()
        if shared.keys.shape[-2] != tokens:
            raise RuntimeError(
                f"kv_from: this layer attends to {tokens} tokens, and the layer before it has keys "
                f"of {shared.keys.shape[-2]}; set `kv_from: own` where the tokens of a network "
                "change"
            )
        return shared

    def _read_latents(self, compressed: Tensor, cache: Cache, is_absorbed: bool) -> KeysValues:
        """Append compressed tokens to a cache; return the latents, or keys and values, of all."""
        assert self.latent is not None
        assert isinstance(cache, KeyValues)
        tokens = cache.extend("latents", compressed)
        return self.latent.read_latents(tokens) if is_absorbed else self.latent.expand(tokens)

    def _check_rotary(self, rotary: Rotary | None) -> None:
        """Raise ValueError if positions would rotate more than the rotated part of the keys."""
        assert self.latent is not None
        if rotary is not None and 2 * rotary.cos.shape[-1] > self.latent.rotary_width:
            raise ValueError(
                f"latent.rotary: the positions rotate {2 * rotary.cos.shape[-1]} components, and "
                f"the rotated part of the keys has {self.latent.rotary_width}; write "
                f"`rotary_share: {self.latent.rotary_width / self.head_dim:g}` of the model"
            )

    def _check_cross_attention(self, is_causal: bool, rotary: Rotary | None) -> None:
        """Raise ValueError if cross-attention has no meaning with these arguments or this layer."""
        if is_causal or rotary is not None or self.local_self_attention:
            raise ValueError("cross-attention takes no order and no local self-attention")
        if self.cross_problem:
            raise ValueError(self.cross_problem)

    def _precision(self, x: Tensor) -> contextlib.AbstractContextManager[object]:
        """Return the context of the computation between the projections."""
        return without_autocast(x) if self.in_float32 else contextlib.nullcontext()

    def _project(self, x: Tensor, memory: Tensor, masks: Masks, cache: Cache | None) -> Projected:
        """Return q and z of x, and keys and values of `memory`."""
        is_plain = self.transform.is_identity and self.convolution.is_identity
        if memory is x and torch.compiler.is_compiling() and is_plain:
            further = (self.similarity.more, self.z)
            if can_project_together(self.qkv, *further):
                head_sizes = HeadSizes(self.num_heads, self.key_heads, self.head_dim)
                q, keys, v, z = project_together(x, self.qkv, *further, head_sizes)
                if self.similarity.more is None:
                    keys = self.similarity.keys(x, keys.squeeze(-3))
                return Projected(q=self.pair.add_queries(x, q), keys=keys, v=v, z=z)
        sizes = [self.num_heads, self.key_heads, self.key_heads]
        if memory is x:
            q, k, v = self.qkv(x).unflatten(-1, (-1, self.head_dim)).split(sizes, dim=-2)
        else:
            rows_of_q = self.num_heads * self.head_dim
            q, keys_and_values = split_outputs(self.qkv, x, memory, rows_of_q)
            k, v = keys_and_values.chunk(2, dim=-1)
            q, k, v = (part.unflatten(-1, (-1, self.head_dim)) for part in (q, k, v))
        q, k, v = self.transform(self.pair.add_queries(x, q), k, v)
        if not self.convolution.is_identity:
            present = masks.present_tokens(x.shape[1])
            q, k, v = self.convolution.mix_heads(q, k, v, present, cache)
        return Projected(q=q, keys=self.similarity.keys(memory, k), v=v, z=self._project_z(x))

    def _project_queries(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return q and z of x, for a layer without keys and values of its own."""
        q = self.qkv(x).unflatten(-1, (self.num_heads, -1))
        return self.pair.add_queries(x, q), self._project_z(x)

    def _project_z(self, x: Tensor) -> Tensor | None:
        """Return z of x (B, n, H, D), or None for a layer without z."""
        if self.z is None:
            return None
        z: Tensor = self.z(x).unflatten(-1, (self.num_heads, self.head_dim))
        return z


def attn_layer(
    chosen: AttentionSpec | str | dict[str, Any], *, local_self_attention: bool = False
) -> type[Attention]:
    """Return the class for timm's `attn_layer=`; equal choices return the same class.

    `chosen` is a value of `attention:` in YAML, a preset's name or a mapping such as
    `{"preset": "belief2", "residual": {"activation": "silu"}}`, or a specification. With
    `local_self_attention` the temperature is learned and no token attends to itself (LSA, Lee et
    al. 2021, https://arxiv.org/abs/2112.13492, eq. 4-5). Other values raise ConfigError, and so do
    `layers`: timm builds all layers of a model from one class. A layer of a user (`kind: module`)
    is a `TokenMixer`, which has the same arguments.
    """
    spec = attention_spec(chosen, "attn_layer")
    if spec.layers is not None:
        raise ConfigError(
            "attn_layer: attention.layers: one class cannot build layers that differ; "
            "build the model, and call replace_attention with this choice"
        )
    return _chosen_class(spec, local_self_attention)


TokenLayer: TypeAlias = Attention | TokenMixer
"""Layers that `attn_layer` makes: attention, or a layer of a user."""


class _Chosen(type):
    """Metaclass of the classes that `attn_layer` makes: no module contains them by name."""


@functools.cache
def _chosen_class(chosen: AttentionSpec, local_self_attention: bool) -> type[Any]:
    """Return the class of equal choices, which is made once."""
    fixed = {"spec": chosen, "local_self_attention": local_self_attention}
    base = Attention if chosen.mixer is None else TokenMixer
    layer_class: type = _Chosen(base.__name__, (base,), fixed)
    return layer_class


def _pickled(layer_class: type[TokenLayer]) -> str | tuple[Any, ...]:
    """Return how to pickle a class: by its choices, or a module's subclass by its name."""
    chosen = layer_class.spec, layer_class.local_self_attention
    if _chosen_class(*chosen) is layer_class:
        return _chosen_class, chosen
    return layer_class.__qualname__


copyreg.pickle(_Chosen, _pickled)  # type: ignore[arg-type]
