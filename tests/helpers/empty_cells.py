"""Cells that train nothing, and a command that runs them for helpers.runner_cost."""

import argparse
import io
import json
import resource
import sys
from importlib import import_module
from pathlib import Path

from helpers.fake_cells import result
from lit_attn.ablate.display import Display
from lit_attn.ablate.launch import Launcher
from lit_attn.ablate.plan import expand
from lit_attn.ablate.runner import Runner
from lit_attn.ablate.slots import make_slots
from lit_attn.config.cell import Cell
from lit_attn.config.study import read_studies


def run_cell(folder: Path, *, smoke: bool = False) -> None:
    """Write a result without training."""
    result(Cell.read(folder / "config.yaml")).write(folder / "result.json")


def run_importing_cell(folder: Path, *, smoke: bool = False) -> None:
    """Import the modules of training and write a result."""
    import_module("lit_attn.training.build")
    run_cell(folder, smoke=smoke)


def main(arguments: list[str] | None = None) -> int:
    """Run the first cells of a study as the ablation command does, but write no tables.

    Prints the number of cells that ran and the runner's greatest memory in bytes.
    """
    parser = argparse.ArgumentParser(prog="python -m helpers.empty_cells", description=__doc__)
    parser.add_argument("study", type=Path, help="an ablations.yaml, or a cell's folder")
    parser.add_argument(
        "--out", type=Path, help="folder of the cells; without it STUDY is the folder of one cell"
    )
    parser.add_argument("--cells", type=int, help="number of cells; default: all")
    parser.add_argument("--jobs", type=int, default=2, help="cells at once")
    parser.add_argument("--imports", action="store_true", help="import the modules of training")
    options = parser.parse_args(arguments)
    target = run_importing_cell if options.imports else run_cell
    if options.out is None:
        target(options.study, smoke=False)
        return 0
    (study,) = read_studies(options.study).values()
    jobs = expand(study, options.out).jobs[: options.cells]
    missing = [job for job in jobs if job.state() != "done"]
    launcher = Launcher(f"helpers.empty_cells:{target.__name__}")
    summary = Runner(launcher, make_slots(options.jobs), Display(io.StringIO())).run(missing)
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(json.dumps({"ran": len(missing), "failed": len(summary.failed), "memory": memory}))
    return 1 if summary.failed else 0


if __name__ == "__main__":
    sys.exit(main())
