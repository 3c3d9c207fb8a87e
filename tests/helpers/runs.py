"""Functions that run fake cells with the real runner and wait for conditions."""

import contextlib
import io
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

import pytest

from helpers import fake_cells, studies
from helpers.commands import Command, start_python, start_with_pipe
from helpers.holding import read_number
from lit_attn.ablate.display import Display
from lit_attn.ablate.job import Job
from lit_attn.ablate.launch import CellProcess, Launcher
from lit_attn.ablate.outcomes import Summary
from lit_attn.ablate.plan import expand
from lit_attn.ablate.runner import Runner
from lit_attn.ablate.slots import make_slots
from lit_attn.cells.lock import read_holder

CGROUPS = Path("/sys/fs/cgroup")
SCRIPT = Path(__file__).parent / "fake_cells.py"
TIMEOUT = 400.0


def make_body(*variants: str) -> str:
    """Return the YAML of a study with these variants, each with its own learning rate."""
    cells = ", ".join(f"{name}: {{optimizer.lr: {i + 1}}}" for i, name in enumerate(variants))
    return f"baseline: {variants[0]}\ncells: {{{cells}}}"


def jobs(path: Path, *variants: str) -> list[Job]:
    return expand(studies.study(path, make_body(*variants)), path / "runs").jobs


def run(cells: list[Job], at_once: int = 2) -> tuple[Summary, str]:
    output = io.StringIO()
    launcher = Launcher(fake_cells.TARGET)
    return Runner(launcher, make_slots(at_once), Display(output)).run(cells), output.getvalue()


class Recorder(Display):
    """Display that keeps the events and prints nothing."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def open(self) -> None:
        pass

    def close(self) -> None:
        pass

    def update(self, snapshot: object) -> None:
        pass

    def add_event(self, text: str) -> None:
        self.events.append(text)


def count_runs(path: Path) -> Counter[str]:
    """Count how often each cell ran."""
    log = path / "runs" / "tiny" / "ran.txt"
    return Counter(log.read_text().split("\n")[:-1]) if log.exists() else Counter()


def wait_until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + TIMEOUT
    while time.monotonic() < deadline:
        # A run creates and removes folders while a condition searches them, and the commands of a
        # busy SLURM fail at times.
        with contextlib.suppress(FileNotFoundError, subprocess.CalledProcessError):
            if condition():
                return
        time.sleep(0.02)
    raise AssertionError("the condition did not become true")


def is_alive(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def is_held(cell: Path) -> bool:
    """Return True if a cell waits at a step (see helpers.holding)."""
    return is_alive(read_number(cell / "held", default=0))


def expire_hangs(patch: pytest.MonkeyPatch, stall: float, *children: str) -> None:
    """Let `stall` seconds pass for the runner's clock of a cell at every check while it hangs.

    A cell hangs while the processes run whose pids are in the files `children` of its folder. The
    limit `stall` can so be longer than any delay of the machine.
    """
    idle_seconds = CellProcess.idle_seconds

    def expire(cell: CellProcess) -> float:
        pids = [read_number(cell.job.folder / name, default=0) for name in children]
        if all(map(is_alive, pids)):
            cell.last_step -= stall
        return idle_seconds(cell)

    patch.setattr(CellProcess, "idle_seconds", expire)


def start_interpreter(
    path: Path,
    words: tuple[str, ...],
    variables: dict[str, str],
    stdout: IO[str] | int = subprocess.PIPE,
    group: Path | None = None,
) -> subprocess.Popen[str]:
    """Start `python WORDS ...` in a new interpreter and a new session."""

    def join_group() -> None:
        if group is not None:
            (group / "cgroup.procs").write_text(str(os.getpid()))

    return subprocess.Popen(
        [sys.executable, *words],
        cwd=path,
        stdout=stdout,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        preexec_fn=join_group,
        env=variables,
    )


def _fork_command(
    path: Path, words: tuple[str, ...], variables: dict[str, str], stdout: IO[str] | int
) -> Command:
    if isinstance(stdout, int):
        assert stdout == subprocess.PIPE
        return start_with_pipe(path, words, variables, is_leader=True)
    number = stdout.fileno()
    return start_python(path, words, variables, number, number, is_leader=True)


@contextlib.contextmanager
def start_cli(
    path: Path,
    *arguments: str,
    environment: dict[str, str] | None = None,
    stdout: IO[str] | int = subprocess.PIPE,
    command: tuple[str, ...] = (),
    group: Path | None = None,
    has_own_server: bool = False,
) -> Iterator[subprocess.Popen[str] | Command]:
    """Start the command line with fake cells in a new session, as a terminal does.

    `group` is the control group of its processes. With it, or if the command `has_own_server` from
    which it forks its cells, the command is a new interpreter, which imports PyTorch again twice.
    """
    words = (str(SCRIPT), *command, "ablations.yaml", *arguments)
    variables = (environment or dict(os.environ)) | {"PYTHONPATH": os.pathsep.join(sys.path)}
    process: subprocess.Popen[str] | Command
    if group is not None or has_own_server:
        process = start_interpreter(path, words, variables, stdout, group)
    else:
        process = _fork_command(path, words, variables, stdout)
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        if process.stdout is not None:
            process.stdout.close()
        process.wait()


@contextlib.contextmanager
def limit_memory(size: int) -> Iterator[Path]:
    """Yield the folder of a new control group whose processes have at most `size` bytes.

    Skips the test where no such group can be made.
    """
    root = CGROUPS / "memory" if (CGROUPS / "memory").is_dir() else CGROUPS
    limit = root / f"lit_attn-{os.getpid()}"
    name = "memory.limit_in_bytes" if root.name == "memory" else "memory.max"
    # Memory that leaks into swap would never reach the limit. Not every kernel counts swap.
    swap_limits = {"memory.memsw.limit_in_bytes": size, "memory.swap.max": 0}
    try:
        limit.mkdir()
        (limit / name).write_text(str(size))
        for swap_name, swap_size in swap_limits.items():
            if (limit / swap_name).exists():
                (limit / swap_name).write_text(str(swap_size))
    except OSError as error:
        with contextlib.suppress(OSError):
            limit.rmdir()
        pytest.skip(f"no control group can limit memory: {error}")
    try:
        yield limit
    finally:
        wait_until(lambda: not (limit / "cgroup.procs").read_text())
        limit.rmdir()


def list_holders(path: Path) -> list[int]:
    """Return the pids of the live processes that hold the lock of a cell."""
    holders = [read_holder(lock.parent) for lock in (path / "runs").glob("*/*/*/lock")]
    return [holder.pid for holder in holders if holder is not None and is_alive(holder.pid)]


def run_cli(path: Path, *arguments: str, command: tuple[str, ...] = ()) -> tuple[int, str]:
    """Run the command line with fake cells; return its exit code and output."""
    with start_cli(path, *arguments, command=command) as process:
        output, _ = process.communicate(timeout=TIMEOUT)
        return process.returncode, output
