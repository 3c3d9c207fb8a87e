"""Start of a fine-tuning: the weights of a file, and the parameters that remain as they are."""

from collections.abc import Collection, Iterable
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from lit_attn.attention.layer import Attention, TokenLayer
from lit_attn.config.training import StartWeights, Training
from lit_attn.schema.errors import ConfigError, plural, suggest

CONTAINERS = ("state_dict", "model", "model_state_dict")
"""Keys under which other programs keep the weights in a checkpoint."""
PREFIXES = ("network.", "model.", "module.", "_orig_mod.")
"""Beginnings that other programs, and this one in checkpoints, add to all names."""
SHOWN = 3
"""Names that a message shows."""

Shapes = dict[str, tuple[int, ...]]


def prepare_start(network: nn.Module, training: Training) -> str:
    """Load the weights of `training.weights` into a network, and freeze `training.freeze`.

    Returns a sentence about parameters that keep their initial values, or "". A network on the meta
    device is only compared with the file. Raises ConfigError if something does not fit.
    """
    message = ""
    if training.weights is not None:
        message = _load_weights(network, training.weights)
    if training.freeze:
        freeze_parameters(network, training.freeze)
    return message


def freeze_parameters(network: nn.Module, patterns: Iterable[str]) -> None:
    """Exclude the parameters that match a pattern from the training."""
    names = [name for name, _ in network.named_parameters()]
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ConfigError(
                f"training.freeze: '{pattern}' matches no parameter{suggest(pattern, names)}"
            )
    for name, parameter in network.named_parameters():
        if any(fnmatchcase(name, pattern) for pattern in patterns):
            parameter.requires_grad_(False)
    if not any(parameter.requires_grad for parameter in network.parameters()):
        raise ConfigError("training.freeze: freezes all parameters, so nothing is trained")


def _load_weights(network: nn.Module, weights: StartWeights) -> str:
    """Copy the weights of a file; return a sentence about those that the file lacks."""
    current = network.state_dict()
    stamp = weights.path.stat().st_mtime_ns if weights.path.is_file() else 0
    shapes = _read_shapes(weights.path, stamp, frozenset(current))
    kept = _find_kept(network, current, shapes, weights)
    if not any(parameter.is_meta for parameter in network.parameters()):
        saved = _read_weights(weights.path, current)
        with torch.no_grad():
            for name, tensor in current.items():
                if name not in kept:
                    tensor.copy_(saved[name])
        copied = _copy_projections(network, kept)
        kept = [name for name in kept if name not in copied]
    if not kept:
        return ""
    return (
        f"training.weights: {plural(len(kept), 'tensor')} of the network "
        f"keep their initial values: {_shorten(kept)}"
    )


def _copy_projections(network: nn.Module, kept: Collection[str]) -> set[str]:
    """Set the tensors that start as a copy of W where W was read and they were not.

    Returns their names.
    """
    copied = set()
    for path, module in network.named_modules():
        if not isinstance(module, Attention):
            continue
        prefix = f"{path}." if path else ""
        initial = module.residual.initial_state(module.proj.state_dict())
        names = {f"{prefix}residual.{name}" for name in initial}
        is_read = all(f"{prefix}proj.{name}" not in kept for name in module.proj.state_dict())
        if is_read and names.issubset(kept):
            module.copy_projection()
            copied |= names
    return copied


def _find_kept(
    network: nn.Module, current: dict[str, Tensor], shapes: Shapes, weights: StartWeights
) -> list[str]:
    """Return the names of the tensors that keep their initial values.

    Variants differ in their attention layers, so a layer may have tensors that the file lacks, and
    the file may have tensors that a layer lacks. Raises ConfigError for other differences.
    """
    layers = [f"{name}." for name, module in network.named_modules() if is_layer(module)]

    def may_differ(name: str) -> bool:
        return any(name.startswith(layer) for layer in layers)

    def is_new(name: str) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in weights.new)

    for pattern in weights.new:
        if not any(fnmatchcase(name, pattern) for name in current):
            raise ConfigError(
                f"training.weights.new: '{pattern}' matches no parameter{suggest(pattern, current)}"
            )
    kept = [name for name in current if is_new(name)]
    kept += [name for name in current if name not in shapes and may_differ(name)]
    lacking = [name for name in current if name not in shapes and name not in kept]
    _require_none(lacking, weights, "the file lacks")
    unused = [
        name for name in shapes if name not in current and not is_new(name) and not may_differ(name)
    ]
    _require_none(unused, weights, "the network lacks")
    for name, tensor in current.items():
        if name not in kept and shapes[name] != tuple(tensor.shape):
            raise ConfigError(
                f"training.weights: {weights.path}: '{name}' has the shape {shapes[name]} in the "
                f"file and {tuple(tensor.shape)} in the network; change the model (`match: none` "
                f"keeps ffn.width), or add '{name}' to training.weights.new"
            )
    return list(dict.fromkeys(kept))


def is_layer(module: nn.Module) -> bool:
    """Return True for an attention layer, in which variants can differ."""
    return isinstance(module, TokenLayer)


def _require_none(names: list[str], weights: StartWeights, problem: str) -> None:
    if names:
        raise ConfigError(
            f"training.weights: {weights.path}: {problem} {_shorten(names)}; change the model, or "
            "add the names or a pattern to training.weights.new"
        )


def _shorten(names: list[str]) -> str:
    """Return the first of the names, and the number of the others."""
    shown = ", ".join(names[:SHOWN])
    return shown if len(names) <= SHOWN else f"{shown} and {len(names) - SHOWN} more"


@cache
def _read_shapes(path: Path, stamp: int, names: frozenset[str]) -> Shapes:
    """Return the shapes in a file that was changed at `stamp`, for a network with `names`."""
    return {name: tuple(tensor.shape) for name, tensor in _read_weights(path, names).items()}


def _read_weights(path: Path, names: Iterable[str]) -> dict[str, Tensor]:
    """Return the tensors of a file by the names of the network, which has `names`."""
    try:
        if path.suffix == ".safetensors":
            content: Any = load_file(path)
        else:
            content = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError as error:
        raise ConfigError(f"training.weights.path: no file {path}") from error
    except Exception as error:
        # torch.load may raise any exception for a file that is none of its own.
        raise ConfigError(
            f"training.weights.path: {path} cannot be read as weights: {type(error).__name__}: "
            f"{' '.join(str(error).split())[:200]}"
        ) from error
    for key in CONTAINERS:
        if isinstance(content, dict) and isinstance(content.get(key), dict):
            content = content[key]
    tensors = {}
    if isinstance(content, dict):
        tensors = {name: value for name, value in content.items() if isinstance(value, Tensor)}
    if not tensors:
        raise ConfigError(f"training.weights.path: {path} has no tensors by name")
    return _strip_prefix(tensors, set(names))


def _strip_prefix(tensors: dict[str, Tensor], names: set[str]) -> dict[str, Tensor]:
    """Return tensors without a common beginning of their names, if more names then fit."""
    best = tensors
    for prefix in PREFIXES:
        stripped = {
            name.removeprefix(prefix): tensor
            for name, tensor in tensors.items()
            if name.startswith(prefix)
        }
        if len(names & stripped.keys()) > len(names & best.keys()):
            best = stripped
    return best
