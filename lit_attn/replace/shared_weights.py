"""Weights that layers share with each other, or with other modules, before a replacement.

A new layer has most parameters of the old one, but some are joined or reordered, which makes
copies. Layers whose copies come from the same parameters share the copies; otherwise a shared
weight would become two without a word, and the replacement is refused.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import nn

from lit_attn.attention.layer import Attention
from lit_attn.replace.search import Replacement
from lit_attn.replace.stacks import list_token_layers


class Use(NamedTuple):
    """A parameter under its name in the old layer of a replacement."""

    replacement: Replacement
    name: str
    parameter: nn.Parameter


class SharedWeights:
    """Parameters of a model before a replacement, and the modules that hold them."""

    def __init__(self, model: nn.Module, replacements: Sequence[Replacement]) -> None:
        """Note the parameters of `model`, whose layers are the old ones."""
        self.originals: set[nn.Parameter] = set(model.parameters())
        self.uses: list[list[Use]] = []
        self.users: dict[nn.Parameter, list[Use]] = {}
        inside: set[nn.Module] = set()
        for replacement in replacements:
            module = replacement.layer.module
            inside.update(module.modules())
            uses = []
            for name, parameter in module.named_parameters(remove_duplicate=False):
                use = Use(replacement, name, parameter)
                uses.append(use)
                self.users.setdefault(parameter, []).append(use)
            self.uses.append(uses)
        self.outside: dict[nn.Parameter, str] = {}
        for path, module in model.named_modules():
            if module not in inside:
                for name, parameter in module.named_parameters(recurse=False):
                    self.outside[parameter] = f"{path}.{name}"

    def tie(self) -> None:
        """Tie the copies of shared parameters in the new layers, which are in the model now.

        Raises ValueError if a shared parameter would become two.
        """
        lost: dict[nn.Module, tuple[int, ...]] = {}
        for uses in self.uses:
            if not uses:
                continue
            new = uses[0].replacement.new
            kept = set(new.parameters())
            lost[new] = tuple(id(use.parameter) for use in uses if use.parameter not in kept)
        first_layers: dict[tuple[int, ...], Replacement] = {}
        for uses in self.uses:
            for use in uses:
                if id(use.parameter) in lost[use.replacement.new]:
                    self._check_use(use, lost)
            if uses and lost[uses[0].replacement.new]:
                second = uses[0].replacement
                first = first_layers.setdefault(lost[second.new], second)
                if first is not second:
                    self._tie_copies(first, second)

    def _check_use(self, use: Use, lost: dict[nn.Module, tuple[int, ...]]) -> None:
        """Raise ValueError if the parameter of `use` stays the parameter of something else."""
        if use.parameter in self.outside:
            raise refuse(use, self.outside[use.parameter])
        for other in self.users[use.parameter]:
            if other is use:
                continue
            if other.replacement is use.replacement:
                raise refuse(use, f"its `{other.name}`")
            if lost[other.replacement.new] != lost[use.replacement.new]:
                raise refuse(use, f"{other.replacement.layer.paths[0]}.{other.name}")

    def _tie_copies(self, first: Replacement, second: Replacement) -> None:
        """Give the second layer the copies of the first one."""
        copies = dict(self._list_copies(first))
        for name, parameter in list(self._list_copies(second)):
            copy = copies.get(name)
            if copy is None or not is_equal(copy, parameter):
                raise ValueError(
                    f"{second.layer.name}: it shares weights with {first.layer.paths[0]}, and the "
                    "new layers need different ones; name one of them in `skip`"
                )
            for layer in list_token_layers(second.new):
                owner, _, last = name.rpartition(".")
                setattr(layer.get_submodule(owner), last, copy)

    def _list_copies(self, replacement: Replacement) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the parameters of projections and norms that the old layer did not have."""
        for layer in list_token_layers(replacement.new):
            if not isinstance(layer, Attention):
                continue
            for child in ("qkv", "proj", "q_norm", "k_norm"):
                for name, parameter in getattr(layer, child).named_parameters():
                    if parameter not in self.originals:
                        yield f"{child}.{name}", parameter


def refuse(use: Use, other: str) -> ValueError:
    """Return the error for a shared parameter that would become two."""
    return ValueError(
        f"{use.replacement.layer.name}: its `{use.name}` is the weight of {other} too, and the new "
        "layer would have a copy of it; name the layer in `skip`, or give it a weight of its own"
    )


def is_equal(first: nn.Parameter, second: nn.Parameter) -> bool:
    """Return True if two parameters have the same shape and values; meta tensors have no values."""
    if first.is_meta or second.is_meta:
        return first.shape == second.shape
    return torch.equal(first, second)
