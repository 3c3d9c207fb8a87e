"""`--dry-run --estimate`: what studies will cost, by a few steps of every distinct model.

The steps are made on this machine, by as many models at once as cells would be, so that they take
from each other what cells would; where there are fewer models than that, they take less.
"""

import sys
import tempfile
from pathlib import Path
from typing import TextIO

from lit_attn.ablate.display import Lines, clock
from lit_attn.ablate.launch import Launcher
from lit_attn.ablate.plan import Job, Matrix
from lit_attn.ablate.runner import Runner
from lit_attn.ablate.slots import Slots
from lit_attn.cells.records import Timing
from lit_attn.config.cell import Cell

TARGET = "lit_attn.train:time_cell"


def show(matrices: list[Matrix], slots: Slots, stream: TextIO) -> bool:
    """Write a table for each study; whether every model could be measured.

    Raises ConfigError where a cell asks for more devices than there are.
    """
    jobs = [job for matrix in matrices for job in matrix.jobs]
    slots.check(job.cell for job in jobs)
    timings = measure([job.cell for job in jobs], slots)
    for matrix in matrices:
        print(table(matrix, timings, slots), file=stream)
    return len(timings) == len({job.cell.kind for job in jobs})


def measure(cells: list[Cell], slots: Slots) -> dict[str, Timing]:
    """The timings of `cells` by their kind, in a folder that does not stay.

    What cannot be measured says so on standard error, and is left out.
    """
    distinct = {cell.kind: cell for cell in reversed(cells)}
    launcher = Launcher(TARGET)
    launcher.share_cores(slots.at_once(cells))
    with tempfile.TemporaryDirectory(prefix="lit_attn-") as name:
        jobs = {key: Job(cell, Path(name) / key) for key, cell in reversed(distinct.items())}
        Runner(launcher, slots, Lines(sys.stderr)).run(jobs.values())
        paths = {key: job.folder / "timing.json" for key, job in jobs.items()}
        return {
            key: Timing.model_validate_json(path.read_bytes())
            for key, path in paths.items()
            if path.exists()
        }


def table(matrix: Matrix, timings: dict[str, Timing], slots: Slots) -> str:
    """Every variant's cost, and the hours of what is yet to run."""
    width = max(len(variant.name) for variant in matrix.variants)
    lines = [
        f"{matrix.name}: {matrix.title}",
        f"  {'':<{width}}  {'ms/step':>9}  {'steps':>8}  {'start':>7}  {'evaluations':>14}"
        f"  {'a cell':>9}  {'GB':>6}",
    ]
    shown = {job.cell.variant: job.cell for job in reversed(matrix.jobs)}
    for variant in matrix.variants:
        found = timings.get(shown[variant.name].kind)
        lines.append(f"  {variant.name:<{width}}  {_row(found)}")
    missing = [job.cell for job in matrix.jobs if job.state() != "done"]
    lines.append(_hours(missing, timings, slots))
    return "\n".join(lines) + "\n"


def _row(timing: Timing | None) -> str:
    if timing is None:
        return "could not be measured"
    evaluations = f"{timing.evaluations} x {timing.evaluation_time:.3g} s"
    return (
        f"{timing.step_time * 1e3:>9.4g}  {timing.steps:>8,}  {timing.startup:>5.1f} s"
        f"  {evaluations:>14}  {clock(timing.seconds):>9}  {timing.memory / 1e9:>6.2f}"
    )


def _hours(missing: list[Cell], timings: dict[str, Timing], slots: Slots) -> str:
    """The hours of `missing`, one after the other and side by side."""
    known = [(cell, timings[cell.kind]) for cell in missing if cell.kind in timings]
    said = f"  {len(missing)} cells to run"
    if not known:
        return said
    seconds = sum(timing.seconds for _, timing in known)
    of_devices = sum(t.seconds * cell.experiment.training.devices for cell, t in known)
    what = "core" if slots.devices[0].gpu is None else "GPU"
    at_once = slots.at_once(missing)
    without = len(missing) - len(known)
    return (
        f"{said}: {of_devices / 3600:.2f} {what} hours, {seconds / 3600 / at_once:.2f} hours with "
        f"{at_once} at once" + (f", and {without} that could not be measured" if without else "")
    )
