"""Blocks of a network: the repeated modules, each with its attention layers.

FSDP shards a network block by block (lit_attn.models.sharding), and torch.compile compiles it
block by block. Recomputation, also known as activation checkpointing or gradient checkpointing,
keeps the inputs of a block alone and computes the block once more for its gradient.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lit_attn.attention.layer import TokenLayer
from lit_attn.private_names.of_torch import raise_compiler_limit
from lit_attn.schema.errors import ConfigError

VARIANTS = 8
"""Compiled variants of a block, at most: for training and for evaluation, each in another
precision, in one shape and in any."""

SHARD_KEY = "training.strategy: fsdp"
"""Beginning of the errors about networks that cannot be sharded."""


def find_blocks(network: nn.Module, key: str) -> dict[str, nn.Module]:
    """Return the blocks of `network` by name, in the order of its modules.

    A block is the smallest module that contains an attention layer and is an item of an
    nn.ModuleList or nn.Sequential. Raises ConfigError, which begins with the configuration's `key`,
    for an attention layer outside a block.
    """
    modules = dict(network.named_modules())
    blocks: dict[str, nn.Module] = {}
    for path, module in modules.items():
        if not isinstance(module, TokenLayer):
            continue
        name = _find_block_of(path, modules)
        if name is None:
            raise ConfigError(
                f"{key}: the attention layer '{path}' is in no block: no module that contains it "
                "is an item of a torch.nn.ModuleList or torch.nn.Sequential; "
                "put the blocks of the model into such a list"
            )
        blocks[name] = modules[name]
    if not blocks:
        raise ConfigError(f"{key}: {type(network).__name__} has no blocks with attention layers")
    return _without_outer_blocks(blocks)


def _find_block_of(path: str, modules: dict[str, nn.Module]) -> str | None:
    """Return the name of the block that contains the layer at `path`."""
    name, _, _ = path.rpartition(".")
    while name:
        parent, _, _ = name.rpartition(".")
        if isinstance(modules[parent], nn.ModuleList | nn.Sequential):
            return name
        name = parent
    return None


def _without_outer_blocks(blocks: dict[str, nn.Module]) -> dict[str, nn.Module]:
    """Return the blocks that contain no other block."""
    inner = {}
    for name, block in blocks.items():
        contains_another = any(other.startswith(f"{name}.") for other in blocks)
        if not contains_another:
            inner[name] = block
    return inner


def require_shardable(network: nn.Module) -> None:
    """Raise ConfigError if `network` cannot be sharded block by block."""
    blocks = find_blocks(network, SHARD_KEY)
    owners: dict[int, str] = {}
    for name, parameter in network.named_parameters(remove_duplicate=False):
        if parameter.ndim == 0:
            raise ConfigError(
                f"{SHARD_KEY}: the parameter '{name}' is a number without axes, which has no"
                " parts; give it the shape (1,), or write ddp"
            )
        owner = ""
        for block_name in blocks:
            if name.startswith(f"{block_name}."):
                owner = block_name
        first_owner = owners.setdefault(id(parameter), owner)
        if first_owner != owner:
            raise ConfigError(
                f"{SHARD_KEY}: '{name}' is shared between '{first_owner or 'the model'}' and "
                f"'{owner or 'the model'}', which are gathered at different times; write ddp"
            )


def require_recomputable(network: nn.Module, key: str) -> None:
    """Raise ConfigError, which begins with `key`, if a block cannot be computed twice in a step."""
    for block_name, block in find_blocks(network, key).items():
        for name, module in block.named_modules():
            if getattr(module, "track_running_stats", False):
                path = f"{block_name}.{name}" if name else block_name
                raise ConfigError(
                    f"{key}: '{path}' ({type(module).__name__}) averages statistics over the steps,"
                    " and a block that is computed twice would count each step twice; write none"
                )


def recompute_blocks(network: nn.Module, key: str = "training.recompute") -> None:
    """Let the blocks of `network` keep their inputs only, and compute the rest for the gradient.

    The second computation has the random numbers of the first, so dropout is the same. This
    replaces `forward` of each block, so parameters keep their names, and it must follow any copy of
    the network.
    """
    for block in find_blocks(network, key).values():
        block.forward = _recomputed(block.forward)


def _recomputed(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return `forward`, computed once more in the backward pass."""

    @functools.wraps(forward)
    def compute(*inputs: Any, **named: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*inputs, **named)
        return checkpoint(forward, *inputs, use_reentrant=False, **named)

    return compute


def is_mostly_blocks(network: nn.Module) -> bool:
    """Return True if the blocks of `network` have most of its parameters, embeddings aside."""
    try:
        blocks = find_blocks(network, "")
    except ConfigError:
        return False
    in_blocks = sum(_count_without_embeddings(block) for block in blocks.values())
    return 2 * in_blocks > _count_without_embeddings(network)


def _count_without_embeddings(network: nn.Module) -> int:
    """Return the number of parameters of `network` that are not those of embeddings."""
    tables = set()
    for module in network.modules():
        if isinstance(module, nn.Embedding):
            tables.add(module.weight)
    return sum(p.numel() for p in network.parameters() if p not in tables)


def compile_blocks(network: nn.Module, key: str = "training.compile") -> None:
    """Compile the forward pass of each block of `network` alone, with torch.compile.

    Blocks that differ only in their tensors share one compiled graph, so a deep network takes as
    long to compile as a block. What surrounds a block is not compiled: the exchange of its weights,
    and its recomputation. Call this after any copy of the network, and before `recompute_blocks`.
    """
    blocks = find_blocks(network, key)
    # Blocks of one class share the code whose variants PyTorch counts, and it computes without a
    # word what it could not compile.
    raise_compiler_limit(VARIANTS * len(blocks))
    for block in blocks.values():
        block.forward = torch.compile(block.forward)
