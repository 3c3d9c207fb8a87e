"""Model factory: builds a network from its configuration, and counts parameters and FLOPs.

It also finds the FFN width that matches one model's parameter count to another's. All counts are
taken on the meta device, which allocates and computes nothing.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from lit_attn.attention.cache import count_bytes
from lit_attn.attention.layer import Attention
from lit_attn.attention.mixer import TokenMixer, declared_flops
from lit_attn.data.base import Data
from lit_attn.models.base import LayerCount, Model
from lit_attn.schema.errors import ConfigError
from lit_attn.schema.plugins import find_user_line
from lit_attn.signatures import Signature


class Budget(NamedTuple):
    """Cost of a model; `flops` are of the forward pass of one sample, multiply-add = 2.

    `replaced_layers` of its `attention_layers` have the choice of `model.attention`.

    FLOPs are those of convolutions and matrix products, attention included, as PyTorch counts them.
    Softmax, norms and other element-wise operations are left out. `cache_bytes` are those of
    `count_cache_bytes`.
    """

    parameters: int
    flops: int
    ffn_width: int | None
    replaced_layers: int
    attention_layers: int
    cache_bytes: int | None


def build(model: Model, data: Data, device: str | torch.device | None = None) -> nn.Module:
    """Return the network of `model` for `data`, initialised except on the meta device.

    Parameters that the code of a model creates without a device are on `device` too. Raises
    ConfigError if the parts of the model do not go together.
    """
    default = contextlib.nullcontext() if device is None else torch.device(device)
    with model_errors(), default:
        network = model.build(data.signature(), device)
    returned = type(network).__name__
    if not isinstance(network, nn.Module):
        raise ConfigError(
            f"model: `build` of kind '{model.kind}' returns {returned}, "
            "which is not a torch.nn.Module"
        )
    if type(network).forward is nn.Module.forward:
        raise ConfigError(
            f"model: `build` of kind '{model.kind}' returns {returned}, "
            "which has no method `forward`"
        )
    return network


@contextlib.contextmanager
def model_errors() -> Iterator[None]:
    """Raise the ValueErrors of a model's parts as ConfigErrors that begin with `model`."""
    try:
        yield
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(f"model: {error}") from error


def describe(model: Model, data: Data) -> Budget:
    """Count the parameters and FLOPs of `model` on one sample of `data`.

    Raises ConfigError if the parts of the model do not go together.
    """
    network = build(model, data, "meta").eval()
    parameters = count(network)
    layers = model.count_layers(network)
    signature = data.signature()
    with torch.no_grad(), model_errors():
        cache_bytes = count_cache_bytes(network, signature)
    return Budget(
        parameters,
        count_sample_flops(network, signature),
        _find_width(model, data, parameters),
        layers.replaced,
        layers.total,
        cache_bytes,
    )


def describe_kept_layers(model: Model, data: Data) -> str:
    """Return a sentence about the attention layers that a model from elsewhere keeps or lacks."""
    layers = _count_layers(type(model), model.model_dump_json(), data.signature())
    if layers.total == 0:
        return "model: has no attention layer of lit_attn, so `attention` changes nothing in it"
    if layers.replaced == layers.total:
        return ""
    return (
        f"model: {layers.replaced} of {layers.total} attention layers have the mechanism of "
        "`attention`; the others remain as they are"
    )


@cache
def _count_layers(member: type[Model], text: str, signature: Any) -> LayerCount:
    """Return the number of layers of the model with the JSON `text`."""
    model = member.model_validate_json(text)
    with model_errors(), torch.device("meta"):
        network = model.build(signature, "meta")
    return model.count_layers(network)


def _find_width(model: Model, data: Data, parameters: int) -> int | None:
    """Return the FFN width with which `model` has its `parameters`, or None if there is none."""
    if model.ffn is None:
        return None
    if model.ffn.width is not None:
        return model.ffn.width
    # Only the code of a model from elsewhere has its widths. Pretrained weights fix them.
    random_model = model.model_copy(update={"pretrained": False})
    with contextlib.suppress(ConfigError):
        matched = resolve(random_model, random_model, data)
        is_equal = count(build(matched, data, "meta")) == parameters
        if is_equal and matched.ffn is not None:
            return matched.ffn.width
    return None


def list_tensors(values: Any) -> Iterator[Tensor]:
    """Yield the tensors in nested lists, tuples and dictionaries."""
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, list | tuple):
        for value in values:
            yield from list_tensors(value)
    elif isinstance(values, Mapping):
        for value in values.values():
            yield from list_tensors(value)


def sum_output(output: Any) -> Tensor:
    """Return the sum of all numbers in a network's output, which may be a tuple or dictionary.

    Raises TypeError for an output without a tensor that has a gradient.
    """
    sums = [tensor.sum() for tensor in list_tensors(output) if tensor.requires_grad]
    if not sums:
        raise TypeError(f"the network returns {type(output).__name__}, without a gradient")
    return torch.stack(sums).sum()


def count_cache_bytes(network: nn.Module, signature: Signature) -> int | None:
    """Return the bytes that decoding stores for each token of a sample; None without a cache.

    They are those of all caches after the sample, divided by its tokens: windows and sums over
    earlier tokens, which do not grow, count with their share of a token. `network` has a method
    `fill_caches`, which returns None if it cannot be decoded token by token. The cache of a layer
    of `kind: module` is known to its own code alone.
    """
    fill_caches = getattr(network, "fill_caches", None)
    has_mixer = any(isinstance(module, TokenMixer) for module in network.modules())
    if fill_caches is None or signature.tokens is None or has_mixer:
        return None
    try:
        caches = fill_caches(*signature.sample())
    except (ValueError, NotImplementedError) as error:
        # A part of a user may have no cache, or compute what tensors without values cannot.
        if not find_user_line(error):
            raise
        return None
    if caches is None:
        return None
    return round(count_bytes(caches) / (signature.tokens * signature.sample_count))


def count_sample_flops(network: nn.Module, signature: Signature) -> int:
    """Return the FLOPs of `network`, which is on the meta device, on one sample.

    Its attention layers cannot be used afterwards. Raises ConfigError if its parts do not go
    together.
    """
    # The counter tracks gradient functions of inputs, which an expanded parameter lacks here.
    network.requires_grad_(False)
    with torch.no_grad(), model_errors():
        return count_flops(network, signature.sample()) // signature.sample_count


def count_flops(network: nn.Module, sample: tuple[Tensor, ...]) -> int:
    """Return the FLOPs of `network` on a sample; its attention layers cannot be used afterwards.

    Models have many equal attention layers of many operations, which take long to count. So the
    first layer is counted, and an equal one returns an empty result and counts as much.
    """
    layers = LayerFlops()
    for layer in network.modules():
        if isinstance(layer, Attention):
            layer.forward = partial(  # type: ignore[method-assign]
                layers.count_once, layer, layer.forward
            )
    with layers.counter, declared_flops(network) as declared:
        network(*sample)
    return layers.counter.get_total_flops() + layers.repeated + sum(declared)


class LayerFlops:
    """Counter of FLOPs that computes one of several equal attention layers.

    `repeated` are the FLOPs of the layers that were not computed.
    """

    def __init__(self) -> None:
        self.counter = FlopCounterMode(display=False)
        self.repeated = 0
        self.known: dict[tuple[object, ...], int] = {}

    def count_once(
        self,
        layer: Attention,
        forward: Callable[..., Tensor],
        x: Tensor,
        *inputs: Any,
        **named: Any,
    ) -> Tensor:
        """Return `forward(x, ...)`, or an empty result if the FLOPs of such a call are known."""
        shapes = tuple(parameter.shape for parameter in layer.parameters())
        # Later layers read the keys that such a layer computes.
        source = layer if layer.passes_keys_on else None
        key = (layer.spec, layer.num_heads, x.shape, shapes, source, inputs, tuple(named.items()))
        if key in self.known:
            self.repeated += self.known[key]
            return x.new_empty(*x.shape[:-1], layer.proj.out_features)
        before = self.counter.get_total_flops()
        result = forward(x, *inputs, **named)
        self.known[key] = self.counter.get_total_flops() - before
        return result


def resolve(model: Model, match_to: Model | None, data: Data) -> Model:
    """Return `model` with the FFN width whose parameter count is nearest to that of `match_to`.

    The count is an affine function of the width, so two builds determine the width. Raises
    ConfigError if there is no FFN, or if the count is too large even with a width of 1.
    """
    if match_to is None:
        return model
    if model.ffn is None:
        raise ConfigError("match: parameters: there is no FFN whose width could be solved for")
    target = count(build(match_to, data, "meta"))
    at_one = count(build(model.with_width(1), data, "meta"))
    # The second width is large, because some models from elsewhere round their widths.
    at_large = count(build(model.with_width(1025), data, "meta"))
    if at_large == at_one:
        raise ConfigError(
            f"match: parameters: the parameter count of '{model.kind}' does not depend on ffn.width"
        )
    width = 1 + round(1024 * (target - at_one) / (at_large - at_one))
    if width < 1:
        raise ConfigError(
            f"match: parameters: {at_one:,} parameters with the narrowest FFN exceed the "
            f"{target:,} to match; widen the baseline's FFN"
        )
    return model.with_width(width)


def count(network: nn.Module) -> int:
    """Return the number of trainable scalars."""
    return sum(parameter.numel() for parameter in network.parameters() if parameter.requires_grad)
