"""Train one cell, from its config.yaml to its result.json: `python -m lit_attn.train CELL_DIR`.

A process per device joins the cell's process group, trains (lit_attn.training.fit) and writes the
records; `result.json` comes last, and only this file marks success. docs/design.md shows the life
of a cell. A cell without a result continues from its newest checkpoint.
"""

import contextlib
import multiprocessing.util
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from lit_attn.cells.failure import Diverged, Preempted
from lit_attn.cells.folder import read_result, require_no_links, set_aside
from lit_attn.cells.launched import (
    RENDEZVOUS,
    is_started_by_torchrun,
    let_first_failure_end_first,
)
from lit_attn.cells.lock import BUSY, CellLocked, hold_lock
from lit_attn.cells.process import die_with_parent, redirect_output
from lit_attn.cells.ranks import run_ranks
from lit_attn.cells.records import require_known_version
from lit_attn.data.log import collect_warnings
from lit_attn.schema.errors import ConfigError, OneLineParser, command, program
from lit_attn.schema.plugins import explain_failure
from lit_attn.schema.sources import freeze_package

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from lit_attn.config.cell import Cell
    from lit_attn.training.process_group import ProcessGroup

NOT_CHECKED = "the models and data were not checked"
"""Beginning of the warnings about a check of cells that could not be made."""


class CheckEnd(NamedTuple):
    """Last message of a check: a wrong cell (`Mistake`, as a tuple), and all warnings."""

    mistake: tuple[int, str, str, bool] | None
    warnings: list[str]


@command
def main(arguments: list[str] | None = None) -> int:
    """Return exit code 0 for a result, 1 diverged, 2 bad configuration, 75 locked, 143 SIGTERM."""
    parser = OneLineParser(
        program("train"), description="Train one cell, from its config.yaml to its result.json."
    )
    parser.add_argument("cell", type=Path, metavar="CELL_DIR", help="a folder with a config.yaml")

    # Modules that are imported later have the code of this moment, whose hash is in the result.
    freeze_package()
    try:
        # Absolute, because the cell's code may change the working directory.
        folder: Path = parser.parse_args(arguments).cell.absolute()
        return _train(folder)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    except CellLocked as error:
        print(error, file=sys.stderr)
        return BUSY


def _train(folder: Path) -> int:
    """Train the cell in `folder` unless it has a result, and return the exit code."""
    require_no_links(folder)
    cell = _read_cell(folder)
    if read_result(folder, cell.fingerprint) is not None:
        print(f"{folder}: has a result already; `{program('rerun')} CELL FILE` repeats it")
        return 0
    print(f"{folder}: reading the data and building the model", flush=True)
    if is_started_by_torchrun():
        return _run_launched_rank(folder, cell.processes)
    if cell.processes == 1:
        with hold_lock(folder):
            return _run_and_report(folder)
    with hold_lock(folder, is_beating=False) as start_heartbeat:
        code = run_ranks(cell.processes, lambda: _run_rank(folder), None, start_heartbeat)
    if code == 0 and read_result(folder, cell.fingerprint) is None:
        print(f"{folder}: a process ended before the cell had a result", file=sys.stderr)
        return 1
    return code


def _run_launched_rank(folder: Path, processes: int) -> int:
    """Run this process's rank of a cell that torchrun has started; rank 0 holds the lock."""
    world = int(os.environ["WORLD_SIZE"])
    if world != processes:
        raise ConfigError(
            f"{folder / 'config.yaml'}: training.devices: {processes}, but torchrun has started"
            f" {world} processes; --nnodes times --nproc-per-node must be {processes}"
        )
    os.environ[RENDEZVOUS] = "env://"
    is_first = os.environ["RANK"] == "0"
    with hold_lock(folder) if is_first else contextlib.nullcontext(), let_first_failure_end_first():
        return _run_and_report(folder)


def _run_rank(folder: Path) -> None:
    """Run one rank of the cell, and exit unless it has ended without a failure."""
    code = _run_and_report(folder)
    if code:
        sys.exit(code)


def _run_and_report(folder: Path) -> int:
    """Run the cell, print why it failed, and return the exit code."""
    try:
        run_cell(folder)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    except Diverged as error:
        print(f"diverged: {error}", file=sys.stderr)
        return 1
    except Preempted as error:
        print(error, file=sys.stderr)
        return 128 + signal.SIGTERM
    except SystemExit as error:
        # Only a result is success.
        print(f"{folder}: the cell's code called sys.exit({error.code!r})", file=sys.stderr)
        return 1
    return 0


def run_cell(cell_dir: Path, *, smoke: bool = False) -> None:
    """Train the cell in `cell_dir` and write its result.json.

    Raises ConfigError for a configuration that cannot run, Diverged for a loss that is not finite,
    Preempted after SIGTERM, and any other exception of training unchanged.
    """
    from lit_attn.training.fit import fit
    from lit_attn.training.result import SMOKE_LIMITS

    with _prepare(cell_dir) as (cell, group):
        limits = SMOKE_LIMITS if smoke else None
        fit(cell, cell_dir, group, limits)


def time_cell(cell_dir: Path) -> None:
    """Run a few steps of the cell in `cell_dir` and write the estimated cost to its timing.json.

    The run also writes a result.json, whose numbers mean nothing. Raises as `run_cell`.
    """
    started = time.perf_counter()
    from lit_attn.training.fit import fit
    from lit_attn.training.result import SAMPLE_LIMITS, at_final_image_size, estimate_cost

    with _prepare(cell_dir) as (cell, group):
        run = fit(at_final_image_size(cell), cell_dir, group, SAMPLE_LIMITS)
    if run is not None:
        seconds = time.perf_counter() - started
        estimate_cost(cell, run, seconds).write(cell_dir / "timing.json")


def check_cells(
    cells: list[dict[str, Any]],
    sender: "Connection",
    has_data: bool,
    untried: list[int],
    selects: dict[int, list[str]],
    gpu: str | None,
) -> None:
    """Check cells in order up to the first that cannot run, and send a `CheckEnd`.

    The number of each cell is sent before, when its check starts. CUDA sees only `gpu`; None
    changes nothing. The other arguments are those of `find_mistake`.
    """
    from lit_attn.training.first_step import find_mistake

    die_with_parent()
    if gpu is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpu
    # The cells write to their logs.
    redirect_output(Path(os.devnull))
    mistake = None
    with collect_warnings() as warnings:
        try:
            mistake = find_mistake(cells, has_data, sender.send, untried, selects)
        except Exception as error:
            # This process has no output, so its end would not say that nothing is checked.
            warnings.append(f"{NOT_CHECKED}: {explain_failure(error, 'the check')}")
    sender.send(CheckEnd(None if mistake is None else (*mistake,), warnings))


def write_floors(cell_dir: Path, path: Path, log: Path) -> None:
    """Write the floors of the data of a cell to `path`, and everything that is printed to `log`.

    Raises ConfigError if the data cannot be read.
    """
    from lit_attn.training.floors import compute_floors

    die_with_parent()
    redirect_output(log)
    compute_floors(_read_cell(cell_dir)).write(path)


def _read_cell(cell_dir: Path) -> "Cell":
    """Read the cell's config.yaml, which imports the cell's parts."""
    # Imported here, because --help imports no PyTorch.
    from lit_attn.config.cell import Cell

    return Cell.read(cell_dir / "config.yaml")


@contextlib.contextmanager
def _prepare(cell_dir: Path) -> Iterator[tuple["Cell", "ProcessGroup"]]:
    """Read the cell, clean its folder, and join its process group."""
    cell = _read_cell(cell_dir)
    from lit_attn.training.process_group import join_process_group, read_ranks

    rank = read_ranks().rank
    require_no_links(cell_dir)
    if rank == 0:
        _clean(cell_dir, cell.fingerprint)
    with (
        _keep_temporary_files_inside(cell_dir, rank),
        join_process_group(cell.experiment.training.accelerator) as group,
    ):
        yield cell, group


def _clean(cell_dir: Path, identity: str) -> None:
    """Remove temporary files of killed attempts, and set an unreadable result aside.

    Raises ConfigError for a result of a newer version.
    """
    folders = [cell_dir]
    folders += [path for path in cell_dir.iterdir() if path.is_dir()]
    for folder in folders:
        for path in folder.glob(".*.tmp"):
            path.unlink(missing_ok=True)
    result = cell_dir / "result.json"
    if result.exists() and read_result(cell_dir, identity) is None:
        require_known_version(result.read_bytes(), result)
        renamed = set_aside(result)
        print(f"{result}: cannot be read; renamed to {renamed.name}", flush=True)


@contextlib.contextmanager
def _keep_temporary_files_inside(cell_dir: Path, rank: int) -> Iterator[None]:
    """Set TMPDIR to a new folder inside the cell's folder, and remove the folder afterwards.

    Lightning writes a checkpoint to a temporary file and moves it into place. Only within one file
    system is that move atomic. The cache of compiled code stays outside, where all cells share it.
    """
    # multiprocessing chooses its folder now and keeps it: the path of a socket may have at most 107
    # characters, and a path inside a cell's folder may be longer.
    multiprocessing.util.get_temp_dir()
    compile_cache = Path(tempfile.gettempdir()) / f"torchinductor-{os.getuid()}"
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(compile_cache))
    name = f"tmp.rank{rank}" if rank else "tmp"
    inside = cell_dir.absolute() / name
    shutil.rmtree(inside, ignore_errors=True)
    inside.mkdir()
    before = os.environ.get("TMPDIR", tempfile.gettempdir())
    _set_temporary_folder(str(inside))
    try:
        yield
    finally:
        _set_temporary_folder(before)
        shutil.rmtree(inside, ignore_errors=True)


def _set_temporary_folder(path: str) -> None:
    """Let this process and its children put temporary files into the folder `path`."""
    os.environ["TMPDIR"] = path
    # Python reads the variable again.
    tempfile.tempdir = None


if __name__ == "__main__":
    sys.exit(main())
