"""One cell, from its config.yaml to its result.json: `python -m lit_attn.train CELL_DIR`.

A cell that was stopped goes on from its newest checkpoint. `result.json` is written last, after
every number in it was checked; its existence is the only mark of success.
"""

import argparse
import multiprocessing.util
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

from lit_attn.cells.failure import Diverged, Preempted
from lit_attn.cells.records import Result, Timing
from lit_attn.config.cell import Cell
from lit_attn.schema.errors import ConfigError
from lit_attn.training.run_length import ESTIMATE, SMOKE, Extent, Limits


def main(arguments: list[str] | None = None) -> int:
    """The command line.

    Exit codes: 0 with a result, 1 diverged, 2 bad configuration, 75 another process runs the cell,
    143 stopped by SIGTERM.
    """
    parser = argparse.ArgumentParser(prog="python -m lit_attn.train", description=__doc__)
    parser.add_argument("cell", type=Path, metavar="CELL_DIR", help="a folder with a config.yaml")
    smoke = "one step and one evaluation batch, in CELL_DIR/smoke"
    parser.add_argument("--smoke", action="store_true", help=smoke)
    options = parser.parse_args(arguments)

    from lit_attn.cells.folder import read_result
    from lit_attn.cells.lock import CellLocked, hold_lock, read_holder
    from lit_attn.cells.ranks import fork_ranks
    from lit_attn.cells.worker import BUSY

    folder: Path = options.cell
    try:
        cell = Cell.read(folder / "config.yaml")
        if options.smoke:
            folder = folder / "smoke"
            cell.write(folder / "config.yaml")
        elif read_result(folder, cell.fingerprint) is not None:
            print(f"{folder}: has a result already")
            return 0
        devices = cell.experiment.training.devices
        if devices == 1:
            with hold_lock(folder):
                return _answered(folder, options.smoke)
        with (
            fork_ranks(devices, lambda: sys.exit(_answered(folder, options.smoke))) as processes,
            hold_lock(folder),
        ):
            return processes.run(None)
    except CellLocked:
        by = read_holder(folder)
        who = "another process" if by is None else f"process {by.pid} on {by.host}"
        print(f"{folder}: {who} runs this cell", file=sys.stderr)
        return BUSY
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2


def _answered(folder: Path, smoke: bool) -> int:
    """Run the cell; the exit code."""
    try:
        run_cell(folder, smoke=smoke)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    except Diverged as error:
        print(f"diverged: {error}", file=sys.stderr)
        return 1
    except Preempted as error:
        print(error, file=sys.stderr)
        return 143
    return 0


def run_cell(cell_dir: Path, *, smoke: bool = False) -> None:
    """Train the cell in `cell_dir` and write its result.json.

    Raises ConfigError for a configuration that cannot run, Diverged for a loss that is not finite,
    Preempted after SIGTERM, and whatever else goes wrong as it is.
    """
    _run(cell_dir, SMOKE if smoke else None)


def time_cell(cell_dir: Path, *, smoke: bool = False) -> None:
    """Run a few steps and evaluation batches of the cell in `cell_dir`; write its timing.json.

    And a result.json, whose numbers mean nothing. Raises what `run_cell` does.
    """
    begun = time.perf_counter()
    extent = _run(cell_dir, ESTIMATE)
    if extent is None:
        return
    seconds = time.perf_counter() - begun
    result = Result.model_validate_json((cell_dir / "result.json").read_bytes())
    evaluation = 0.0 if result.evaluation_time is None else result.evaluation_time.median
    # What is neither steps at their usual pace nor evaluation: data, model, compilation.
    startup = seconds - result.steps * result.step_time.median - evaluation - extent.looked
    Timing(
        startup=max(0.0, startup),
        step_time=result.step_time.median,
        steps=extent.steps,
        evaluation_time=evaluation * extent.evaluation_share + extent.looking / extent.evaluations,
        evaluations=extent.evaluations,
        memory=result.peak_memory,
    ).write(cell_dir / "timing.json")


def _run(cell_dir: Path, limits: Limits | None) -> Extent | None:
    """What a cell would be without limits; None on all of its processes but the first."""
    cell = Cell.read(cell_dir / "config.yaml")
    from lit_attn.cells.ranks import place

    here = place()
    _keep_temporary_files_inside(cell_dir, here.rank)

    from lit_attn.training.environment import device_of
    from lit_attn.training.fit import fit
    from lit_attn.training.process_group import joined

    device = device_of(cell.experiment.training.accelerator, here)
    with joined(here.rank, here.world, here.meeting, device) as group:
        return fit(cell, cell_dir, device, group, here, limits)


def _keep_temporary_files_inside(cell_dir: Path, rank: int) -> None:
    """Point TMPDIR below the cell: Lightning's checkpoint writing is atomic only so.

    It writes to a temporary file and moves that into place; across file systems a move is a copy,
    which a kill cuts short. What a killed attempt left there goes. The cache of compiled code stays
    outside, for all cells to share.
    """
    # Chosen now, and kept: the paths of sockets, as between processes that read data, end at 107
    # characters, which a cell's folder may well have.
    multiprocessing.util.get_temp_dir()
    outside = Path(tempfile.gettempdir()) / f"torchinductor-{os.getuid()}"
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(outside))
    inside = (cell_dir / (f"tmp.rank{rank}" if rank else "tmp")).resolve()
    shutil.rmtree(inside, ignore_errors=True)
    inside.mkdir()
    os.environ["TMPDIR"] = str(inside)
    tempfile.tempdir = None


if __name__ == "__main__":
    sys.exit(main())
