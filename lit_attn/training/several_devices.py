"""Strategies of several devices, and what they require of a model."""

import inspect
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, Strategy
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lit_attn.config.training import Training
from lit_attn.models.factory import sum_output
from lit_attn.models.sharding import gather, load_optimizer, load_weights
from lit_attn.schema.errors import ConfigError
from lit_attn.schema.plugins import explain_failure


class ShardedStrategy(ModelParallelStrategy):
    """FSDP2 over all `world_size` devices, with checkpoints that any strategy can load.

    The task shards its network in `configure_model`. Lightning's own checkpoints of sharded models
    use torch's `get_state_dict`. That function makes a step of an optimiser without a state, so a
    checkpoint before the first step changes the results. It also takes several optimisers in one
    for an optimiser without a state. This strategy gathers tensor by tensor instead and computes
    nothing. Its files are those of a training without shards.
    """

    def __init__(self, world_size: int) -> None:
        super().__init__(
            data_parallel_size=world_size,
            tensor_parallel_size=1,
            save_distributed_checkpoint=False,
        )

    @property
    def lightning_restore_optimizer(self) -> bool:
        return True

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the full weights on rank 0; other ranks have None for sharded tensors."""
        assert self.lightning_module is not None
        weights: dict[str, Any] = gather(self.lightning_module.state_dict(), self.is_global_zero)
        return weights

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Return the full state on rank 0; other ranks have None for sharded tensors."""
        if isinstance(optimizer, LightningOptimizer):
            optimizer = optimizer.optimizer
        state: dict[str, Any] = gather(optimizer.state_dict(), self.is_global_zero)
        return state

    def load_checkpoint(
        self, checkpoint_path: str | Path, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Return the content of a checkpoint, whose tensors stay in the file until they are read.

        So the ranks of one machine share its memory. No object of another class is created,
        whatever Lightning says about `weights_only`.
        """
        checkpoint: dict[str, Any] = torch.load(
            checkpoint_path, map_location="cpu", mmap=True, weights_only=True
        )
        return checkpoint

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        assert self.lightning_module is not None
        load_weights(self.lightning_module, checkpoint["state_dict"], strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        pairs = zip(self.optimizers, checkpoint["optimizer_states"], strict=True)
        for optimizer, state in pairs:
            load_optimizer(optimizer, state)


LOG = logging.getLogger(__name__)
"""Logger of checks that cannot be made. Without a handler Python prints it to stderr."""

KNOWN_PACKAGES = ("lit_attn", "mmseg", "timm", "torch")
"""Packages whose modules have neither a changing graph nor buffers of one device alone."""

SYNC_OPTIONS = ("forward_sync_buffers", "broadcast_buffers")
"""Name of DDP's option that broadcasts buffers in each step, since PyTorch 2.13 and before."""

SHOWN = 3
"""Parameters that an error names."""


def leaves_parameters_unused(network: nn.Module) -> bool:
    """Return True if a module of `network` says that parameters can stay without a gradient.

    The module says so with a true attribute `leaves_parameters_unused`.
    """
    return any(getattr(module, "leaves_parameters_unused", False) for module in network.modules())


def choose_strategy(
    network: nn.Module, world_size: int, accumulate: int, is_sharded: bool = False
) -> Strategy | str:
    """Return Lightning's strategy for `network` on `world_size` devices.

    `accumulate` is the number of micro-batches of a step.
    """
    if world_size == 1:
        return "auto"
    if is_sharded:
        return ShardedStrategy(world_size)
    return DDPStrategy(**choose_ddp_options(network, accumulate))


def choose_ddp_options(network: nn.Module, accumulate: int) -> dict[str, Any]:
    """Return the options of DistributedDataParallel for `network`.

    DDP waits for the gradients of all parameters unless it searches the graph of every step for
    unused ones, which takes time.
    """
    has_unused = leaves_parameters_unused(network)
    is_known = has_known_code(network)
    return {
        # Gradients are not copied to the buckets that the devices exchange.
        "gradient_as_bucket_view": True,
        "find_unused_parameters": has_unused,
        # A static graph is recorded in the first backward pass, which has to exchange gradients. A
        # graph that changes later would leave gradients unexchanged without an error.
        "static_graph": is_known and not has_unused and accumulate == 1,
        # The buffers of known modules are equal on all devices: batch norms share their statistics,
        # and mixtures sum theirs. Other modules may rely on the buffers of the first device.
        _name_sync_option(): not is_known,
    }


def _name_sync_option() -> str:
    """Return the one of SYNC_OPTIONS that this version of PyTorch takes without a warning."""
    accepted = inspect.signature(DistributedDataParallel).parameters
    return next(name for name in SYNC_OPTIONS if name in accepted)


def has_known_code(network: nn.Module) -> bool:
    """Return True if all modules of `network` belong to this package or to KNOWN_PACKAGES.

    Such a network has the same graph in every step, and equal buffers on all devices.
    """
    for module in network.modules():
        package = type(module).__module__.partition(".")[0]
        if package not in KNOWN_PACKAGES:
            return False
    return True


def require_shared_losses(network: nn.Module) -> None:
    """Raise ValueError if a loss of mmsegmentation cannot be averaged over several devices.

    Every device weights its mean by its number of labelled pixels, so each loss must be a mean over
    these pixels: a cross-entropy with `avg_non_ignore` and without weights of classes.
    """
    for module in network.modules():
        head_losses = getattr(module, "loss_decode", None)
        if head_losses is None:
            continue
        losses = head_losses if isinstance(head_losses, nn.ModuleList) else [head_losses]
        for loss in losses:
            is_mean = getattr(loss, "avg_non_ignore", False)
            has_weights = getattr(loss, "class_weight", None) is not None
            if not is_mean or has_weights:
                raise ValueError(
                    f"{type(loss).__name__} of {type(module).__name__} is no mean over labelled "
                    "pixels, so several devices would compute another loss; set training.devices: "
                    "1, or avg_non_ignore=True in loss_decode of a CrossEntropyLoss"
                )


def require_gradients(network: nn.Module, sample: tuple[Tensor, ...], training: Training) -> None:
    """Raise ConfigError if parameters of `network` get no gradient and no module says so.

    `network` and `sample` are on the meta device. On one device such a model trains, on several
    devices DDP ends the first step with an error of many lines, and FSDP accepts it. A warning says
    that a model cannot be trained on the meta device and is not checked.
    """
    has_ddp = training.is_distributed and not training.is_sharded
    if not has_ddp or leaves_parameters_unused(network):
        return
    try:
        unused = _find_unused_parameters(network, sample)
    except Exception as error:
        # Code of a user can raise any exception, and it may work on a device with memory.
        reason = explain_failure(error, "the model on the meta device")
        LOG.warning("training.devices: not checked that all parameters are used: %s", reason)
        return
    if unused:
        names = ", ".join(unused[:SHOWN])
        if len(unused) > SHOWN:
            names += f" and {len(unused) - SHOWN} more"
        raise ConfigError(
            f"training.devices: {training.devices} devices need a gradient for every parameter, "
            f"but the model's output does not depend on {names}; leave them out, "
            "or set the attribute `leaves_parameters_unused = True` of their module"
        )


def _find_unused_parameters(network: nn.Module, sample: tuple[Tensor, ...]) -> list[str]:
    """Return the names of the trained parameters on which the network's output does not depend."""
    # Batch norms need more than one sample.
    batch = tuple(torch.cat([part, part]) for part in sample)
    output = network.train()(*batch)
    parameters = {name: p for name, p in network.named_parameters() if p.requires_grad}
    total = sum_output(output)
    gradients = torch.autograd.grad(total, list(parameters.values()), allow_unused=True)
    pairs = zip(parameters, gradients, strict=True)
    return [name for name, gradient in pairs if gradient is None]
