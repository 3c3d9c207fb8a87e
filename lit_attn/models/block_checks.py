"""Checks of a model for a training block by block (FSDP, recomputation), before anything runs.

The model is on the meta device, so the checks need neither memory nor devices.
"""

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lit_attn.models.base import Model
from lit_attn.models.blocks import (
    SHARD_KEY,
    find_blocks,
    require_recomputable,
    require_shardable,
)
from lit_attn.models.factory import list_tensors
from lit_attn.schema.errors import ConfigError
from lit_attn.schema.plugins import explain_failure

LOG = logging.getLogger(__name__)
"""Logger of checks that cannot be made. Without a handler Python prints it to stderr."""

RECOMPUTE_KEY = "training.recompute: blocks"
"""Beginning of the errors about networks whose blocks cannot be recomputed."""


def check_blocks(model: Model, signature: Any, is_sharded: bool, is_recomputed: bool) -> None:
    """Raise ConfigError if `model` cannot be sharded, or its blocks cannot be recomputed."""
    try:
        with torch.device("meta"):
            network = model.build(signature, "meta")
    except Exception as error:
        # Code of a user can raise any exception.
        raise ConfigError(explain_failure(error, f"model: class {type(model).__name__}")) from error
    if is_sharded:
        require_shardable(network)
        if model.runs_foreign_code:
            require_reads_in_blocks(network, signature.sample())
    if is_recomputed:
        require_recomputable(network, RECOMPUTE_KEY)


def require_reads_in_blocks(network: nn.Module, sample: tuple[Tensor, ...]) -> None:
    """Raise ConfigError if `network` reads a weight of a block outside the block's forward pass.

    There, a device has only its part of the weight. `network` and `sample` are on the meta device.
    A warning says that a network cannot be computed on it and is not checked.
    """
    reads = BlockReads(find_blocks(network, SHARD_KEY))
    # Batch norms need more than one sample.
    batch = tuple(torch.cat([part, part]) for part in sample)
    try:
        with reads:
            network.train()(*batch)
    except Exception as error:
        # Code of a user can raise any exception, and it may work on a device with memory.
        reason = explain_failure(error, "the model on the meta device")
        LOG.warning("%s: not checked where weights are read: %s", SHARD_KEY, reason)
        return
    finally:
        reads.remove_hooks()
    if reads.outside:
        name, block_name = reads.outside[0]
        raise ConfigError(
            f"{SHARD_KEY}: the model reads '{name}' outside the forward pass of the block "
            f"'{block_name}', where a device has only a part of the weight; "
            "read it in the block's `forward`, or write ddp"
        )


class BlockReads(TorchFunctionMode):
    """Mode that records the reads of blocks' parameters outside the forward pass of their block.

    `outside` has the names of the parameter and of its block for each such read.
    """

    def __init__(self, blocks: dict[str, nn.Module]) -> None:
        super().__init__()
        self.outside: list[tuple[str, str]] = []
        self.running: Counter[str] = Counter()
        self.names: dict[int, tuple[str, str]] = {}
        self.handles = []
        for block_name, block in blocks.items():
            for name, parameter in block.named_parameters():
                self.names[id(parameter)] = (f"{block_name}.{name}", block_name)
            self.handles += [
                block.register_forward_pre_hook(self._count(block_name, 1)),
                block.register_forward_hook(self._count(block_name, -1)),
            ]

    def _count(self, block_name: str, change: int) -> Callable[..., None]:
        """Return a hook that counts the running forward passes of a block."""

        def count(*_: Any) -> None:
            self.running[block_name] += change

        return count

    def remove_hooks(self) -> None:
        for handle in self.handles:
            handle.remove()

    def __torch_function__(
        self,
        function: Any,
        types: Sequence[type],
        arguments: tuple[Any, ...] = (),
        options: dict[str, Any] | None = None,
    ) -> Any:
        """Run an operation, and record its parameters unless it reads only a shape or a type."""
        options = options or {}
        result = function(*arguments, **options)
        has_values = next(list_tensors(result), None) is not None
        if has_values:
            for tensor in list_tensors([arguments, options]):
                if id(tensor) in self.names:
                    name, block_name = self.names[id(tensor)]
                    if self.running[block_name] == 0:
                        self.outside.append((name, block_name))
        return result
