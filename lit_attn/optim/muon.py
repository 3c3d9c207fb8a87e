"""Muon for the matrices of hidden layers, with AdamW for all other parameters.

Sources: Muon, Jordan et al. 2024, https://kellerjordan.github.io/posts/muon, and Liu et al. 2025,
https://arxiv.org/abs/2502.16982 (`adjust: match-adamw`).
"""

from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatchcase
from typing import Any, Literal

import torch
from pydantic import Field, PositiveFloat, PositiveInt
from torch import nn

from lit_attn.optim.base import Optimizer, find_declared
from lit_attn.optim.standard import AdamW
from lit_attn.schema.base import Config, Share
from lit_attn.schema.errors import ConfigError


class OtherParameters(Config):
    """AdamW's settings for the parameters that Muon leaves out."""

    lr: PositiveFloat = Field(3e-4, description="peak learning rate, which the schedule scales")
    weight_decay: float = Field(0.0, ge=0, description="weight-decay coefficient")
    betas: tuple[Share, Share] = Field(
        (0.9, 0.95), description="decays of the means of gradients and of their squares"
    )
    eps: PositiveFloat = Field(1e-8, description="added to the root of the mean square")
    decay: Literal["all", "matrices", "weights"] = Field(
        "all", description="parameters with weight decay, as for `adamw`"
    )


class Muon(Optimizer, kind="muon"):
    """Muon for the matrices of hidden layers, and AdamW for all other parameters.

    Muon makes the momentum of a matrix orthogonal by Newton-Schulz steps (torch.optim.Muon). The
    others are vectors, embeddings, convolutions, outputs, and parameters that the parts of a
    network exempt from weight decay. The schedule scales both learning rates by the same factor.
    """

    is_recordable = True
    adamw: OtherParameters = Field(
        OtherParameters(), description="settings of AdamW for all other parameters"
    )
    momentum: Share = Field(0.95, description="decay of the momentum")
    nesterov: bool = Field(True, description="Nesterov's momentum")
    steps: PositiveInt = Field(5, description="Newton-Schulz steps")
    adjust: Literal["original", "match-adamw"] = Field(
        "original",
        description="factor of the step of an A x B matrix; original: sqrt(max(1, A / B)); "
        "match-adamw: 0.2 sqrt(max(A, B)), so that learning rates of AdamW can be kept",
    )
    outputs: tuple[str, ...] = Field(
        ("*head.weight", "*head.*.weight", "*classifier.*weight", "*classes.weight"),
        description="patterns of the names of output projections, which Muon leaves out",
    )

    def build(self, module: nn.Module, fused: bool = True) -> torch.optim.Optimizer:
        """Raise ConfigError if the network has no matrix of a hidden layer."""
        matrices = self.list_matrices(module)
        if not matrices:
            raise ConfigError(
                "optimizer: muon: the network has no matrix of a hidden layer; choose adamw"
            )
        adjustments = {"original": "original", "match-adamw": "match_rms_adamw"}
        parameters = self.group_by_layer(module, list(matrices.values()))
        muon = torch.optim.Muon(
            parameters,
            lr=self.lr,
            momentum=self.momentum,
            nesterov=self.nesterov,
            ns_steps=self.steps,
            weight_decay=self.weight_decay,
            adjust_lr_fn=adjustments[self.adjust],
        )
        chosen = {id(parameter) for parameter in matrices.values()}
        others = PartialModule(module, chosen)
        settings = AdamW(**dict(self.adamw), layer_decay=self.layer_decay)
        adamw = settings.build(others, fused)
        for group in adamw.param_groups:
            group["lr_scale"] = group.get("lr_scale", 1.0) * (self.adamw.lr / self.lr)
        return JoinedOptimizer([muon, adamw])

    def list_matrices(self, module: nn.Module) -> dict[str, nn.Parameter]:
        """Return the trainable matrices of hidden layers by name."""
        embeddings = set()
        for part in module.modules():
            if isinstance(part, nn.Embedding):
                embeddings.add(id(part.weight))
        exempt = [*self.outputs, *find_declared(module, "no_weight_decay")]
        exempt += find_declared(module, "stacked_vectors")
        matrices = {}
        for name, parameter in module.named_parameters():
            is_matrix = parameter.requires_grad and parameter.ndim == 2
            is_exempt = any(fnmatchcase(name, pattern) for pattern in exempt)
            if is_matrix and not is_exempt and id(parameter) not in embeddings:
                matrices[name] = parameter
        return matrices


class JoinedOptimizer(torch.optim.Optimizer):
    """Optimisers of different parameters of one network.

    Their groups of parameters are the groups of this optimiser, so a schedule that sets `lr` in
    every group reaches all of them. A group with `lr_scale` has that factor of the rate, and one
    with `keeps_constants` keeps its momentum and its weight decay.
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
        # In a tuple it is no child, and the names of the parameters stay the same.
        self.viewed = (module,)
        self.left_out = left_out

    def named_parameters(self, *args: Any, **options: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the names and the parameters that are not left out."""
        (viewed,) = self.viewed
        for name, parameter in viewed.named_parameters(*args, **options):
            if id(parameter) not in self.left_out:
                yield name, parameter

    def named_modules(self, *args: Any, **options: Any) -> Iterator[tuple[str, nn.Module]]:
        """Yield the submodules of the viewed module."""
        (viewed,) = self.viewed
        yield from viewed.named_modules(*args, **options)
