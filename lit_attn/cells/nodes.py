"""The ranks of one cell on several nodes of a SLURM job: `srun` starts a task for each rank.

The process that runs a cell (`run_cell_process`) is on the first node of the job. It holds the
cell's lock and waits for `srun`, which ends all ranks if one of them fails. This module is also the
program of a rank: `python -m lit_attn.cells.nodes TARGET FOLDER ATTEMPT OPTIONS`.

A node that loses its power closes no connection, so no rank notices it. A small process on each
node therefore changes the time of a file in the folder of the attempt. A node whose file does not
change while that of another node does is lost. Clocks are never compared.
"""

import contextlib
import faulthandler
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

from lit_attn.cells import failure
from lit_attn.cells import folder as cell_folder
from lit_attn.cells.failure import Preempted
from lit_attn.cells.launched import RENDEZVOUS, enter_slurm_task, let_first_failure_end_first
from lit_attn.cells.process import die_with_parent, redirect_output
from lit_attn.files import open_at_once
from lit_attn.schema.base import load
from lit_attn.schema.sources import freeze_package

NODES = "LIT_ATTN_NODES"
"""Environment variable of a SLURM job of several nodes: their number."""
BEAT = 3.0  # Seconds between two changes of a node's file.
SILENCE = 40.0  # Seconds without a change after which a node is lost.
SETTLE = 20.0
"""Seconds that srun has to end after a rank has failed. It waits for a node that is lost."""
KILL_TIMEOUT = 10.0  # Seconds that srun has to end its tasks after SIGTERM.
TICK = 0.25

TASK_END = re.compile(r"^srun: error: (\S+): tasks? (\d+)[\d,-]*: (.*)$")
"""Line of srun about the end of tasks: node, first task, and exit code or signal."""
EXITED = re.compile(r"Exited with exit code (\d+)")
SIGNALS = {signal.strsignal(number): number for number in signal.valid_signals()}
"""Numbers of signals by their descriptions, which srun prints."""


def count_nodes() -> int:
    """Return the number of nodes on which the cells of this job run."""
    return int(os.environ.get(NODES, "1"))


def run_on_nodes(
    nodes: int,
    world: int,
    program: list[str],
    attempt: Path,
    start_heartbeat: Callable[[], object],
) -> int:
    """Run `world` ranks on `nodes` nodes of this SLURM job; return 0 or an exit code.

    `program` are the arguments of this module. Each rank writes its log to the folder `attempt`.
    This process appends to its own output what srun reports, and the end of the log of the rank
    that failed first, with the name of its node. The exit code is that of this rank, or LOST_NODE.
    """
    rendezvous = attempt / "rendezvous"
    step = _Step(_srun(nodes, world, program), rendezvous)
    watch = _NodeWatch(attempt)
    start_heartbeat()
    step.forward_signals()
    try:
        reason = step.wait(watch)
    finally:
        step.end()
    rendezvous.unlink(missing_ok=True)
    for path in attempt.glob("node*.alive"):
        path.unlink(missing_ok=True)
    if step.process.returncode == 0:
        return 0
    first = None if reason else step.first_failure
    if first is None:
        reason = reason or f"srun could not run the ranks: {step.last_line}"
        print(reason, file=sys.stderr, flush=True)
        return failure.LOST_NODE
    node, rank, code = first
    tail = cell_folder.read_log_tail(attempt, rank)
    print(failure.quote_rank_log(rank, code, tail, node), file=sys.stderr, flush=True)
    return 128 - code if code < 0 else code


def _srun(nodes: int, world: int, program: list[str]) -> list[str]:
    """Return the command that starts the ranks."""
    return [
        "srun",
        f"--nodes={nodes}",
        f"--ntasks={world}",
        f"--ntasks-per-node={world // nodes}",
        # srun does not inherit sbatch's number of cores.
        f"--cpus-per-task={os.environ.get('SLURM_CPUS_PER_TASK', '1')}",
        "--distribution=block",
        "--kill-on-bad-exit=1",
        # Rank 0 writes the weights while the other ranks have ended.
        "--wait=0",
        "--export=ALL",
        "--unbuffered",
        sys.executable,
        "-m",
        __name__,
        *program,
    ]


class _Step:
    """The step of a SLURM job that runs the ranks, and what srun reports about it."""

    def __init__(self, command: list[str], rendezvous: Path) -> None:
        self.first_failure: tuple[str, int, int] | None = None
        self.ended: set[str] = set()  # Nodes with an end of a rank that srun has reported.
        self.last_line = ""
        # In a session of its own: SIGTERM to the cell's process group must reach the ranks, which
        # write a checkpoint. srun would kill them.
        self.process = subprocess.Popen(
            command,
            env=os.environ | {RENDEZVOUS: str(rendezvous)},
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
            preexec_fn=lambda: die_with_parent(signal.SIGTERM),
        )
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def _read(self) -> None:
        """Copy srun's error output to this process's, and keep the first end of a rank."""
        assert self.process.stderr is not None
        with self.process.stderr as lines:
            for line in lines:
                print(line, end="", file=sys.stderr, flush=True)
                self.last_line = line.strip()
                end = read_task_end(line)
                if end is not None:
                    self.ended.add(end[0])
                    self.first_failure = self.first_failure or end

    def forward_signals(self) -> None:
        """Pass SIGTERM on to the ranks, and let SIGABRT end them with their stacks in the logs.

        After the end of the ranks this process ignores both, while it reports how they ended.
        """

        def stop(number: int, frame: FrameType | None) -> None:
            # srun passes SIGUSR2 on. After SIGTERM it would kill the ranks.
            self.process.send_signal(signal.SIGUSR2)

        def dump(number: int, frame: FrameType | None) -> None:
            self.process.send_signal(signal.SIGUSR1)

        signal.signal(signal.SIGTERM, stop)
        signal.signal(signal.SIGABRT, dump)

    def wait(self, watch: "_NodeWatch") -> str:
        """Wait for the end of the step. Return which node was lost, or "" if none was."""
        deadline = None
        while self.process.poll() is None:
            time.sleep(TICK)
            lost = watch.find_silent_node()
            if lost:
                self.end()
                return f"node {lost} is lost: it has not answered for {SILENCE:.0f} s"
            if self.first_failure is None:
                continue
            deadline = deadline or time.monotonic() + SETTLE
            if time.monotonic() > deadline:
                self.end()
                names = ", ".join(sorted(watch.names - self.ended)) or "unknown"
                node, rank, _ = self.first_failure
                return (
                    f"node {names} is lost: srun waited for it for {SETTLE:.0f} s after the end of"
                    f" rank {rank} on {node}"
                )
        self.reader.join(KILL_TIMEOUT)
        return ""

    def end(self) -> None:
        """End srun, which kills the ranks that it reaches."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            if self.process.poll() is None:
                self.process.send_signal(number)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self.process.wait(KILL_TIMEOUT)
        self.reader.join(KILL_TIMEOUT)


class _NodeWatch:
    """Watches the files that the nodes of a cell change (see `_beat`)."""

    def __init__(self, attempt: Path) -> None:
        self.attempt = attempt
        self.changes: dict[Path, tuple[int, float]] = {}
        self.names: set[str] = set()
        self.next_look = 0.0

    def find_silent_node(self) -> str:
        """Return the name of a node that is silent while another one is not, or ""."""
        now = time.monotonic()
        if now < self.next_look:
            return ""
        self.next_look = now + BEAT
        present = set(self.attempt.glob("node*.alive"))
        for path in present:
            # Opened, because a network disk may show an old time otherwise.
            with contextlib.suppress(OSError), open_at_once(path) as file:
                mtime = os.fstat(file.fileno()).st_mtime_ns
                if self.changes.get(path, (0, now))[0] != mtime:
                    self.changes[path] = (mtime, now)
                    self.names.add(_node_name(path))
        # The ranks of a node whose file has gone have ended.
        self.changes = {path: change for path, change in self.changes.items() if path in present}
        newest = max((when for _, when in self.changes.values()), default=now)
        for path, (_, when) in self.changes.items():
            if now - when > SILENCE and now - newest < SILENCE / 2:
                return _node_name(path)
        return ""


def _node_name(path: Path) -> str:
    """Return the name of a node from its file."""
    with contextlib.suppress(OSError):
        return path.read_text().strip() or path.stem
    return path.stem


def read_task_end(line: str) -> tuple[str, int, int] | None:
    """Return node, rank and exit code from a line of srun about the end of a rank, or None.

    The exit code is negative for a signal.
    """
    match = TASK_END.match(line.strip())
    if match is None:
        return None
    node = match[1]
    rank = int(match[2])
    end = match[3]
    exited = EXITED.search(end)
    if exited is not None:
        return node, rank, int(exited[1])
    # SLURM's memory limit ends a task with a message of its own.
    number = SIGNALS.get(end.removesuffix(" (core dumped)"), signal.SIGKILL)
    return node, rank, -number


@contextlib.contextmanager
def _beat(path: Path) -> Iterator[None]:
    """Change the time of the file `path` every BEAT seconds; remove it if the context ends well.

    A process does this that imports nothing, so that no long computation of the rank delays it.
    """
    path.write_text(os.environ.get("SLURMD_NODENAME", path.stem))
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(number, signal.SIG_IGN)
        die_with_parent()
        while os.getppid() == parent:
            with contextlib.suppress(OSError):
                os.utime(path)
            time.sleep(BEAT)
        os._exit(0)
    yield
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    path.unlink(missing_ok=True)


def _run_rank(target: str, folder: Path, options: dict[str, bool]) -> None:
    """Run `target` as one rank. A rank other than 0 that is told to stop ends without a failure.

    Otherwise srun would kill rank 0 before it has written its checkpoint.
    """
    is_first = os.environ["RANK"] == "0"
    try:
        with let_first_failure_end_first():
            load(target)(folder, **options)
    except Preempted as error:
        print(f"lit_attn.cells.failure.Preempted: {error}", file=sys.stderr, flush=True)
        if is_first:
            raise


def main(arguments: list[str]) -> int:
    """Run one rank, whose place SLURM's variables give, and return its exit code."""
    target, folder, attempt, options = arguments
    rank = enter_slurm_task()
    redirect_output(Path(attempt) / cell_folder.log_name(rank))
    # A crash in native code and SIGUSR1 write the stack of every thread to the log.
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, chain=True)
    signal.signal(signal.SIGUSR2, lambda number, frame: signal.raise_signal(signal.SIGTERM))
    freeze_package()
    is_first_of_node = os.environ["LOCAL_RANK"] == "0"
    alive = Path(attempt) / f"node{os.environ['GROUP_RANK']}.alive"
    try:
        with _beat(alive) if is_first_of_node else contextlib.nullcontext():
            _run_rank(target, Path(folder), json.loads(options))
    except BaseException as error:
        traceback.print_exc()
        if isinstance(error, SystemExit):
            print(f"the cell's code called sys.exit({error.code!r})", file=sys.stderr)
        sys.stdout.flush()
        sys.stderr.flush()
        # Threads that wait for other ranks would keep the process from ending.
        os._exit(1)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
