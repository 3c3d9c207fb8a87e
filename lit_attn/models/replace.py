"""Replacement of the softmax self-attention layers of any model, with their weights.

An adapter reads the projections of one class of attention modules, and calls the new layer with the
masks, position biases and rotations of that class. ADAPTERS maps classes to adapters; a file
outside this package can add to it.
"""

import math
import re
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, NamedTuple

import torch
import yaml
from torch import Tensor, nn
from torch.nn import functional as F

from lit_attn.attention.layer import Attention, attn_layer
from lit_attn.attention.spec import AttentionSpec, attention_spec
from lit_attn.schema.base import load
from lit_attn.schema.errors import ConfigError
from lit_attn.schema.sources import read_package_file

CLASSES = yaml.safe_load(read_package_file(Path(__file__).with_name("attention_classes.yaml")))

ADAPTERS: dict[str, str | type["Adapter"]] = {
    name: f"lit_attn.models.{file}:{adapter}"
    for file, adapters in CLASSES["adapters"].items()
    for name, adapter in adapters.items()
}
"""Adapters by class of attention module, both as "module:class"; an adapter can be the class."""

UNFIT = {name: reason for reason, names in CLASSES["refused"].items() for name in names}
"""Reasons why a class of attention modules cannot be replaced."""

ATTENTION_NAME = re.compile(r"Attention(?!Pool)|Attn|MHSA")
"""Names of self-attention; a class that pools tokens by a learned query is none and remains."""


class Projections(NamedTuple):
    """Projections and options of a self-attention module, apart from masks and positions.

    `qkv` has the rows of all query heads, then of the key heads for keys and for values.
    `scale` multiplies the logits; None means 1 / sqrt(D).
    """

    heads: int
    qkv: nn.Linear
    proj: nn.Linear
    key_heads: int | None = None
    q_norm: nn.Module | None = None
    k_norm: nn.Module | None = None
    attn_drop: float = 0.0
    proj_drop: float = 0.0
    scale: float | None = None


class Adapter(nn.Module, ABC):
    """Attention layer in the place of another module, with that module's `forward`.

    A subclass defines `read`, and `forward` with the arguments of the module. The module remains as
    `original`, without the attributes in `moved`, because it computes its position biases and
    defines what the rest of the model reads.
    """

    adds_to_logits = True
    """True if masks or position biases are added to logits, which linear attention lacks."""

    moved: tuple[str, ...] = ("qkv", "proj", "q_norm", "k_norm", "attn_drop", "proj_drop")

    def __init__(self, original: nn.Module, spec: AttentionSpec) -> None:
        """Raise ValueError if a layer with `spec` cannot take the place of `original`."""
        super().__init__()
        if self.adds_to_logits and not spec.similarity.has_logits:
            text = "has no logits, to which this module adds a mask or a position bias"
            raise ValueError(f"'{spec.similarity.kind}' attention {text}")
        with torch.no_grad():
            self.layer = build_layer(self.read(original), spec)
        for name in self.moved:
            if hasattr(original, name):
                delattr(original, name)
        self.original = original

    @abstractmethod
    def read(self, original: Any) -> Projections:
        """Return the projections of `original`; raise ValueError if it computes anything else."""

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("original"), name)


def replace_attention(
    model: nn.Module, spec: AttentionSpec | str | dict[str, Any], source: str = "replace_attention"
) -> nn.Module:
    """Replace the softmax self-attention layers of `model`, in place, and return the model.

    A model that is such a layer itself is not changed, and the new layer is returned.

    `spec` is a preset's name, a mapping as in YAML, or a specification. The new layers have the
    weights of the old ones; what the old ones lack has its initial values. So a mechanism that
    contains the standard layer leaves the model's outputs unchanged. Raises ConfigError, which
    begins with `source` and the path of the module, if a layer cannot be replaced.
    """
    chosen = attention_spec(spec, source)
    replaced: dict[nn.Module, nn.Module] = {}
    finished: set[nn.Module] = set()
    for path, module in list(model.named_modules(remove_duplicate=False)):
        if module not in replaced and module not in finished:
            try:
                new = _adapt(module, chosen)
            except ValueError as error:
                context = f"{source}: {path} ({type(module).__name__})"
                raise ConfigError(f"{context}: {error}") from error
            if new is not None:
                replaced[module] = new.train(module.training)
                finished.update(module.modules())
        if module in replaced and path:
            parent, _, child = path.rpartition(".")
            setattr(model.get_submodule(parent), child, replaced[module])
        if isinstance(module, nn.TransformerEncoder):
            # Its fused path reads the projections of the first layer instead of calling it.
            module.use_nested_tensor = False
    if not replaced:
        raise ConfigError(f"{source}: {type(model).__name__} has no self-attention layers")
    return replaced.get(model, model)


def build_layer(source: Projections, spec: AttentionSpec) -> Attention:
    """Return a layer with the modules of `source`; raise ValueError if `spec` does not fit them."""
    heads, key_heads = source.heads, source.key_heads or source.heads
    if spec.kv_heads not in (None, key_heads):
        raise ValueError(f"kv_heads: {spec.kv_heads}, but the module has {key_heads} key heads")
    qkv, proj = source.qkv, source.proj
    shared = key_heads if key_heads != heads else None
    head_dim = qkv.out_features // (heads + 2 * key_heads)
    layer = attn_layer(spec.model_copy(update={"kv_heads": shared}))(
        qkv.in_features,
        heads,
        attn_head_dim=head_dim,
        dim_out=proj.out_features,
        qkv_bias=qkv.bias is not None,
        proj_bias=proj.bias is not None,
        attn_drop=source.attn_drop,
        proj_drop=source.proj_drop,
        device=qkv.weight.device,
        dtype=qkv.weight.dtype,
    )
    layer.qkv, layer.proj = qkv, proj
    layer.q_norm, layer.k_norm = source.q_norm or layer.q_norm, source.k_norm or layer.k_norm
    if source.scale is not None and not math.isclose(source.scale, head_dim**-0.5):
        if not isinstance(source.q_norm, nn.Identity | None):
            raise ValueError(f"its logits are scaled by {source.scale:g} after a norm of queries")
        for name, rows in qkv.named_parameters():
            if name != "v_bias":
                rows[: heads * head_dim] *= source.scale * head_dim**0.5
    layer.copy_projection()
    return layer


def join(*parts: nn.Linear) -> nn.Linear:
    """Return a Linear with the outputs of all `parts`: q, k, v, or some of them joined already."""
    weight, biases = torch.cat([part.weight for part in parts]), [part.bias for part in parts]
    if biases[0] is None or biases[-1] is None:
        return linear(weight, None)
    if None in biases:
        return QueryValueLinear(linear(weight, None), biases[0], biases[-1])
    return linear(weight, torch.cat(tuple(biases)))


def by_head(qkv: nn.Linear, heads: int) -> nn.Linear:
    """Return `qkv`, whose rows are q, k and v of each head in turn, with rows q, k, v."""
    order = torch.arange(qkv.out_features).view(heads, 3, -1).transpose(0, 1).flatten()
    return linear(qkv.weight[order], None if qkv.bias is None else qkv.bias[order])


def linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    """Return a Linear with copies of `weight` (outputs, inputs) and `bias` as parameters."""
    new = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    new.weight = nn.Parameter(weight.detach().clone())
    if bias is not None:
        new.bias = nn.Parameter(bias.detach().clone())
    return new


class QueryValueLinear(nn.Linear):
    """Projection to q, k and v in which k has no bias (BEiT, EVA)."""

    def __init__(self, qkv: nn.Linear, q_bias: nn.Parameter, v_bias: nn.Parameter) -> None:
        super().__init__(qkv.in_features, qkv.out_features, bias=False, device="meta")
        self.weight, self.q_bias, self.v_bias = qkv.weight, q_bias, v_bias

    def forward(self, x: Tensor) -> Tensor:
        k_bias = self.q_bias.new_zeros(self.out_features - 2 * len(self.q_bias))
        return F.linear(x, self.weight, torch.cat([self.q_bias, k_bias, self.v_bias]))


class NormedLinear(nn.Linear):
    """Output projection after a norm of all heads."""

    def __init__(self, norm: nn.Module, proj: nn.Linear) -> None:
        super().__init__(proj.in_features, proj.out_features, device="meta")
        self.weight, self.bias, self.norm = proj.weight, proj.bias, norm

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.norm(x), self.weight, self.bias)


def _adapt(module: nn.Module, spec: AttentionSpec) -> nn.Module | None:
    """Return what replaces `module`, or None; raise ValueError if it cannot be replaced."""
    if adapter := ADAPTERS.get(_class_name(module)):
        adapter_class = load(adapter) if isinstance(adapter, str) else adapter
        return adapter_class(module, spec)
    reason = UNFIT.get(_class_name(module))
    if reason is None and ATTENTION_NAME.search(type(module).__name__):
        parts = {_class_name(part) for part in module.modules()}
        if parts.isdisjoint({*ADAPTERS, *UNFIT}):
            reason = "its class has no adapter; docs/own-models.md says how to write one"
    if reason is not None:
        raise ValueError(reason)
    return None


def _class_name(module: nn.Module) -> str:
    return f"{type(module).__module__}:{type(module).__qualname__}"
