"""Worker processes that read and augment samples for a cell."""

import contextlib
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from multiprocessing.util import get_temp_dir
from typing import Any

import numpy as np
import torch
from lightning.pytorch.utilities.seed import isolate_rng
from torch.utils.data import DataLoader, Dataset

from lit_attn.schema.errors import ConfigError

LONGEST = 107 - len("/listener-xxxxxxxx")
"""Largest length of a process's temporary folder, in characters, below which a socket can be."""

CHECK_SECONDS = 30.0
"""Time after which `check_samples` reads no further samples."""


def check_samples(count: int, read: Callable[[int], object]) -> int:
    """Call `read(place)` for places below `count` in a fixed random order; return their number.

    All samples of a small data set are read. For a large one the time ends at CHECK_SECONDS, and
    the samples are from everywhere in it.
    """
    end = time.monotonic() + CHECK_SECONDS
    for number, place in enumerate(np.random.default_rng(0).permutation(count).tolist(), 1):
        read(place)
        if time.monotonic() > end:
            return number
    return count


def read_batches(
    dataset: Dataset[Any],
    batches: Iterable[list[Any]],
    collate: Callable[[list[Any]], Any],
    workers: int,
    prepare: Callable[[], None] | None = None,
    pinned: bool = False,
) -> Iterator[Any]:
    """Yield `collate(samples)` for each list of sample indices.

    Each of `workers` processes calls `prepare` first; with 0 workers this process reads. `pinned`
    batches are copied to a GPU while it computes. Raises the ConfigErrors of the data set, and one
    if TMPDIR is too long for the sockets of workers: a worker would drop what it cannot send.
    """
    if workers and len(get_temp_dir()) > LONGEST:
        most = f"choose one of at most {LONGEST - len('/pymp-xxxxxxxx')} characters"
        text = "is too long for the sockets of data.workers"
        raise ConfigError(f"TMPDIR: {get_temp_dir()} {text}; {most}")
    loader = _Loader(
        dataset,
        batch_sampler=batches,
        num_workers=workers,
        collate_fn=collate,
        worker_init_fn=partial(_start_worker, prepare),
        # The default in a cell of the runner would import everything again in each worker.
        multiprocessing_context="fork" if workers else None,
        pin_memory=pinned and torch.cuda.is_available(),
        # A loader draws a seed for its workers, which is not used, from the global generator.
        generator=torch.Generator(),
    )
    try:
        yield from loader
    except ConfigError as error:
        # The message of an error in a worker begins with the worker's traceback.
        raise ConfigError(str(error).rpartition("ConfigError: ")[2].strip()) from error


@contextlib.contextmanager
def use_seed(seed: int) -> Iterator[None]:
    """Seed the global generators, from which timm and mmseg draw, and restore them at the end."""
    with isolate_rng(include_cuda=False):
        random.seed(seed)
        np.random.seed(seed)
        torch.default_generator.manual_seed(seed)
        yield


class _Loader(DataLoader[Any]):
    """DataLoader that forks its workers with SIGTERM blocked.

    A scheduler or the runner sends SIGTERM to all processes of a cell. The trainer saves a
    checkpoint first, and until then it needs its workers.
    """

    def __iter__(self) -> Any:
        if sys.platform != "linux":
            return super().__iter__()
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        try:
            return super().__iter__()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _start_worker(prepare: Callable[[], None] | None, worker: int) -> None:
    if sys.platform == "linux":
        threading.Thread(target=_exit_when_the_trainer_signals, daemon=True).start()
    if prepare is not None:
        prepare()


def _exit_when_the_trainer_signals() -> None:
    """Exit on a SIGTERM from the trainer itself; ignore SIGTERMs from other processes."""
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != os.getppid():
        continue
    os._exit(0)
