"""Initial values that depend only on the seed and on the parameter's name.

With one generator for all parameters, an additional matrix in a layer would shift the draws of all
later parameters, and two variants of one seed would share no initial values. Drawn by name, the
parameters that two variants have in common start equal, so a difference within a seed is a
difference between the variants.
"""

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn

from lit_attn.attention.layer import Attention
from lit_attn.attention.mixer import TokenMixer
from lit_attn.private_names.of_torch import TorchDispatchMode, takes_generator


def draw_parameters(network: nn.Module, fill: Callable[[], None]) -> None:
    """Draw the parameters of a new `network` with `fill`, by name; nothing on the meta device."""
    if not next(network.parameters()).is_meta:
        with by_name(network):
            fill()
        copy_projections(network)


def outside_composers(network: nn.Module) -> dict[str, nn.Module]:
    """Return the modules by name; compositions keep the initial values of their own paper."""
    return {
        name: module
        for name, module in network.named_modules()
        if "composers" not in name.split(".")
    }


def copy_projections(network: nn.Module) -> None:
    """Set the projections that start as copies of W in all attention layers of `network`."""
    for module in network.modules():
        if isinstance(module, Attention):
            module.copy_projection()


@contextmanager
def by_name(network: nn.Module) -> Iterator[None]:
    """Draw every random fill of a parameter of `network` by seed, name and count of fills.

    The seed is that of torch's generator (`torch.initial_seed`), whose state does not change. The
    values that modules drew in their constructors are drawn again first. Layers of users keep the
    values of their constructors.
    """
    kept = []
    for module in network.modules():
        if isinstance(module, TokenMixer):
            kept += [(parameter, parameter.detach().clone()) for parameter in module.parameters()]
    # By storage, since initialisers also fill views, such as a flattened convolution weight.
    names = {
        parameter.untyped_storage().data_ptr(): name
        for name, parameter in network.named_parameters()
    }

    def find_name(tensor: torch.Tensor) -> str | None:
        return names.get(tensor.untyped_storage().data_ptr())

    with _Seeded(find_name):
        # Children first: a module may fill parameters of its children.
        for module in reversed(list(network.modules())):
            reset = getattr(module, "reset_parameters", None)
            if callable(reset):
                reset()
        yield
    with torch.no_grad():
        for parameter, value in kept:
            parameter.copy_(value)


def by_shape() -> AbstractContextManager[object]:
    """Draw every random fill of a tensor by seed, shape, and count of fills of this shape.

    It is for models whose constructors draw the initial values, before parameters have names. More
    or other parameters then change the values of parameters of their own shape only.
    """

    def find_shape(tensor: torch.Tensor) -> str | None:
        return None if tensor.is_meta else str(tuple(tensor.shape))

    return _Seeded(find_shape)


class _Seeded(TorchDispatchMode):
    """Mode in which each random operation on a tensor that has a key uses a new generator."""

    def __init__(self, find_key: Callable[[torch.Tensor], str | None]) -> None:
        super().__init__()
        self.seed = torch.initial_seed()
        self.find_key = find_key
        self.fills: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        is_random = torch.Tag.nondeterministic_seeded in func.tags
        if is_random and isinstance(args[0], torch.Tensor):
            key = self.find_key(args[0])
            if key is not None and takes_generator(func):
                kwargs = {**kwargs, "generator": self._next_generator(key, args[0].device)}
        return func(*args, **kwargs)

    def _next_generator(self, key: str, device: torch.device) -> torch.Generator:
        """Return a new generator for the next fill of `key`."""
        self.fills[key] += 1
        text = f"{self.seed} {key} {self.fills[key]}"
        digest = hashlib.blake2b(text.encode()).digest()
        # Seeds have 63 bits.
        seed = int.from_bytes(digest[:8]) >> 1
        return torch.Generator(device).manual_seed(seed)
