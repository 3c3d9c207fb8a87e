"""Ranks of a cell that srun or torchrun has started, each as a process of its own.

`read_ranks` of lit_attn.training.process_group reads the variables that torchrun sets: RANK,
WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE and GROUP_RANK (the number of the node).
"""

import contextlib
import os
import time
import traceback
from collections.abc import Iterator

from lit_attn.cells import failure

RENDEZVOUS = "LIT_ATTN_RENDEZVOUS"
"""Environment variable of each of several ranks: the file where they meet, or `env://` if torchrun
has started them."""
TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""Environment variables of a process that torchrun has started."""
NO_GPU = ("", "-1", "NoDevFiles")
"""Entries of CUDA_VISIBLE_DEVICES without a GPU; SLURM sets the last one on nodes without GPUs."""
ECHO_DELAY = 3.0
"""Seconds that a rank waits before it ends because of a lost connection. So srun and torchrun see
the rank that failed first end first, and name it."""


def is_started_by_torchrun() -> bool:
    """Return True if torchrun has started this process as one of several ranks."""
    return all(name in os.environ for name in TORCHRUN) and int(os.environ["WORLD_SIZE"]) > 1


def enter_slurm_task() -> int:
    """Set the variables of a rank from those of a task of srun, and return the rank.

    The tasks have numbers in the order of the nodes (`srun --distribution=block`).
    """
    rank = int(os.environ["SLURM_PROCID"])
    set_ranks(
        rank,
        int(os.environ["SLURM_STEP_NUM_TASKS"]),
        int(os.environ["SLURM_LOCALID"]),
        int(os.environ["SLURM_NODEID"]),
        int(os.environ["SLURM_STEP_NUM_NODES"]),
    )
    return rank


def set_ranks(rank: int, world: int, local_rank: int, node: int = 0, nodes: int = 1) -> None:
    """Set the variables of a rank for this process and the libraries that read them."""
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_RANK": str(local_rank),
        "LOCAL_WORLD_SIZE": str(world // nodes),
        # Lightning prefers NODE_RANK, and torchrun sets GROUP_RANK.
        "GROUP_RANK": str(node),
        "NODE_RANK": str(node),
    }


@contextlib.contextmanager
def let_first_failure_end_first() -> Iterator[None]:
    """Delay an exception of this context that another rank has caused (see ECHO_DELAY)."""
    try:
        yield
    except Exception as error:
        text = "".join(traceback.format_exception_only(error))
        if failure.is_echo(1, text):
            time.sleep(ECHO_DELAY)
        raise
