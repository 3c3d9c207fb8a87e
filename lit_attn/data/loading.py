"""Processes that read and augment samples for a cell, and live as long as it needs them."""

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable
from multiprocessing.util import get_temp_dir
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from lit_attn.schema.errors import ConfigError

LONGEST = 107 - len("/listener-xxxxxxxx")
"""Characters of a folder in which there is room for the path of a socket."""


def loader(
    dataset: Dataset[Any],
    batches: Iterable[list[Any]],
    together: Callable[[list[Any]], Any],
    workers: int,
    prepare: Callable[[], None] | None = None,
    pinned: bool = False,
) -> DataLoader[Any]:
    """What `together` makes of the samples of each of `batches`, which are lists of indices.

    Each of `workers` processes calls `prepare` first; with 0 of them this process reads. `pinned`
    batches are copied to a GPU while it computes. Raises ConfigError where TMPDIR is too long for
    them to hand over what they read.
    """
    if workers and len(get_temp_dir()) > LONGEST:
        raise ConfigError(
            f"TMPDIR: {get_temp_dir()} is too long for the sockets of data.workers; choose one of "
            f"at most {LONGEST - len('/pymp-xxxxxxxx')} characters"
        )
    return _Loader(
        dataset,
        batch_sampler=batches,
        num_workers=workers,
        collate_fn=together,
        worker_init_fn=_Begin(prepare),
        # In a runner's cell the default is to start each by importing everything anew.
        multiprocessing_context="fork" if workers else None,
        pin_memory=pinned and torch.cuda.is_available(),
        # Its own, for a loader draws a seed for workers from the global one, which goes unused.
        generator=torch.Generator(),
    )


class _Loader(DataLoader[Any]):
    """Forks its workers with SIGTERM blocked, so that there is no moment at which one ends them.

    A scheduler, or the runner, tells all processes of a cell to go, and the trainer saves before it
    does: until then it needs what they read.
    """

    def __iter__(self) -> Any:
        if sys.platform != "linux":
            return super().__iter__()
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        try:
            return super().__iter__()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


class _Begin:
    """What a worker does first."""

    def __init__(self, prepare: Callable[[], None] | None) -> None:
        self.prepare = prepare

    def __call__(self, worker: int) -> None:
        if sys.platform == "linux":
            threading.Thread(target=_go_when_the_trainer_says, daemon=True).start()
        if self.prepare is not None:
            self.prepare()


def _go_when_the_trainer_says() -> None:
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != os.getppid():
        continue
    os._exit(0)
