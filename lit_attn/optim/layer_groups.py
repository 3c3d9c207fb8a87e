"""Learning rates that differ by layer or by width: groups of an optimiser's parameters."""

from typing import Any

from torch import nn

from lit_attn.models.blocks import find_blocks

KEY = "optimizer.layer_decay"


def find_depths(module: nn.Module) -> tuple[dict[int, int], int]:
    """Return the depth of each parameter by its id, and the depth of the output.

    Parameters before the first block (embeddings) have depth 0, and those of block i (from 1) depth
    i. After the last block, a norm belongs to this block, and the head has the depth of the output,
    which is the number of blocks plus 1, as in timm. Other parameters belong to the block that
    follows them. The order is that of `named_parameters`. Raises ConfigError for a network without
    blocks.
    """
    blocks = list(find_blocks(module, KEY))
    modules = dict(module.named_modules())
    output = len(blocks) + 1
    depths: dict[int, int] = {}
    passed = 0
    for name, parameter in module.named_parameters():
        depth = 0 if passed == 0 else passed + 1
        owner = modules[name.rpartition(".")[0]]
        is_norm = parameter.ndim < 2 and not isinstance(owner, nn.Linear)
        if depth == output and is_norm:
            depth = len(blocks)
        for number, block in enumerate(blocks, start=1):
            if name.startswith(f"{block}."):
                depth = passed = number
        depths[id(parameter)] = depth
    return depths, output


def as_groups(parameters: list[Any]) -> list[dict[str, Any]]:
    """Return groups of an optimiser's parameters; parameters without groups are one."""
    has_groups = bool(parameters) and isinstance(parameters[0], dict)
    return parameters if has_groups else [{"params": parameters}]


def scale_by_layer(module: nn.Module, parameters: list[Any], decay: float) -> list[dict[str, Any]]:
    """Return groups of `parameters` with the factor `lr_scale` of the learning rate.

    The factor of a parameter is `decay` to the power of its distance from the output. `parameters`
    are parameters of `module`, or groups of them, whose other settings the new groups keep.
    """
    depths, output = find_depths(module)
    scaled: list[dict[str, Any]] = []
    for group in as_groups(parameters):
        by_depth: dict[int, list[nn.Parameter]] = {}
        for parameter in group["params"]:
            by_depth.setdefault(depths[id(parameter)], []).append(parameter)
        for depth, members in sorted(by_depth.items()):
            scale = decay ** (output - depth)
            scaled.append({**group, "params": members, "lr_scale": scale})
    return scaled


def find_width_rates(module: nn.Module) -> dict[int, float]:
    """Return the factors of the learning rate that parts of `module` declare, by parameter id.

    A part declares them as the attribute `lr_scales`, by the name of a parameter in it (muP).
    """
    rates: dict[int, float] = {}
    for part in dict(module.named_modules()).values():
        declared = getattr(part, "lr_scales", {})
        for name, rate in declared.items():
            rates[id(part.get_parameter(name))] = rate
    return rates


def scale_by_width(
    parameters: list[Any], rates: dict[int, float], decay: float
) -> list[dict[str, Any]]:
    """Return groups of `parameters` with the factors `rates` of the learning rate, by their id.

    The product of rate and weight decay stays, as in the authors' optimisers: `decay` is that of
    groups without one of their own.
    """
    scaled: list[dict[str, Any]] = []
    for group in as_groups(parameters):
        by_rate: dict[float, list[nn.Parameter]] = {}
        for parameter in group["params"]:
            by_rate.setdefault(rates.get(id(parameter), 1.0), []).append(parameter)
        group_decay = group.get("weight_decay", decay)
        for rate, members in sorted(by_rate.items(), reverse=True):
            settings = {
                "params": members,
                "lr_scale": group.get("lr_scale", 1.0) * rate,
                "weight_decay": group_decay / rate,
            }
            scaled.append(group | settings)
    return scaled
