"""Initial values that depend on the seed and the parameter's name alone.

Drawn one after the other from one generator, a layer with one more matrix would shift the draws of
all that come behind it, and two variants of one seed would share nothing. Drawn by name, whatever
they have in common starts the same, which is what a difference within a seed is about.
"""

import hashlib
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode


@contextmanager
def by_name(network: nn.Module) -> Iterator[None]:
    """Within it every random fill of a parameter of `network` is drawn by seed, name and turn.

    The seed is that of torch's generator (`torch.initial_seed`), which does not move. What modules
    drew in their constructors is drawn again first.
    """
    with _ByName(network, torch.initial_seed()):
        # A module that fills what its children hold comes after them.
        for module in reversed(list(network.modules())):
            if callable(reset := getattr(module, "reset_parameters", None)):
                reset()
        yield


class _ByName(TorchDispatchMode):
    """Gives every random operation on a parameter a generator of its own."""

    def __init__(self, network: nn.Module, seed: int) -> None:
        super().__init__()
        self.seed = seed
        # Initialisers fill views too, as a convolution's weight flattened to a matrix.
        self.names = {
            parameter.untyped_storage().data_ptr(): name
            for name, parameter in network.named_parameters()
        }
        self.turns: Counter[str] = Counter()

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
        self.turns[name] += 1
        digest = hashlib.blake2b(f"{self.seed} {name} {self.turns[name]}".encode()).digest()
        return torch.Generator(device).manual_seed(int.from_bytes(digest[:8]) >> 1)
