"""Initial values that depend only on the seed and on the parameter's name.

With one generator for all parameters, an additional matrix in a layer would shift the draws of all
later parameters, and two variants of one seed would share no initial values. Drawn by name, the
parameters that two variants have in common start equal, so a difference within a seed is a
difference between the variants.
"""

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from lit_attn.attention.layer import Attention


def draw_parameters(network: nn.Module, fill: Callable[[], None]) -> None:
    """Draw the parameters of a new `network` with `fill`, by name; nothing on the meta device."""
    if not next(network.parameters()).is_meta:
        with by_name(network):
            fill()
        copy_projections(network)


def copy_projections(network: nn.Module) -> None:
    """Set the projections that start as copies of W in all attention layers of `network`."""
    for module in network.modules():
        if isinstance(module, Attention):
            module.copy_projection()


@contextmanager
def by_name(network: nn.Module) -> Iterator[None]:
    """Draw every random fill of a parameter of `network` by seed, name and count of fills.

    The seed is that of torch's generator (`torch.initial_seed`), whose state does not change. The
    values that modules drew in their constructors are drawn again first.
    """
    with _ByName(network, torch.initial_seed()):
        # Children first: a module may fill parameters of its children.
        for module in reversed(list(network.modules())):
            if callable(reset := getattr(module, "reset_parameters", None)):
                reset()
        yield


class _ByName(TorchDispatchMode):
    """Gives every random operation on a parameter a generator of its own."""

    def __init__(self, network: nn.Module, seed: int) -> None:
        super().__init__()
        self.seed = seed
        # By storage, since initialisers also fill views, such as a flattened convolution weight.
        self.names = {
            parameter.untyped_storage().data_ptr(): name
            for name, parameter in network.named_parameters()
        }
        self.fills: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded in func.tags and isinstance(args[0], torch.Tensor):
            name = self.names.get(args[0].untyped_storage().data_ptr())
            if name is not None:
                kwargs = {**kwargs, "generator": self._generator(name, args[0].device)}
        return func(*args, **kwargs)

    def _generator(self, name: str, device: torch.device) -> torch.Generator:
        self.fills[name] += 1
        digest = hashlib.blake2b(f"{self.seed} {name} {self.fills[name]}".encode()).digest()
        return torch.Generator(device).manual_seed(int.from_bytes(digest[:8]) >> 1)
