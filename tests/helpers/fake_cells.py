"""Substitute for training in the tests of the runner; the variant's name selects the behaviour.

As a script, this file is `python -m lit_attn.ablate` with these cells and without a report.
"""

import os
import random
import resource
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from lit_attn.cells import ranks
from lit_attn.cells.failure import Diverged, Preempted
from lit_attn.cells.records import Result, Spread
from lit_attn.config.cell import Cell

TARGET = "helpers.fake_cells:run_cell"
# On a busy machine a rank may need several seconds to end after another one.
ranks.SETTLE = 10.0


def run_cell(folder: Path, *, smoke: bool = False) -> None:
    cell = Cell.read(folder / "config.yaml")
    rank = int(os.environ.get("RANK", 0))
    if rank > 0:
        _other_rank(folder, cell.variant, rank)
        return
    (folder / "progress.json").write_text('{"step": 0, "total": 1}')
    with (folder.parents[1] / "ran.txt").open("a") as log:
        log.write(f"{cell.variant}/{cell.seed}{' smoke' if smoke else ''}\n")
    print(f"threads {os.environ.get('OMP_NUM_THREADS')}", flush=True)
    match cell.variant.split("-")[0]:
        case "crash":
            raise RuntimeError("the reactor is on fire")
        case "diverged":
            raise Diverged("loss is nan at step 3")
        case "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        case "silent":
            sys.exit(0)
        case "minusone":
            sys.exit(-1)
        case "crashonce" if not (folder / "second").exists():
            (folder / "second").touch()
            raise RuntimeError("the first time only")
        case "gated":
            _wait(folder.parents[1] / "go")
        case "hang":
            _hang(folder)
        case "hangonce" if not (folder / "second").exists():
            (folder / "second").touch()
            _hang(folder)
        case "stuck":
            _stuck(folder)
        case "stuckonce" if not (folder / "second").exists():
            (folder / "second").touch()
            _stuck(folder)
        case "killedonce" if not (folder / "second").exists():
            (folder / "second").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        case "memory":
            resource.setrlimit(resource.RLIMIT_AS, (2**33, 2**33))
            bytearray(2**34)
        case "leak":
            leaked = []
            while True:
                leaked.append(b"x" * 2**22)
        case "full":
            (folder / "ballast").write_bytes(bytes(2**21))
        case "brief":
            time.sleep(0.05)
        case "rankcrash" | "rankkilled" | "rankpreempted":
            _wait(folder / "rank1")
            if cell.variant != "rankpreempted":
                raise RuntimeError("[gloo] Connection closed by peer [127.0.0.1]:1")
            raise Preempted("stopped by SIGTERM")
        case "rankhang":
            _hang(folder)
        case "daemon":
            # Processes in sessions of their own, one of them without a living parent.
            code = "import os, time; os.fork() and os._exit(0); os.setsid(); time.sleep(1000)"
            subprocess.run([sys.executable, "-c", code], check=True)
            child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
            (folder / "child.pid").write_text(str(child.pid))
            match cell.variant.split("-")[-1]:
                case "crash":
                    raise RuntimeError("the reactor is on fire")
                case "killed":
                    os.kill(os.getpid(), signal.SIGKILL)
                case "stuck":
                    _stuck(folder)
        case "parricide":
            os.kill(os.getppid(), signal.SIGKILL)
            time.sleep(1000)
        case "exit":
            os._exit(0)
        case "elsewhere":
            os.chdir("/")
        case "orphan":
            # This child process outlives the cell unless the runner kills it.
            child = subprocess.Popen(["sleep", "1000"])
            (folder / "child.pid").write_text(str(child.pid))
    result(cell, measure(cell)).write(folder / "result.json")


EFFECTS = {"base": 0.0, "weak": -0.05, "good": 0.05, "dull": 0.0}
"""Differences to the variant `base`, by variant; all other variants have equal results."""


def measure(cell: Cell) -> dict[str, float] | None:
    """Return the metrics of a variant whose name ends with one in EFFECTS, None for another one.

    So `gated-dull` waits as `gated` and has the values of `dull`, whose differences alternate in
    sign, so that no seeds show a lead.
    """
    name = cell.variant.partition("@")[0].rpartition("-")[2]
    if name not in EFFECTS:
        return None
    text = f"{cell.study}/{name}/{cell.seed}"
    noise = random.Random(text).gauss(0, 0.001)
    if name == "dull":
        noise += 0.01 * (-1) ** cell.seed
    loss = abs(cell.experiment.optimizer.lr - 2) + 0.001 * noise
    accuracy = 0.7 + EFFECTS[name] + noise
    return {"test/accuracy": accuracy, "val/accuracy": accuracy, "val/loss": loss}


def _other_rank(folder: Path, variant: str, rank: int) -> None:
    print(f"rank {rank} of {os.environ['WORLD_SIZE']} in {os.environ['LIT_ATTN_RENDEZVOUS']}")
    sys.stdout.flush()
    (folder / f"rank{rank}").write_text(str(os.getpid()))
    match variant:
        case "rankcrash":
            time.sleep(0.2)
            raise ValueError("this rank alone")
        case "rankkilled":
            os.kill(os.getpid(), signal.SIGKILL)
        case "rankpreempted":
            raise Preempted("stopped by SIGTERM")
        case "rankhang":
            _hang(folder, f"child{rank}.pid")


def result(cell: Cell, metrics: dict[str, float] | None = None) -> Result:
    """Return a result of `cell` with invented numbers."""
    return Result(
        study=cell.study,
        variant=cell.variant,
        seed=cell.seed,
        identity=cell.fingerprint,
        metrics=metrics or {"test/accuracy": 0.5},
        selected_epoch=1,
        steps=1,
        epochs=1,
        parameters=1,
        flops=1,
        ffn_width=1,
        step_time=Spread(median=1.0, iqr=0.0, count=1),
        peak_memory=1,
        wall_time=1.0,
        device="CPU",
        attempts=1,
        code="c",
        data="d",
        versions={},
        finished="2000-01-01T00:00:00+00:00",
    )


def _wait(path: Path) -> None:
    while not path.exists():
        time.sleep(0.02)


def _stuck(folder: Path) -> None:
    """Complete no step and ignore SIGTERM."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    (folder / "progress.json").write_text('{"step": 3, "total": 10}')
    child = subprocess.Popen(["sleep", "1000"])
    (folder / "child.pid").write_text(str(child.pid))
    child.wait()
    # The runner may kill the child first, and then this process.
    time.sleep(1000)


def _hang(folder: Path, child_file: str = "child.pid") -> None:
    """Run until SIGTERM; with a file `stubborn` in the study's folder, run until SIGKILL.

    Like training, the cell stops between two steps, however many signals it gets. If the signal
    handler raised an exception, a second signal could interrupt the traceback of the first.
    """
    signals: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: signals.append(number))
    child = subprocess.Popen(["sleep", "1000"])
    (folder / child_file).write_text(str(child.pid))
    (folder / "progress.json").write_text('{"step": 3, "total": 10}')
    while not signals or (folder.parents[1] / "stubborn").exists():
        time.sleep(0.02)
    raise Preempted("stopped by SIGTERM")


def write_reports(runs: Path, reports: Path, studies: list[str]) -> list[Path]:
    """Write a table without numbers for each study; with a file `pause` in `runs`, never end.

    Returns the folders of the studies.
    """
    if (runs / "pause").exists():
        with tempfile.NamedTemporaryFile(dir=reports.parent, prefix="half-"):
            time.sleep(1000)
    for study in studies:
        (reports / study).mkdir(parents=True, exist_ok=True)
        text = f"the table of {study}: 1 ± 0\n"
        for name in ("table.md", "table.txt"):
            (reports / study / name).write_text(text, encoding="utf-8")
    return [reports / study for study in studies]


def _main() -> int:
    import lit_attn.report
    from lit_attn.ablate import runner
    from lit_attn.ablate.__main__ import main
    from lit_attn.ablate.slurm import follow

    runner.BACKOFF = 0.05
    follow.POLL = 1.0

    lit_attn.report.write_reports = write_reports
    return main(sys.argv[1:], TARGET)


if __name__ == "__main__":
    sys.exit(_main())
