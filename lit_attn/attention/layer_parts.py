"""The parts of an attention layer: their construction, their parameters and the loading of these.

lit_attn.attention.layer computes with them.
"""

import contextlib
import functools
import math
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from lit_attn.attention.bias import Bias
from lit_attn.attention.compose import Composer
from lit_attn.attention.convolution import Convolution
from lit_attn.attention.filters import Filter
from lit_attn.attention.first_values import FirstValues, Values
from lit_attn.attention.gate import Gate
from lit_attn.attention.latent import Latent
from lit_attn.attention.normaliser import Normaliser
from lit_attn.attention.pairs import Pair
from lit_attn.attention.parts import LayerShape, Part
from lit_attn.attention.residual import Residual
from lit_attn.attention.scale import Scale
from lit_attn.attention.shared_keys import SharedKeys
from lit_attn.attention.similarity import Similarity
from lit_attn.attention.spec import AttentionSpec
from lit_attn.attention.transform import Transform
from lit_attn.schema.errors import ConfigError


def build_part(part: Part, shape: LayerShape, base: type[nn.Module]) -> Any:
    """Return the module of `part`, with all parameters on the device and in the dtype of `shape`.

    The device is also the default device meanwhile, for parts that create parameters without it.
    Raises ConfigError if `build` returns no `base`, or a module that lacks a required method.
    """
    device, dtype = shape.options["device"], shape.options["dtype"]
    with contextlib.nullcontext() if device is None else torch.device(device):
        module = part.build(shape)
    if not isinstance(module, base):
        raise ConfigError(
            f"'{part.kind}': {type(part).__name__}.build must return a "
            f"{base.__module__}.{base.__name__}, not {module!r}"
        )
    # A similarity needs one of several methods, and every other part needs `forward`.
    methods = getattr(base, "required_methods", ("forward",))
    overrides_none = all(getattr(type(module), m) is getattr(base, m) for m in methods)
    if overrides_none:
        raise ConfigError(
            f"'{part.kind}': its module {type(module).__name__} needs a method `{methods[0]}`"
        )
    return module if dtype is None else module.to(dtype)


class LayerParts(nn.Module):
    """Projections, norms and parts of a layer of `spec`, without its computation."""

    spec: ClassVar[AttentionSpec] = AttentionSpec()
    local_self_attention: ClassVar[bool] = False

    def __init__(
        self,
        dim: int,
        num_heads: int = 8,
        attn_head_dim: int | None = None,
        dim_out: int | None = None,
        qkv_bias: bool = False,
        qk_norm: bool = False,
        scale_norm: bool = False,
        proj_bias: bool = True,
        attn_drop: float = 0.0,
        proj_drop: float = 0.0,
        norm_layer: Callable[..., nn.Module] | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Raise ValueError if the heads do not divide `dim` or an argument cannot be supported.

        `attn_head_dim` is D, by default d / H, and `dim_out` the output's width, by default d.
        `qk_norm` normalises each head's q and k, and z if `zz: like-k`, with `norm_layer(D)` each.
        """
        super().__init__()
        if attn_head_dim is None and dim % num_heads:
            raise ValueError(f"{num_heads} heads do not divide a width of {dim}")
        if scale_norm:
            raise ValueError("scale_norm is not supported; choose a residual part instead")
        if qk_norm and norm_layer is None:
            raise ValueError("qk_norm needs a norm_layer")
        self.spec.check_heads(num_heads)
        options: dict[str, Any] = {"device": device, "dtype": dtype}
        self.num_heads = num_heads
        self.query_heads = self.spec.pair.queries * num_heads
        self.key_heads = self.spec.kv_heads or num_heads
        self.head_dim = attn_head_dim or dim // num_heads
        inner = num_heads * self.head_dim
        shared = self.key_heads * self.head_dim
        places = self.spec.compose.places()
        shape = LayerShape(
            dim=dim,
            dim_out=dim_out or dim,
            heads=num_heads,
            key_heads=self.key_heads,
            head_dim=self.head_dim,
            qkv_bias=qkv_bias,
            proj_bias=proj_bias,
            needs_row_terms=self.spec.needs_row_terms,
            options=options,
        )
        # Parts that act on logits or weights see all queries of a head.
        query_shape = shape._replace(heads=self.query_heads)
        self.attn_drop = attn_drop
        # Between the projections, compute in float32 under autocast too.
        self.in_float32 = False
        self.cross_problem = self.spec.find_cross_problem()
        # Numbers that are projected from a token: the rows of q, k and v in `qkv`.
        self.projected: tuple[int, ...] = (inner, shared, shared)
        query_inputs = dim
        self.latent: Latent | None = None
        if self.spec.shares_keys:
            self.projected = (inner,)
        if self.spec.latent is not None:
            if qk_norm or self.local_self_attention:
                raise ValueError(
                    "latent: has no norms of q and k and no learned temperature, because its "
                    "latents have norms; set `qk_norm: false`"
                )
            self.latent = Latent(self.spec.latent, shape)
            self.projected = (num_heads * self.latent.query_width,)
            query_inputs = self.latent.query_inputs
        self.qkv = nn.Linear(query_inputs, sum(self.projected), bias=qkv_bias, **options)
        head_norm: Callable[[], nn.Module] = nn.Identity
        if norm_layer and qk_norm:
            head_norm = functools.partial(norm_layer, self.head_dim, **options)
        self.q_norm = head_norm()
        self.k_norm = nn.Identity() if self.spec.shares_keys else head_norm()
        self.composers = nn.ModuleDict()
        for place in places:
            self.composers[place] = build_part(self.spec.compose, query_shape, Composer)
        self.similarity: Similarity = build_part(self.spec.similarity, query_shape, Similarity)
        self.normaliser: Normaliser = build_part(self.spec.normaliser, query_shape, Normaliser)
        self.transform: Transform = build_part(self.spec.transform, shape, Transform)
        self.convolution: Convolution = build_part(self.spec.convolution, query_shape, Convolution)
        self.values: Values = build_part(self.spec.values, shape, Values)
        # True for the first layer of a network, None if unknown; and the channel to that layer.
        self.is_first: bool | None = None
        self.first_values: FirstValues | None = None
        # Channel of a layer whose keys and values later layers share, and of these layers.
        self.shared_keys: SharedKeys | None = None
        self.scale: Scale = build_part(self.spec.scale, query_shape, Scale)
        self.bias: Bias = build_part(self.spec.bias, query_shape, Bias)
        self.filter: Filter = build_part(self.spec.filter, query_shape, Filter)
        self.pair: Pair = build_part(self.spec.pair, shape, Pair)
        self.gate: Gate = build_part(self.spec.gate, shape, Gate)
        self.z = nn.Linear(dim, inner, bias=False, **options) if self.spec.zz else None
        self.z_norm = head_norm() if self.spec.zz == "like-k" else nn.Identity()
        self.temperature = None
        if self.local_self_attention:
            # The logarithm of the scale is learned, one scalar a layer, starting at 1 / sqrt(D).
            start = -0.5 * math.log(self.head_dim)
            self.temperature = nn.Parameter(torch.full((), start, **options))
        self.proj = nn.Linear(inner, shape.dim_out, bias=proj_bias, **options)
        self.residual: Residual = build_part(self.spec.residual, shape, Residual)
        self.proj_drop = nn.Dropout(proj_drop)
        self.register_load_state_dict_pre_hook(complete_standard_weights)
        self.copy_projection()

    def no_weight_decay(self) -> set[str]:
        """Return the parameters without weight decay with `decay: weights`, as timm's models do."""
        return self._part_parameters(lambda part: part.exempt_parameters())

    def stacked_vectors(self) -> set[str]:
        """Return the parameters whose rows are vectors in the released code of their part."""
        return self._part_parameters(lambda part: part.stacked_vectors())

    def _part_parameters(self, choose: Callable[[Part], tuple[str, ...]]) -> set[str]:
        """Return the names in the layer of the parameters that `choose` names in each part."""
        names: set[str] = set()
        for family, part in self.spec.parts.items():
            modules = [family]
            if family == "compose":
                modules = [f"composers.{place}" for place in self.composers]
            for module in modules:
                names.update(f"{module}.{name}" for name in choose(part))
        return names

    @property
    def projects_keys(self) -> bool:
        """True for a layer whose `qkv` has the rows of keys and values beside those of queries."""
        return len(self.projected) > 1

    @property
    def passes_keys_on(self) -> bool:
        """True for a layer whose keys and values later layers share."""
        return self.shared_keys is not None and not self.spec.shares_keys

    @property
    def leaves_parameters_unused(self) -> bool:
        """True if trained parameters get no gradient: those that change only the weights."""
        if self.residual.uses_heads:
            return False
        modules = [
            self.similarity,
            self.composers,
            self.normaliser,
            self.scale,
            self.bias,
            self.q_norm,
            self.k_norm,
            self.z_norm,
            self.pair,
        ]
        if self.z is not None:
            modules.append(self.z)
        if not self.projects_keys:
            modules.append(self.qkv)
        parameters = self.transform.parameters_of_weights()
        parameters.extend(self.convolution.parameters_of_weights())
        for module in modules:
            parameters.extend(module.parameters())
        if self.temperature is not None:
            parameters.append(self.temperature)
        return any(parameter.requires_grad for parameter in parameters)

    def set_depth(self, layer: int) -> None:
        """Tell the parts that depend on it the number of the layer, which counts from 0."""
        self.is_first = layer == 0
        self.normaliser.set_depth(layer)
        self.filter.set_depth(layer)
        self.values.set_depth(layer)

    def copy_projection(self) -> None:
        """Set the residual part's parameters that start as a copy of W (Belief2, Proposition 1).

        A model that initialises its weights after building its layers calls this again.
        """
        state = self.residual.initial_state(self.proj.state_dict())
        if state:
            self.residual.load_state_dict(state)


# Names of the children that the standard layer does not have.
EXTRA = (
    "bias",
    "composers",
    "convolution",
    "filter",
    "gate",
    "normaliser",
    "pair",
    "residual",
    "scale",
    "similarity",
    "transform",
    "values",
    "z",
    "z_norm",
)


def complete_standard_weights(
    layer: Any, state: dict[str, Tensor], prefix: str, *_: object
) -> None:
    """Complete the weights of a standard layer in `state`, so that any layer can load them.

    If `state` has W but none of the layer's further parameters, these keep their initial values, or
    become a copy of W if the residual part says so.
    """
    initial = layer.state_dict()
    extra = {name for name in initial if name.split(".")[0] in EXTRA}
    has_projection = prefix + "proj.weight" in state
    has_extra = any(prefix + name in state for name in extra)
    if not has_projection or has_extra:
        return
    for name in extra:
        state[prefix + name] = initial[name]
    projection = {name: state[prefix + "proj." + name] for name in layer.proj.state_dict()}
    copied = layer.residual.initial_state(projection)
    for name, value in copied.items():
        state[f"{prefix}residual.{name}"] = value
