"""Networks whose weights are sharded over several devices with FSDP2.

Each device keeps an equal part of every parameter, of its gradient and of the optimiser's state.
The devices gather the parameters of one block at a time (`torch.distributed.fsdp.fully_shard`). All
of them must call a sharded network equally often, because each call waits for the other devices.

Parameters stay in float32 (in the type that they have) and mixed precision is that of autocast, as
on one device. So a sharded training computes what an unsharded one computes.
"""

import contextlib
import functools
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, distribute_tensor

from lit_attn.models.blocks import SHARD_KEY, find_blocks
from lit_attn.schema.errors import ConfigError

READ_OUTSIDE = (
    f"{SHARD_KEY}: code outside the network's forward pass reads a weight, of which each device"
    " has a part; read it in `forward`, or write ddp"
)
"""Error about a loss of a user that reads a weight of a block."""

_GATHERED: weakref.WeakSet[nn.Module] = weakref.WeakSet()
"""Sharded networks whose weights outside the blocks stay gathered during the present call."""


def shard(network: nn.Module, mesh: DeviceMesh, methods: Sequence[str] = ()) -> None:
    """Shard `network` over the devices of `mesh`, first its blocks and then the rest, in place.

    All devices must have the same weights. `methods` names further methods of the network that are
    called from outside, as `forward` is; those that it does not have are left out.
    """
    for parameter in network.parameters():
        # FSDP takes no transposed weights, such as those that replace a Conv1D of GPT-2.
        parameter.data = parameter.data.contiguous()
    for block in find_blocks(network, SHARD_KEY).values():
        fully_shard(block, mesh=mesh, reshard_after_forward=True)
    # The rest is needed at the beginning and at the end of the network.
    fully_shard(network, mesh=mesh, reshard_after_forward=False)
    for method in methods:
        if hasattr(network, method):
            _gather_in(network, method)


def _gather_in(network: nn.Module, name: str) -> None:
    """Let the method `name` of a sharded network gather weights as `forward` does.

    Only the outermost call of such methods does so: FSDP would release the weights at the end of an
    inner call. Where all weights are gathered, no call does.
    """
    direct = getattr(network, name)
    register_fsdp_forward_method(network, name)
    gathering = getattr(network, name)

    # The signature stays that of the method, from which the adapter of a LightningModule reads the
    # arguments.
    @functools.wraps(direct)
    def call(*inputs: Any, **named: Any) -> Any:
        if network in _GATHERED:
            return direct(*inputs, **named)
        _GATHERED.add(network)
        try:
            return gathering(*inputs, **named)
        finally:
            _GATHERED.discard(network)

    setattr(network, name, call)


def is_sharded(network: nn.Module) -> bool:
    """Return True if the weights of `network` are sharded."""
    return isinstance(network, FSDPModule)


def _list_sharded(network: nn.Module) -> list[FSDPModule]:
    """Return the modules of `network` whose weights are gathered together."""
    return [module for module in network.modules() if isinstance(module, FSDPModule)]


def reshard(network: nn.Module) -> None:
    """Release the gathered weights of `network`; without this, those outside its blocks stay."""
    for module in _list_sharded(network):
        module.reshard()


@contextlib.contextmanager
def gathered_weights(network: nn.Module) -> Iterator[None]:
    """Keep all weights of `network` on every device in this context.

    In it, devices may call the network unequally often. Every device must enter it. Gradients
    cannot be computed. A network that is not sharded stays as it is.
    """
    modules = _list_sharded(network)
    for module in modules:
        module.set_reshard_after_forward(False, recurse=False)
        module.unshard()
    _GATHERED.add(network)
    try:
        yield
    finally:
        _GATHERED.discard(network)
        for module in modules:
            module.set_reshard_after_forward(module is not network, recurse=False)
            module.reshard()


def gather(values: Any, is_kept: bool) -> Any:
    """Return the nested `values` with full tensors on the CPU in place of sharded ones.

    Every device must call this with the same structure. A device that does not keep the tensors
    (`is_kept` is False) gets None in their places. One tensor at a time is gathered.
    """
    if isinstance(values, DTensor):
        full = values.full_tensor().detach()
        return full.cpu() if is_kept else None
    if isinstance(values, dict):
        return {key: gather(value, is_kept) for key, value in values.items()}
    if isinstance(values, list | tuple):
        return type(values)([gather(value, is_kept) for value in values])
    return values


def take_part(full: Tensor, like: Tensor) -> Tensor:
    """Return this device's part of a `full` tensor, sharded as `like` is.

    No device sends anything. The tensor itself is returned if `like` is not sharded or has another
    shape.
    """
    if not isinstance(like, DTensor) or full.shape != like.shape:
        return full
    return distribute_tensor(full, like.device_mesh, like.placements, src_data_rank=None)


def to_plain(value: Tensor) -> Tensor:
    """Return the full tensor of a sharded `value` on every device; another `value` as it is.

    Every device must call this if the value is sharded.
    """
    return value.full_tensor() if isinstance(value, DTensor) else value


def require_complete(loss: Tensor) -> None:
    """Raise ConfigError if `loss` depends on parts of weights, so that it differs by device."""
    if isinstance(loss, DTensor):
        raise ConfigError(READ_OUTSIDE)


def load_weights(module: nn.Module, weights: dict[str, Tensor], strict: bool = True) -> None:
    """Load full `weights` into a `module` with sharded parameters.

    Raises RuntimeError if they do not fit, as `load_state_dict` does.
    """
    current = module.state_dict()
    parts = {}
    for name, weight in weights.items():
        parts[name] = take_part(weight, current[name]) if name in current else weight
    module.load_state_dict(parts, strict=strict)


def load_optimizer(optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
    """Load the state of an optimiser with full tensors into one of sharded parameters."""
    optimizer.load_state_dict(_shard_state(optimizer, saved))


def _shard_state(optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> dict[str, Any]:
    """Return `saved` with this device's parts of the tensors that belong to a parameter's entries.

    Other tensors, such as the count of the steps, stay as they are.
    """
    if "optimizers" in saved:
        # Several optimisers as one (lit_attn.optim.muon).
        joined: Any = optimizer
        pairs = zip(joined.optimizers, saved["optimizers"], strict=True)
        return {"optimizers": [_shard_state(part, state) for part, state in pairs]}
    parameters = []
    for group in optimizer.param_groups:
        parameters += group["params"]
    numbers = []
    for group in saved["param_groups"]:
        numbers += group["params"]
    states = dict(saved["state"])
    for number, parameter in zip(numbers, parameters, strict=True):
        if number not in states:
            # A parameter that never had a gradient.
            continue
        parts = {}
        for name, value in states[number].items():
            is_tensor = isinstance(value, Tensor)
            parts[name] = take_part(value, parameter) if is_tensor else value
        states[number] = parts
    return {**saved, "state": states}
