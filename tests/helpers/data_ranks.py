"""Data modules from the view of one rank."""

from typing import Any, TypeVar

Module = TypeVar("Module")


def on_rank(module: Module, rank: int = 0, world: int = 1, step: int = 0, every: int = 1) -> Module:
    """Return `module` with a trainer of rank `rank` of `world` after `step` steps.

    The trainer evaluates at the end of every `every` epochs.
    """

    class Trainer:
        global_rank, world_size, global_step = rank, world, step
        check_val_every_n_epoch = every
        max_steps = -1
        default_root_dir = "missing"

    attached: Any = module
    attached.trainer = Trainer()
    return module
