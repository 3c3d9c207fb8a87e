"""The processes that train one cell together, one for each of its devices."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import distributed


class Group:
    """This process is `rank` of `world`; what all of them have to agree on."""

    def __init__(self, rank: int = 0, world: int = 1) -> None:
        self.rank = rank
        self.world = world
        self.talk: distributed.ProcessGroup | None = None
        if world > 1:
            # Beside the group that averages gradients: to agree must not wait for the GPU.
            talk = distributed.new_group(backend="gloo")
            assert isinstance(talk, distributed.ProcessGroup)
            self.talk = talk

    @property
    def is_first(self) -> bool:
        """Whether this is the one that writes files."""
        return self.rank == 0

    def most(self, number: int) -> int:
        """The largest of all ranks' numbers; all have to ask."""
        if self.talk is None:
            return number
        shared = torch.tensor(number)
        distributed.all_reduce(shared, distributed.ReduceOp.MAX, group=self.talk)
        return int(shared)

    def from_first(self, path: Path | None) -> Path | None:
        """What the first rank says; all have to ask."""
        if self.talk is None:
            return path
        shared = [path]
        distributed.broadcast_object_list(shared, src=0, group=self.talk)
        return shared[0]


@contextlib.contextmanager
def joined(rank: int, world: int, meeting: str, device: torch.device) -> Iterator[Group]:
    """The group of `world` processes; `meeting` is torch's `init_method`, `device` this process's.

    A world of one has no use for it.
    """
    if world == 1:
        yield Group()
        return
    # The cell's share of the cores is what one process would use.
    torch.set_num_threads(max(1, torch.get_num_threads() // world))
    distributed.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        init_method=meeting,
        rank=rank,
        world_size=world,
        device_id=device if device.type == "cuda" else None,
    )
    yield Group(rank, world)
    # Not after an error: another rank may still wait in a collective, and so would this.
    distributed.destroy_process_group()
