"""Building of the module of a part, with checks of what a part from outside the package returns."""

import contextlib
from typing import Any

import torch
from torch import nn

from lit_attn.attention.parts import LayerShape, Part
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
