"""Program that trains a cell one of whose ranks may end itself.

`python sharded_cells.py CELL_DIR END` trains the cell to its result if END is `never`. With
`stop:N` the last rank sends itself SIGTERM after step N. With `gathering` the last rank is killed
while the ranks gather their second checkpoint, and with `writing` rank 0 is killed when that
checkpoint is written and has no name yet.
"""

import os
import shutil
import signal
import sys
from collections.abc import Callable
from typing import Any, NoReturn

import lightning as L
from torch.optim import Optimizer

from lit_attn import train
from lit_attn.models.sharding import gather
from lit_attn.training import checkpoints
from lit_attn.training.recording import Progress
from lit_attn.training.several_devices import ShardedStrategy

# The ranks agree before every step, so that a stopped cell stops at a known step.
checkpoints.AGREEMENT_SECONDS = 0.0

SECOND = 2


def is_last_rank() -> bool:
    rank = int(os.environ.get("LOCAL_RANK", "0"))
    return rank == int(os.environ.get("WORLD_SIZE", "1")) - 1


def kill_itself() -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("a killed process does nothing")


def stop_after(step: int) -> None:
    original = Progress.on_train_batch_end

    def end_batch(self: Progress, trainer: L.Trainer, *arguments: Any) -> None:
        original(self, trainer, *arguments)
        if trainer.global_step == step and is_last_rank():
            os.kill(os.getpid(), signal.SIGTERM)

    Progress.on_train_batch_end = end_batch  # type: ignore[method-assign]


def at_second(act: Callable[[], None]) -> Callable[[], None]:
    """Return a function whose second call calls `act`."""
    calls: list[None] = []

    def count() -> None:
        calls.append(None)
        if len(calls) == SECOND:
            act()

    return count


def die_gathering() -> None:
    count = at_second(kill_itself)
    original = ShardedStrategy.optimizer_state

    def optimizer_state(self: ShardedStrategy, optimizer: Optimizer) -> dict[str, Any]:
        if is_last_rank():
            # The other ranks wait for the rest of the state.
            gather(list(optimizer.state_dict()["state"].values())[:1], True)
            count()
        return original(self, optimizer)

    ShardedStrategy.optimizer_state = optimizer_state  # type: ignore[method-assign]


def die_writing() -> None:
    count = at_second(kill_itself)
    original = shutil.move

    def move(source: Any, target: Any, *arguments: Any, **options: Any) -> Any:
        if str(target).endswith(".ckpt"):
            count()
        return original(source, target, *arguments, **options)

    shutil.move = move


def main(folder: str, end: str) -> int:
    if end.startswith("stop:"):
        stop_after(int(end.removeprefix("stop:")))
    elif end == "gathering":
        die_gathering()
    elif end == "writing":
        die_writing()
    return train.main([folder])


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
