"""Several optimisers as one: each has its own parameters, and all make a step together."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn


class JoinedOptimizer(torch.optim.Optimizer):
    """Optimisers of different parameters of one network.

    Their groups of parameters are the groups of this optimiser, so a schedule that sets `lr` in
    every group reaches all of them. A group with `lr_scale` has that factor of the rate.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self.optimizers = list(optimizers)
        super().__init__(self._list_groups(), {})

    def _list_groups(self) -> list[dict[str, Any]]:
        groups: list[dict[str, Any]] = []
        for optimizer in self.optimizers:
            groups += optimizer.param_groups
        return groups

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make a step of every optimiser, and return the value of `closure`, which runs once."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for optimizer in self.optimizers:
            optimizer.step()
        return loss

    def state_dict(self) -> dict[str, Any]:
        """Return the states of all optimisers, in their order."""
        return {"optimizers": [optimizer.state_dict() for optimizer in self.optimizers]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the states of all optimisers; raise ValueError for another number of them."""
        states = state_dict["optimizers"]
        for optimizer, state in zip(self.optimizers, states, strict=True):
            optimizer.load_state_dict(state)
        # Loading gives an optimiser new groups.
        self.param_groups = self._list_groups()


class PartialModule(nn.Module):
    """View of a module for an optimiser: its parameters without some, under the same names."""

    def __init__(self, module: nn.Module, left_out: set[int]) -> None:
        super().__init__()
        # Not a child: the names of the parameters stay the same.
        object.__setattr__(self, "viewed", module)
        self.left_out = left_out

    def named_parameters(self, *args: Any, **options: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the names and the parameters that are not left out."""
        viewed: nn.Module = self.viewed  # type: ignore[assignment]
        for name, parameter in viewed.named_parameters(*args, **options):
            if id(parameter) not in self.left_out:
                yield name, parameter

    def named_modules(self, *args: Any, **options: Any) -> Iterator[tuple[str, nn.Module]]:
        """Yield the submodules of the viewed module."""
        viewed: nn.Module = self.viewed  # type: ignore[assignment]
        yield from viewed.named_modules(*args, **options)
