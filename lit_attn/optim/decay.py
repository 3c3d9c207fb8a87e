"""Weight decay of a model's parameters, as the optimiser applies it."""

from typing import NamedTuple

from lit_attn.data.base import Data
from lit_attn.models import factory
from lit_attn.models.base import Model
from lit_attn.optim.base import Optimizer


class DecaySplit(NamedTuple):
    """Numbers of trainable scalars with and without weight decay.

    `exempt` has the names of the parameters without decay, with * for numbers; it is empty if no
    parameter decays.
    """

    decayed: int
    not_decayed: int
    exempt: frozenset[str]


def describe_decay(model: Model, data: Data, optimizer: Optimizer) -> DecaySplit:
    """Return which parameters of `model` have weight decay, from the groups of the optimiser."""
    network = factory.build(model, data, "meta")
    names = {id(parameter): name for name, parameter in network.named_parameters()}
    decayed = 0
    not_decayed = 0
    exempt: set[str] = set()
    for group in optimizer.build(network, fused=False).param_groups:
        has_decay = bool(group.get("weight_decay", 0.0))
        for parameter in group["params"]:
            if has_decay:
                decayed += parameter.numel()
                continue
            not_decayed += parameter.numel()
            parts = names.get(id(parameter), "").split(".")
            exempt.add(".".join("*" if part.isdecimal() else part for part in parts))
    if not decayed:
        exempt.clear()
    return DecaySplit(decayed, not_decayed, frozenset(exempt))
