"""Stress test: random faults of all classes in a matrix of real cells with three runners.

    PYTHONPATH=tests:. python tests/stress.py FOLDER --faults 300 --record stress.json

The study has `--cells` small cells of image files, which data workers read. Two processes train the
cells of some variants, with DDP or FSDP. The commands run a copy of the package, which a fault
replaces for a second by one that does not work.

First an undisturbed command computes the cells. Then three commands compute them again while faults
are injected; a command that ends starts again. When few cells are left before the last fault, the
results of a third of the cells are torn, so that these cells run again; the record does not count
this as faults. In the end one command writes the tables. They must have the same bytes as those of
the undisturbed run, apart from measured times, memory and the number of attempts, and no process,
lock or temporary file of this package may be left, except folders that the next command removes.

A command that is interrupted writes tables. This look at a running study rightly lowers the level
of the last table, so the test takes the looks back before the last command.

The same command with the same FOLDER continues a stopped test. The faults follow from `--seed`; the
moments at which they meet the cells depend on the machine. Needs Linux. Exit code 0: passed.
"""

import argparse
import contextlib
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pandas as pd
from helpers import digit_folders, studies
from helpers.paths import ROOT

from lit_attn.ablate.plan import Matrix, expand
from lit_attn.ablate.slots import count_cores
from lit_attn.cells.decisions import Looks
from lit_attn.cells.folder import list_attempts, read_exit
from lit_attn.cells.lock import current_process, read_holder
from lit_attn.cells.records import utc_now
from lit_attn.config.study import read_studies
from lit_attn.files import write_json
from lit_attn.schema.yaml_text import format_yaml
from lit_attn.temporary import temporary_folder
from lit_attn.training.provenance import code_hash, package_versions

RUNNERS = 3
MARK = "LIT_ATTN_STRESS"
"""Environment variable of every process of the test, by which processes that remain are found."""
VARIANTS = ("standard", "belief2", "mgk", "xsa", "dcmha", "talking-heads")
TWO_RANKS = {"belief2": "ddp", "dcmha": "ddp", "xsa": "fsdp"}
"""Strategies of the variants whose cells two processes train. After an interruption, the mean loss
of an epoch of such a cell is rounded in another order, so this value is not compared."""
TRAINING = {"epochs": 8, "accelerator": "cpu", "checkpoint_every": 0.1}
IMAGES = 40  # Images of each of the four classes: 10 steps are an epoch.
MEAN_LOSS = "metric train/loss"
MEASURED = ("time", "memory", "attempts", "seconds", "finished", "ms / step", "evaluation")
MEASURED += ("waiting",)
# A cell is tried again at once.
COMMAND = (
    "import sys; from lit_attn.ablate import __main__, runner; runner.BACKOFF = 0.1\n"
    "if __name__ == '__main__': sys.exit(__main__.main())"
)


class Matrix60:
    """The disturbed matrix: its folder, its commands, and the faults that can be injected."""

    def __init__(self, folder: Path, chance: random.Random) -> None:
        self.folder = folder
        self.chance = chance
        self.commands: list[subprocess.Popen[bytes]] = []
        self.matrix = read_matrix(folder)

    def start_commands(self) -> None:
        """Start commands until RUNNERS of them run."""
        self.commands = [process for process in self.commands if process.poll() is None]
        while len(self.commands) < RUNNERS:
            self.commands.append(start_command(self.folder, "1"))

    def stop_commands(self) -> None:
        for process in self.commands:
            process.terminate()
        for process in self.commands:
            process.wait()

    def running_cells(self) -> list[Path]:
        """Return the folders of cells that a process of this machine holds."""
        locks = self.folder.glob("runs/*/*/*/lock")
        return sorted(lock.parent for lock in locks if read_holder(lock.parent) is not None)

    def leader(self) -> list[int]:
        """Return the pid of the first process of a random running cell, if there is one."""
        cells = self.running_cells()
        holder = read_holder(self.chance.choice(cells)) if cells else None
        return [] if holder is None else [holder.pid]

    def ranks(self) -> list[int]:
        """Return the pids of the ranks of a random running cell, if there is one."""
        return [rank for pid in self.leader() for rank in children(pid)]

    def idle_cells(self) -> list[Path]:
        """Return the started cells without a result that nobody holds."""
        started = {path.parent for path in self.folder.glob("runs/*/*/*/attempts")}
        done = {path.parent for path in self.results()}
        return sorted(started - done - set(self.running_cells()))

    def results(self) -> list[Path]:
        return sorted(self.folder.glob("runs/*/*/*/result.json"))

    # Each fault returns False if nothing can be disturbed now.

    def kill_cell(self) -> bool:
        leaders = self.leader()
        return bool(leaders) and send(leaders[0], signal.SIGKILL)

    def kill_rank(self, number: signal.Signals = signal.SIGKILL) -> bool:
        ranks = self.ranks()
        return bool(ranks) and send(self.chance.choice(ranks), number)

    def kill_worker(self) -> bool:
        """Kill a process that reads data, as the kernel's out-of-memory killer does."""
        workers = [worker for rank in self.ranks() for worker in children(rank)]
        return bool(workers) and send(self.chance.choice(workers), signal.SIGKILL)

    def change_package(self) -> bool:
        """Replace all modules of the package for a second, as a checkout of another commit does."""
        package = package_of(self.folder) / "lit_attn"
        sources = {path: path.read_bytes() for path in package.rglob("*.py")}
        for path in sources:
            path.write_text("raise RuntimeError('a file of another commit')\n")
        time.sleep(1)
        for path, source in sources.items():
            path.write_bytes(source)
        return True

    def terminate_cell(self) -> bool:
        return self.kill_rank(signal.SIGTERM)

    def freeze_cell(self) -> bool:
        ranks = self.ranks()
        return bool(ranks) and freeze(ranks[0], self.chance.uniform(0.2, 2))

    def exhaust_memory(self) -> bool:
        """Forbid a rank to allocate more memory."""
        ranks = self.ranks()
        return bool(ranks) and limit(ranks[0], resource.RLIMIT_AS, 2**20)

    def forbid_writing(self) -> bool:
        """Let every write of a rank fail, as on a full disk."""
        ranks = self.ranks()
        return bool(ranks) and limit(ranks[0], resource.RLIMIT_FSIZE, 0)

    def signal_runner(self, number: signal.Signals = signal.SIGKILL) -> bool:
        process = self.chance.choice(self.commands)
        is_sent = process.poll() is None and send(process.pid, number)
        if is_sent:
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                # After one interrupt a runner waits for its cell, which another fault may block.
                send(process.pid, number)
                process.wait(120)
        return is_sent

    def interrupt_runner(self) -> bool:
        return self.signal_runner(signal.SIGINT)

    def terminate_runner(self) -> bool:
        return self.signal_runner(self.chance.choice([signal.SIGTERM, signal.SIGHUP]))

    def exhaust_files(self) -> bool:
        """Let a runner open no file for a second."""
        process = self.chance.choice(self.commands)
        with contextlib.suppress(ProcessLookupError):
            before = resource.prlimit(process.pid, resource.RLIMIT_NOFILE)
            resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (8, before[1]))
            time.sleep(1)
            resource.prlimit(process.pid, resource.RLIMIT_NOFILE, before)
            return True
        return False

    def kill_server(self) -> bool:
        process = self.chance.choice(self.commands)
        servers = [pid for pid in children(process.pid) if "forkserver" in command_line(pid)]
        return bool(servers) and send(servers[0], signal.SIGKILL)

    def tear_checkpoint(self) -> bool:
        """Truncate the newest checkpoint of a stopped cell and add an empty newer one."""
        cells = [cell for cell in self.idle_cells() if list(cell.glob("checkpoints/step-*.ckpt"))]
        if not cells:
            return False
        newest = max(self.chance.choice(cells).glob("checkpoints/step-*.ckpt"))
        newest.write_bytes(newest.read_bytes()[:1000])
        newest.with_name("step-000009999.ckpt").write_bytes(b"")
        return True

    def tear_metrics(self) -> bool:
        cells = [cell for cell in self.idle_cells() if (cell / "metrics.csv").exists()]
        if not cells:
            return False
        with (self.chance.choice(cells) / "metrics.csv").open("a") as metrics:
            metrics.write("400,3,test/accu")
        return True

    def tear_result(self) -> bool:
        results = self.results()
        if results:
            path = self.chance.choice(results)
            path.write_bytes(path.read_bytes()[: self.chance.randrange(200)])
        return bool(results)

    def tear_progress(self) -> bool:
        cells = self.running_cells()
        if cells:
            (self.chance.choice(cells) / "progress.json").write_text('{"step": ')
        return bool(cells)

    def tear_plan(self) -> bool:
        if not self.matrix.folder.exists():
            return False
        (self.matrix.folder / "plan.json").write_text("{")
        return True

    def leave_lock(self) -> bool:
        """Leave the lock of a process that has ended."""
        cells = self.idle_cells()
        if not cells:
            return False
        text = current_process().model_copy(update={"started": "1"}).model_dump_json()
        with (
            contextlib.suppress(FileExistsError),
            (self.chance.choice(cells) / "lock").open("x") as f,
        ):
            f.write(text)
        return True

    def clean_temporary_folder(self) -> bool:
        for path in (self.folder / "tmp").iterdir():
            shutil.rmtree(path, ignore_errors=True)
        return True

    def faults(self) -> dict[str, Callable[[], bool]]:
        methods = (
            *(self.kill_cell, self.kill_rank, self.terminate_cell, self.freeze_cell),
            *(self.exhaust_memory, self.forbid_writing, self.signal_runner, self.interrupt_runner),
            *(self.terminate_runner, self.exhaust_files, self.kill_server),
            *(self.tear_checkpoint, self.tear_metrics, self.tear_result, self.tear_progress),
            *(self.tear_plan, self.leave_lock, self.clean_temporary_folder),
            *(self.kill_worker, self.change_package),
        )
        return {method.__name__: method for method in methods}


def read_matrix(folder: Path) -> Matrix:
    return expand(read_studies(folder / "ablations.yaml")["tiny"], folder / "runs")


def package_of(folder: Path) -> Path:
    """Return the folder of the copy of the package that the commands in `folder` run."""
    return folder / "package"


def start_command(folder: Path, jobs: str) -> subprocess.Popen[bytes]:
    (folder / "tmp").mkdir(exist_ok=True)
    environment = os.environ | {MARK: str(folder), "TMPDIR": str(folder / "tmp")}
    environment |= {"PYTHONPATH": str(package_of(folder)), "OMP_NUM_THREADS": "1"}
    with (folder / "log.txt").open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-c", COMMAND, "ablations.yaml", "--jobs", jobs],
            cwd=folder,
            env=environment,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )


def send(pid: int, number: signal.Signals) -> bool:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
        return True
    return False


def freeze(pid: int, seconds: float) -> bool:
    if not send(pid, signal.SIGSTOP):
        return False
    time.sleep(seconds)
    return send(pid, signal.SIGCONT)


def limit(pid: int, kind: int, value: int) -> bool:
    with contextlib.suppress(ProcessLookupError):
        resource.prlimit(pid, kind, (value, value))
        return True
    return False


def children(pid: int) -> list[int]:
    with contextlib.suppress(OSError):
        lists = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/children")]
        return [int(child) for text in lists for child in text.split()]
    return []


def command_line(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    return ""


def remaining_processes(folder: Path) -> Iterator[int]:
    """Yield the processes of the test that still run."""
    mark = f"{MARK}={folder}\0".encode()
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if mark in path.read_bytes():
                yield int(path.parent.name)


def remaining_files(folder: Path) -> list[str]:
    """Return locks, temporary files and rendezvous folders that were left behind."""
    patterns = ("runs/*/*/*/lock", "runs/**/.*.tmp", "runs/**/.lock.*", "runs/*/*/*/tmp/*")
    # Other packages leave their caches in the temporary folder.
    patterns += ("tmp/lit_attn-*",)
    return sorted(
        str(path.relative_to(folder)) for pattern in patterns for path in folder.glob(pattern)
    )


def tables(folder: Path) -> dict[str, bytes]:
    """Return the tables and curves without measured values."""
    contents = {}
    for path in sorted((folder / "reports").glob("*/*.csv")):
        frame = pd.read_csv(path)
        if MEAN_LOSS in frame.columns:
            frame.loc[frame["variant"].isin(TWO_RANKS), MEAN_LOSS] = None
        measured = [c for c in frame.columns if any(word in c.lower() for word in MEASURED)]
        text = frame.drop(columns=measured).to_csv(index=False)
        contents[str(path.relative_to(folder))] = text.encode()
    for path in sorted((folder / "runs").glob("*/*/*/metrics.csv")):
        unequal = [b"evaluation/seconds"]
        if path.parents[1].name in TWO_RANKS:
            unequal.append(b"train/loss")
        rows = path.read_bytes().splitlines()
        rows = [row for row in rows if not any(name in row for name in unequal)]
        contents[str(path.relative_to(folder))] = b"\n".join(rows)
    return contents


def write_study(folder: Path, cells: int) -> None:
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "lit_attn", package_of(folder) / "lit_attn", ignore=ignored)
    # Both studies read the same files.
    images = folder.parent / "digits"
    if not images.exists():
        digit_folders.write(images, IMAGES)
    experiment = digit_folders.experiment(images)
    experiment["data"]["workers"] = 1
    experiment["training"] = TRAINING
    names = VARIANTS[: max(2, min(len(VARIANTS), cells // 2))]
    settings = []
    for name in names:
        devices = 2 if name in TWO_RANKS else 1
        strategy = TWO_RANKS.get(name, "ddp")
        keys = f"attention: {name}, training.devices: {devices}, training.strategy: {strategy}"
        settings.append(f"{name}: {{{keys}}}")
    variants = ", ".join(settings)
    body = f"baseline: standard\nmatch: none\ncells: {{{variants}}}"
    path = studies.write(folder, body, format_yaml(experiment))
    path.write_text(path.read_text().replace("seeds: 2", f"seeds: {cells // len(names)}"))


def run_alone(folder: Path) -> int:
    """Run commands one after the other until every cell has a result; return their number."""
    for count in range(1, 20):
        if start_command(folder, str(count_cores())).wait() == 0:
            return count
    raise SystemExit(f"{folder}: cells fail without faults; see log.txt")


def inject(disturbed: Matrix60, count: int, log: Path) -> None:
    """Inject faults until `log` has `count` of them."""
    done = len(log.read_text().splitlines()) if log.exists() else 0
    faults = disturbed.faults()
    total = len(disturbed.matrix.jobs)
    while done < count:
        disturbed.start_commands()
        time.sleep(disturbed.chance.uniform(0.1, 3))
        name = disturbed.chance.choice(sorted(faults))
        if total - len(disturbed.results()) <= RUNNERS:
            for _ in range(total // 3):
                disturbed.tear_result()
        if faults[name]():
            done += 1
            with log.open("a") as stream:
                stream.write(f"{name}\n")
            print(f"{done}/{count} {name}", flush=True)


def take_back_looks(matrix: Matrix) -> int:
    """Forget the looks that interrupted commands have recorded, and return their number."""
    path = matrix.folder / "looks.json"
    looks = Looks.read_valid(path)
    path.unlink(missing_ok=True)
    return 0 if looks is None else len(looks.entries)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--faults", type=int, default=300)
    parser.add_argument("--cells", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--record", type=Path, default=Path("stress.json"))
    options = parser.parse_args()
    # Background jobs of a shell ignore SIGINT, and the commands would inherit this.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    started = time.monotonic()
    folders = [options.folder.resolve() / name for name in ("undisturbed", "disturbed")]
    for folder in folders:
        if not (folder / "ablations.yaml").exists():
            write_study(folder, options.cells)
    sockets = set(Path("/dev/shm").glob("lit_attn-temporary-*"))
    run_alone(folders[0])
    log = options.folder / "faults.txt"
    count = len(log.read_text().splitlines()) if log.exists() else 0
    # A continued test does not repeat the choices of the stopped one.
    disturbed = Matrix60(folders[1], random.Random(options.seed * 1_000_003 + count))
    try:
        inject(disturbed, options.faults, log)
    finally:
        disturbed.stop_commands()
    looks = take_back_looks(disturbed.matrix)
    commands = run_alone(folders[1])
    time.sleep(1)
    # The next command removes the temporary folders of killed processes.
    tempfile.tempdir = str(folders[1] / "tmp")
    with temporary_folder():
        pass
    undisturbed_tables, disturbed_tables = map(tables, folders)
    ends = [read_exit(a) for job in disturbed.matrix.jobs for a in list_attempts(job.folder)]
    differing = sorted(
        name
        for name in undisturbed_tables.keys() | disturbed_tables.keys()
        if undisturbed_tables.get(name) != disturbed_tables.get(name)
    )
    record = {
        "finished": utc_now(),
        "seed": options.seed,
        "cells": len(disturbed.matrix.jobs),
        "runners": RUNNERS,
        "faults": dict(sorted(Counter(log.read_text().split()).items())),
        "failures": dict(sorted(Counter(end.failure for end in ends if end is not None).items())),
        "attempts": len(ends),
        "looks taken back": looks,
        "final commands": commands,
        "compared files": len(undisturbed_tables),
        "differing files": differing,
        "remaining processes": len(list(remaining_processes(folders[1]))),
        "remaining files": remaining_files(folders[1]),
        # A runner that is killed cannot remove the folder of its fork server's socket. A test that
        # continues counts these folders and the minutes from its continuation on.
        "socket folders": len(set(Path("/dev/shm").glob("lit_attn-temporary-*")) - sockets),
        "minutes": round((time.monotonic() - started) / 60, 1),
        "code": code_hash(()),
        "versions": package_versions(),
    }
    write_json(options.record, record)
    print(json.dumps(record, indent=2))
    return 1 if differing or record["remaining processes"] or record["remaining files"] else 0


if __name__ == "__main__":
    sys.exit(main())
