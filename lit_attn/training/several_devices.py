"""Requirements of models that are trained on several devices (DDP)."""

import torch
from torch import Tensor, nn

from lit_attn.schema.errors import ConfigError

SHOWN = 3
"""Parameters that an error names."""


def leaves_parameters_unused(network: nn.Module) -> bool:
    """Return True if a module of `network` says that parameters can stay without a gradient.

    The module says so with a true attribute `leaves_parameters_unused`.
    """
    return any(getattr(module, "leaves_parameters_unused", False) for module in network.modules())


def choose_strategy(network: nn.Module, world_size: int) -> str:
    """Return the name of Lightning's strategy for `network` on `world_size` devices.

    DDP waits for the gradients of all parameters unless it searches the graph of every step for
    unused ones, which takes time.
    """
    if world_size == 1:
        return "auto"
    return "ddp_find_unused_parameters_true" if leaves_parameters_unused(network) else "ddp"


def require_gradients(network: nn.Module, sample: tuple[Tensor, ...], devices: int) -> None:
    """Raise ConfigError if parameters of `network` get no gradient and no module says so.

    `network` and `sample` are on the meta device. On one device such a model trains, on several
    devices DDP ends the first step with an error of many lines. A model that cannot be trained on
    the meta device is not checked.
    """
    if devices == 1 or leaves_parameters_unused(network):
        return
    try:
        unused = _find_unused_parameters(network, sample)
    except Exception:  # Code of a user can raise any exception.
        return
    if unused:
        names = ", ".join(unused[:SHOWN])
        if len(unused) > SHOWN:
            names += f" and {len(unused) - SHOWN} more"
        raise ConfigError(
            f"training.devices: {devices} devices need a gradient for every parameter, but the "
            f"model's output does not depend on {names}; leave them out, "
            "or set the attribute `leaves_parameters_unused = True` of their module"
        )


def _find_unused_parameters(network: nn.Module, sample: tuple[Tensor, ...]) -> list[str]:
    """Return the names of the trained parameters on which the network's output does not depend."""
    # Batch norms need more than one sample.
    batch = tuple(torch.cat([part, part]) for part in sample)
    output = network.train()(*batch)
    parameters = {name: p for name, p in network.named_parameters() if p.requires_grad}
    gradients = torch.autograd.grad(output.sum(), list(parameters.values()), allow_unused=True)
    pairs = zip(parameters, gradients, strict=True)
    return [name for name, gradient in pairs if gradient is None]
