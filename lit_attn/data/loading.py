"""Worker processes that prepare the batches of a cell ahead of its device."""

import contextlib
import os
import random
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.reduction import ForkingPickler
from multiprocessing.util import get_temp_dir
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.multiprocessing.reductions import reduce_tensor
from torch.utils.data import DataLoader, Dataset, Sampler, get_worker_info

from lit_attn.private_names.of_torch import end_workers
from lit_attn.schema.errors import ConfigError

LONGEST = 107 - len("/listener-xxxxxxxx")
"""Largest length of a process's temporary folder, in characters, below which a socket can be."""

MOST_WORKERS = 8
"""Most worker processes that a cell starts unless `data.workers` says how many."""

AHEAD = 2
"""Batches that each worker has ready or in the making."""

SENT_BY_VALUE = 2**19
"""Most bytes of a tensor that a worker sends through its pipe."""

NUMPY_TYPES = frozenset({torch.bool, torch.uint8, torch.int32, torch.int64, torch.float32})
"""Types of the tensors that are sent by value."""

SWITCH_SECONDS = 0.0005
"""Time after which a thread of a worker lets another one run."""

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


def choose_workers(configured: int | None, is_worthwhile: bool, device: torch.device) -> int:
    """Return the number of worker processes that prepare the batches of one process.

    `configured` is `data.workers`; None chooses by the device, and takes no worker unless the
    samples are decoded or augmented on the CPU (`is_worthwhile`). A GPU waits for a batch that is
    late, so all cores of the process but one work ahead of it, at least two. The cores of a process
    are torch's threads: the machine's cores, divided among the cells and ranks that run at once. On
    a CPU the cores train, and only a quarter of them prepares batches.
    """
    if configured is not None:
        return configured
    if not is_worthwhile:
        return 0
    cores = torch.get_num_threads()
    if device.type == "cuda":
        return min(MOST_WORKERS, max(2, cores - 1))
    return min(MOST_WORKERS, cores // 4)


def start_copy(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return `tensor` on `device`, without waiting until a GPU has copied it.

    From memory that is not pinned, the copy would start after all work of the GPU so far.
    """
    if device.type == "cuda" and not tensor.is_cuda:
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


class BatchWorkers:
    """Worker processes that make batches ahead of their use, from the first `read` to `close`.

    `make(key)` returns the batch of a key, a picklable value. A worker is a copy of this process at
    the time of the first read; it calls `prepare` first. With 0 workers this process makes each
    batch when it is needed. `is_pinned` batches lie in memory from which a GPU copies while it
    computes.
    """

    def __init__(
        self,
        make: Callable[[Any], Any],
        workers: int,
        prepare: Callable[[], None] | None = None,
        *,
        is_pinned: bool = False,
    ) -> None:
        self.make = make
        self.workers = workers
        self.prepare = prepare
        self.is_pinned = is_pinned
        self._keys = _Keys()
        self._loader: _Loader | None = None
        self._finalizer: weakref.finalize[[_Loader], BatchWorkers] | None = None

    def read(self, keys: Iterable[Any]) -> Iterator[Any]:
        """Yield `make(key)` for each key, in order. A new read abandons the one before it.

        Raises the ConfigErrors of `make`, and one if TMPDIR is too long for the sockets of workers:
        a worker would drop what it cannot send.
        """
        if not self.workers:
            for key in keys:
                yield self.make(key)
            return
        if self._loader is None:
            self._loader = self._start()
            self._finalizer = weakref.finalize(self, _end_workers, self._loader)
            # At the exit of the process torch ends all workers.
            self._finalizer.atexit = False
        self._keys.values = keys
        try:
            yield from self._loader
        except ConfigError as error:
            # The message of an error in a worker begins with the worker's traceback.
            raise ConfigError(str(error).rpartition("ConfigError: ")[2].strip()) from error

    def close(self) -> None:
        """End the workers. A later read starts new ones.

        They also end when the last reference to this object is gone.
        """
        self._loader = None
        if self._finalizer is not None:
            self._finalizer()

    def _start(self) -> "_Loader":
        """Return a loader whose workers live until it is closed; raise ConfigError."""
        if len(get_temp_dir()) > LONGEST:
            most = LONGEST - len("/pymp-xxxxxxxx")
            raise ConfigError(
                f"TMPDIR: {get_temp_dir()} is too long for the sockets of data.workers; "
                f"choose one of at most {most} characters"
            )
        return _Loader(
            _Made(self.make, self.prepare),
            batch_size=None,
            sampler=self._keys,
            num_workers=self.workers,
            persistent_workers=True,
            prefetch_factor=AHEAD,
            collate_fn=_keep,
            worker_init_fn=_start_worker,
            # The default in a cell of the runner would import everything again in each worker.
            multiprocessing_context="fork",
            pin_memory=self.is_pinned,
            # A loader draws a seed for its workers, which is not used, from the global generator.
            generator=torch.Generator(),
        )


@contextlib.contextmanager
def use_seed(seed: int) -> Iterator[None]:
    """Seed the global generators, from which timm and mmseg draw, and restore them at the end."""
    python_state = random.getstate()
    numpy_state = np.random.get_state()
    torch_state = torch.get_rng_state()
    try:
        random.seed(seed)
        np.random.seed(seed)
        torch.default_generator.manual_seed(seed)
        yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        torch.set_rng_state(torch_state)


class _Keys(Sampler[Any]):
    """Sampler of the keys of the current read."""

    values: Iterable[Any] = ()

    def __iter__(self) -> Iterator[Any]:
        return iter(self.values)


class _Made(Dataset[Any]):
    """Data set whose item for a key is the batch `make(key)`, after one call of `prepare`."""

    def __init__(self, make: Callable[[Any], Any], prepare: Callable[[], None] | None) -> None:
        self.functions: _Functions | None = _Functions(make, prepare)

    def __getitem__(self, key: Any) -> Any:
        assert self.functions is not None
        return self.functions.make(key)


class _Functions(NamedTuple):
    """Functions that a worker process calls: `make(key)` for each batch, `prepare` before them."""

    make: Callable[[Any], Any]
    prepare: Callable[[], None] | None


def _keep(batch: Any) -> Any:
    return batch


class _Loader(DataLoader[Any]):
    """DataLoader that forks its workers with SIGTERM blocked, and whose functions only they have.

    A scheduler or the runner sends SIGTERM to all processes of a cell. The trainer saves a
    checkpoint first, and until then it needs its workers.

    The functions refer to the module of the data, which refers to this loader. If all of them were
    garbage together, Python would close the queues of the workers before their iterator ends them:
    the workers would not get its message, and it would wait 5 seconds for them.
    """

    dataset: _Made

    def __iter__(self) -> Any:
        iterator = self._fork()
        self.dataset.functions = None
        return iterator

    def _fork(self) -> Any:
        """Return the iterator over the batches; the first one starts the workers."""
        if sys.platform != "linux":
            return super().__iter__()
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        try:
            return super().__iter__()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _end_workers(loader: _Loader) -> None:
    """End the workers of a loader and wait for their ends."""
    end_workers(loader)


def _start_worker(worker: int) -> None:
    """Prepare a worker process before its first batch."""
    # Threads of the worker send its batches. While it makes the next one, each of them would wait
    # up to 5 ms for its turn.
    sys.setswitchinterval(SWITCH_SECONDS)
    ForkingPickler.register(torch.Tensor, _send_tensor)
    if sys.platform == "linux":
        threading.Thread(target=_exit_when_the_trainer_signals, daemon=True).start()
    info = get_worker_info()
    assert info is not None
    assert isinstance(info.dataset, _Made)
    assert info.dataset.functions is not None
    prepare = info.dataset.functions.prepare
    if prepare is not None:
        prepare()


def _send_tensor(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return how a worker sends a tensor: a small one by value, another one in shared memory.

    A tensor in shared memory costs a connection between the two processes.
    """
    is_plain = tensor.layout == torch.strided and tensor.dtype in NUMPY_TYPES
    if is_plain and tensor.nbytes <= SENT_BY_VALUE:
        return torch.from_numpy, (tensor.numpy(),)
    parts: tuple[Any, ...] = reduce_tensor(tensor)
    return parts


def _exit_when_the_trainer_signals() -> None:
    """Exit on a SIGTERM from the trainer itself; ignore SIGTERMs from other processes."""
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != os.getppid():
        continue
    os._exit(0)
