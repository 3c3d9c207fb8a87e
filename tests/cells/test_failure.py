"""Failure class and reason of every kind of end that was observed or is documented."""

import pytest

from lit_attn.cells.failure import classify_failure, describe_failure
from lit_attn.cells.records import FailureClass

CUDA = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
FULL = "OSError: [Errno 28] No space left on device: 'runs/x/tmp/a'"
WORKER = "DataLoader worker (pid 7)"
LOST = "\nTraceback\nRuntimeError: DataLoader worker (pid(s) 7, 8) exited unexpectedly"
TABLE: list[tuple[int, str, FailureClass, str]] = [
    (1, "Traceback\nlit_attn.cells.failure.Diverged: loss is nan", "diverged", "loss is nan"),
    (1, f"Traceback (most recent call last):\n{CUDA}", "out-of-memory", CUDA),
    (1, f"[rank1]: {CUDA}\nW elastic teardown", "out-of-memory", f"[rank1]: {CUDA}"),
    (1, "MemoryError", "out-of-memory", "MemoryError"),
    (1, "RuntimeError: [enforce fail] DefaultCPUAllocator: can't allocate memory: you tried",
     "out-of-memory", "RuntimeError: [enforce fail]"),
    (1, "OSError: [Errno 12] Cannot allocate memory", "out-of-memory", "OSError: [Errno 12]"),
    (1, FULL, "no-space", FULL),
    (1, "OSError: [Errno 122] Disk quota exceeded", "no-space", "OSError: [Errno 122]"),
    (1, "lit_attn.schema.errors.ConfigError: a.yaml: no", "bad-configuration", "a.yaml: no"),
    (
        1,
        "[rank1]: lit_attn.cells.failure.Diverged: loss is inf",
        "diverged",
        "[rank1]: loss is inf",
    ),
    (1, "ValueError: as lit_attn.spec: says", "error", "ValueError: as lit_attn.spec: says"),
    (1, "lit_attn.cells.failure.Preempted: at step 7", "killed", "at step 7"),
    (1, "RuntimeError: shapes do not match", "error", "RuntimeError: shapes"),
    # A caught and logged failure is not what ended the cell.
    (1, f"{CUDA}\nretrying\nTraceback\nValueError: other", "error", "ValueError: other"),
    # A message that speaks of memory is not a failure of it, unless an exception says so.
    (0, "using 3 GB of memory\ndone", "error", "exit code 0 without a result; its log ends: done"),
    # Lightning 2.6 exits 0 after SIGTERM.
    (0, "[rank: 0] Received SIGTERM: 15", "killed", "exit code 0 without a result"),
    (0, "", "error", "exit code 0 without a result"),
    (3, "", "error", "exit code 3 without a result"),
    # No traceback at all: an abort in native code.
    (-6, "terminate called\nCUDA error: out of memory", "out-of-memory", "ended by SIGABRT"),
    (-9, "step 12", "killed", "ended by SIGKILL"),
    (137, "step 12", "killed", "ended by SIGKILL"),
    (-15, "", "killed", "ended by SIGTERM"),
    (143, "", "killed", "ended by SIGTERM"),
    (-1, "", "killed", "ended by SIGHUP"),
    # The signal came again while the cell, which had saved, was about to exit.
    (-15, "lit_attn.cells.failure.Preempted: at step 7", "killed", "at step 7"),
    (137, "[rank1]: lit_attn.cells.failure.Preempted: at step 7", "killed", "[rank1]: at step 7"),
    (-15, "ValueError: other", "killed", "ended by SIGTERM after ValueError: other"),
    (255, "step 12", "killed", "ended with the server that it was forked from"),
    # The exception was caught and logged before the server was killed.
    (255, "ValueError: other", "killed", "ended with the server that it was forked from"),
    # A cell that had no room for its log either.
    (74, "", "no-space", "no space left on device"),
    (74, "step 12", "no-space", "no space left on device"),
    (74, f"Traceback\n{FULL}", "no-space", FULL),
    # The log had room for half of the line that says so.
    (74, "Traceback\nOSError: [Errno 28] No sp", "no-space", "OSError: [Errno 28] No sp"),
    (-24, "", "timed-out", "ended by SIGXCPU"),
    (1, "TimeoutError: no step for 600 s", "timed-out", "TimeoutError"),
    (-11, "", "error", "ended by SIGSEGV"),
    # The exception was logged before the crash, and is not what ended the cell.
    (-11, "Diverged: nan\nstep 12", "error", "ended by SIGSEGV after Diverged: nan"),
    (139, "Preempted: at step 7", "error", "ended by SIGSEGV after Preempted: at step 7"),
    (-11, "caf\ufffd", "error", "ended by SIGSEGV"),
    # A process that reads data; torch raises the first line wherever the cell is.
    (1, f"RuntimeError: {WORKER} is killed by signal: Killed. ", "killed", "RuntimeError: Data"),
    (1, f"RuntimeError: {WORKER} is killed by signal: Killed. {LOST}", "killed",
     "RuntimeError: DataLoader worker (pid(s) 7, 8) exited unexpectedly (signal: Killed)"),
    (1, f"RuntimeError: {WORKER} is killed by signal: Segmentation fault. {LOST}", "killed",
     "RuntimeError: DataLoader worker (pid(s) 7, 8) exited unexpectedly (signal: Segmentation "),
    (1, f"RuntimeError: {WORKER} is killed by signal: Bus error. It is possible that dataloader's "
     f"workers are out of shared memory.{LOST}", "out-of-memory", "RuntimeError: DataLoader"),
    (1, f"...{LOST}", "killed", "RuntimeError: DataLoader worker (pid(s) 7, 8)"),
    (1, f"RuntimeError: {WORKER} exited unexpectedly with exit code 3. Details are lost.{LOST}",
     "error", "RuntimeError: DataLoader worker (pid(s) 7, 8)"),
    (1, f"[rank1]: RuntimeError: {WORKER} is killed by signal: Killed. ", "killed", "[rank1]: "),
    (1, "concurrent.futures.process.BrokenProcessPool: A process in the process pool was lost",
     "killed", "concurrent.futures.process.BrokenProcessPool: A process"),
    # An exception of a worker is raised in the cell, with the same type.
    (1, "MemoryError: Caught MemoryError in DataLoader worker process 0.", "out-of-memory", "Mem"),
    (1, "ValueError: Caught ValueError in DataLoader worker process 0.\nValueError: no image",
     "error", "ValueError: no image"),
    # The cell has survived the loss of a worker.
    (1, f"RuntimeError: {WORKER} is killed by signal: Killed. \nTraceback\nValueError: other",
     "error", "ValueError: other"),
]  # fmt: skip


@pytest.mark.parametrize(("returncode", "tail", "expected", "reason"), TABLE)
def test_every_end_has_a_class_and_a_reason(
    returncode: int, tail: str, expected: FailureClass, reason: str
) -> None:
    assert classify_failure(returncode, tail) == expected
    assert describe_failure(returncode, tail).startswith(reason)
    assert "\n" not in describe_failure(returncode, tail)
