"""The ranks of one cell: which rank this process is, its device, and what all ranks agree on.

The runner forks the ranks of a cell on one machine (lit_attn.cells.ranks). On several machines srun
(lit_attn.cells.nodes) or torchrun starts them. All of them set the same environment variables.
"""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import distributed

from lit_attn.cells.launched import NO_GPU, RENDEZVOUS
from lit_attn.schema.errors import ConfigError


class Ranks(NamedTuple):
    """Rank of this process and number of ranks: of its cell, and of its cell on this machine."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1

    @property
    def nodes(self) -> int:
        """Number of machines, which all have equally many ranks."""
        return self.world_size // self.local_world_size


def read_ranks() -> Ranks:
    """Return the rank of this process as the environment gives it (lit_attn.cells.launched)."""
    if RENDEZVOUS not in os.environ:
        return Ranks()
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    return Ranks(*[int(os.environ[name]) for name in names])


def choose_device(accelerator: str, rank: int, world_size: int) -> torch.device:
    """Return the device on which a rank trains; raise ConfigError if it is not available.

    `rank` and `world_size` are those on this machine.
    """
    if accelerator == "auto":
        accelerator = "cuda" if torch.cuda.is_available() else "cpu"
        chosen = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        if accelerator == "cpu" and chosen not in NO_GPU and rank == 0:
            print(
                f"warning: CUDA_VISIBLE_DEVICES={chosen}: torch finds no such GPU, "
                "so this cell trains on the CPU",
                flush=True,
            )
    if accelerator == "cuda" and not torch.cuda.is_available():
        raise ConfigError("training.accelerator: torch finds no CUDA device")
    if world_size == 1 or accelerator == "cpu":
        return torch.device(accelerator)
    visible = torch.cuda.device_count()
    if visible < world_size:
        raise ConfigError(
            f"training.devices: {world_size} exceeds the {visible} visible CUDA devices"
        )
    torch.cuda.set_device(rank)
    return torch.device(accelerator, rank)


class ProcessGroup:
    """The ranks of one cell, seen from one of them."""

    def __init__(self, rank: int, world_size: int, device: torch.device, nodes: int = 1) -> None:
        self.rank = rank
        self.device = device
        self.world_size = world_size
        self.nodes = nodes
        # A second group beside the one that averages gradients: agreeing must not wait for the GPU.
        self.gloo: Any = distributed.new_group(backend="gloo") if world_size > 1 else None

    @property
    def is_rank_zero(self) -> bool:
        """True on the rank that writes files."""
        return self.rank == 0

    def maximum(self, number: int) -> int:
        """Return the largest `number` of all ranks. Every rank must call this."""
        (largest,) = self.maxima([number])
        return largest

    def maxima(self, numbers: list[int]) -> list[int]:
        """Return the largest of all ranks for each of `numbers`. Every rank must call this."""
        if self.gloo is None:
            return numbers
        shared = torch.tensor(numbers)
        distributed.all_reduce(shared, distributed.ReduceOp.MAX, group=self.gloo)
        return shared.tolist()

    def broadcast(self, path: Path | None) -> Path | None:
        """Return rank 0's `path`. Every rank must call this."""
        if self.gloo is None:
            return path
        shared = [path]
        distributed.broadcast_object_list(shared, src=0, group=self.gloo)
        return shared[0]


@contextlib.contextmanager
def join_process_group(accelerator: str) -> Iterator[ProcessGroup]:
    """Join the cell's process group; raise ConfigError if `accelerator` is not available."""
    rank, world_size, local_rank, local_world_size = ranks = read_ranks()
    device = choose_device(accelerator, local_rank, local_world_size)
    if world_size == 1:
        yield ProcessGroup(rank, world_size, device)
        return
    is_cuda = device.type == "cuda"
    if is_cuda and device.index is None:
        # The only rank on this machine; NCCL needs the number of its GPU.
        device = torch.device("cuda", 0)
    rendezvous = os.environ[RENDEZVOUS]
    if ranks.nodes == 1 and rendezvous != "env://":
        # The runner has given all ranks together the cores that one process would use.
        torch.set_num_threads(max(1, torch.get_num_threads() // world_size))
    backend = "nccl" if is_cuda else "gloo"
    distributed.init_process_group(
        backend,
        init_method=rendezvous if "://" in rendezvous else f"file://{rendezvous}",
        rank=rank,
        world_size=world_size,
        device_id=device if is_cuda else None,
    )
    yield ProcessGroup(rank, world_size, device, ranks.nodes)
    # Not in a `finally`: after an error another rank may still wait in a collective operation, and
    # this call would wait for that rank.
    distributed.destroy_process_group()
