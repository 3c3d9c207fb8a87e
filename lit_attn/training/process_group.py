"""The ranks of one cell: which rank this process is, its device, and what all ranks agree on."""

import contextlib
import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import distributed

from lit_attn.cells.ranks import RENDEZVOUS
from lit_attn.schema.errors import ConfigError


class RankInfo(NamedTuple):
    """Rank and world size of this process within its cell, whose ranks meet at `init_method`."""

    rank: int = 0
    world_size: int = 1
    init_method: str = ""


def read_rank_info() -> RankInfo:
    """Read this process's rank and world size from the variables of lit_attn.cells.ranks."""
    if RENDEZVOUS not in os.environ:
        return RankInfo()
    rank, world_size = int(os.environ["LOCAL_RANK"]), int(os.environ["WORLD_SIZE"])
    return RankInfo(rank, world_size, f"file://{os.environ[RENDEZVOUS]}")


def choose_device(accelerator: str, ranks: RankInfo) -> torch.device:
    """Return the device on which this rank trains; raise ConfigError if it is not available."""
    if accelerator == "auto":
        accelerator = "cuda" if torch.cuda.is_available() else "cpu"
    if accelerator == "cuda" and not torch.cuda.is_available():
        raise ConfigError("training.accelerator: torch finds no CUDA device")
    if ranks.world_size == 1 or accelerator == "cpu":
        return torch.device(accelerator)
    if (visible := torch.cuda.device_count()) < (count := ranks.world_size):
        raise ConfigError(f"training.devices: {count} exceeds the {visible} visible CUDA devices")
    torch.cuda.set_device(ranks.rank)
    return torch.device(accelerator, ranks.rank)


class ProcessGroup:
    """The ranks of one cell, seen from one of them."""

    def __init__(self, ranks: RankInfo, device: torch.device) -> None:
        self.ranks = ranks
        self.device = device
        self.world_size = ranks.world_size
        # A second group beside the one that averages gradients: agreeing must not wait for the GPU.
        self.gloo: Any = distributed.new_group(backend="gloo") if ranks.world_size > 1 else None

    @property
    def is_rank_zero(self) -> bool:
        """True on the rank that writes files."""
        return self.ranks.rank == 0

    def maximum(self, number: int) -> int:
        """Return the largest `number` of all ranks. Every rank must call this."""
        if self.gloo is None:
            return number
        shared = torch.tensor(number)
        distributed.all_reduce(shared, distributed.ReduceOp.MAX, group=self.gloo)
        return int(shared)

    def broadcast(self, path: Path | None) -> Path | None:
        """Return rank 0's `path`. Every rank must call this."""
        if self.gloo is None:
            return path
        shared = [path]
        distributed.broadcast_object_list(shared, src=0, group=self.gloo)
        return shared[0]


@contextlib.contextmanager
def join_process_group(accelerator: str) -> Iterator[ProcessGroup]:
    """Join the cell's process group; a cell of one process needs none.

    Raises ConfigError if `accelerator` is not available.
    """
    ranks = read_rank_info()
    device = choose_device(accelerator, ranks)
    if ranks.world_size == 1:
        yield ProcessGroup(ranks, device)
        return
    # All ranks together use the cores that one process would use.
    torch.set_num_threads(max(1, torch.get_num_threads() // ranks.world_size))
    backend, device_id = ("nccl", device) if device.type == "cuda" else ("gloo", None)
    meet = partial(distributed.init_process_group, backend, init_method=ranks.init_method)
    meet(rank=ranks.rank, world_size=ranks.world_size, device_id=device_id)
    yield ProcessGroup(ranks, device)
    # Not in a `finally`: after an error another rank may still wait in a collective operation, and
    # this call would wait for that rank.
    distributed.destroy_process_group()
