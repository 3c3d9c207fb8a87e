"""Data modules from the view of one rank."""

from typing import Any, TypeVar

Module = TypeVar("Module")


def on_rank(module: Module, rank: int = 0, world: int = 1, step: int = 0) -> Module:
    """Return `module` with a trainer of rank `rank` of `world` that has done `step` steps."""

    class Trainer:
        global_rank, world_size, global_step = rank, world, step

    attached: Any = module
    attached.trainer = Trainer()
    return module
