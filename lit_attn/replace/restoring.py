"""Restoring of a model after an error: its modules, and the states of its random generators."""

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import nn


class SavedAttribute(NamedTuple):
    """An attribute of a module; `entries` is a copy of its entries if it is a dictionary."""

    value: Any
    entries: dict[Any, Any] | None


@contextlib.contextmanager
def unchanged_after_an_error(model: nn.Module) -> Iterator[None]:
    """Undo the changes to the modules of `model`, and to the random generators, after an error.

    The attributes of every module are restored, which includes its parameters, children and hooks;
    the values of tensors are not copied, because no step changes them.
    """
    attributes = [(module, _copy_attributes(module)) for module in model.modules()]
    generators = _generator_states(model)
    try:
        yield
    except BaseException:
        for module, saved in attributes:
            _restore_attributes(module, saved)
        for device, state in generators:
            if device == "cpu":
                torch.set_rng_state(state)
            else:
                torch.get_device_module(device).set_rng_state(state, device)
        raise


def _copy_attributes(module: nn.Module) -> dict[str, SavedAttribute]:
    """Return every attribute of `module` by name; tensors and modules are not copied."""
    saved = {}
    for name, value in vars(module).items():
        entries = dict(value) if isinstance(value, dict) else None
        saved[name] = SavedAttribute(value, entries)
    return saved


def _restore_attributes(module: nn.Module, saved: dict[str, SavedAttribute]) -> None:
    """Restore the attributes; dictionaries stay the same objects, which hooks' handles refer to."""
    vars(module).clear()
    for name, attribute in saved.items():
        if attribute.entries is not None:
            attribute.value.clear()
            attribute.value.update(attribute.entries)
        vars(module)[name] = attribute.value


def _generator_states(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Return the devices of the model's parameters with the states of their generators."""
    states = [("cpu", torch.get_rng_state())]
    devices = {parameter.device for parameter in model.parameters()}
    for device in devices:
        if device.type not in ("cpu", "meta"):
            name = str(device)
            states.append((name, torch.get_device_module(device).get_rng_state(name)))
    return states
