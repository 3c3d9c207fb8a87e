"""`--dry-run`: the cells of a study and their states, with `--params` or `--estimate` their costs.

`--estimate` times a few steps of every distinct model on this machine, with as many models at once
as there would be cells, so that models slow each other down as cells would. With fewer models than
cells at once they slow each other down less.
"""

import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from lit_attn.ablate.display import format_seconds
from lit_attn.ablate.plan import Job, Matrix
from lit_attn.cells.records import Timing
from lit_attn.config.cell import Cell
from lit_attn.schema.errors import ConfigError

if TYPE_CHECKING:
    from lit_attn.ablate.slots import Slots

TIMING_TARGET = "lit_attn.train:time_cell"


def print_cells(matrices: list[Matrix], stream: TextIO, with_costs: bool) -> None:
    """Write every cell with its identity and state, `with_costs` also what its model costs."""
    for matrix in matrices:
        source = matrix.source
        print(f"{matrix.name}: {matrix.title}", file=stream)
        experiment, baseline = source.experiment_path, source.study.baseline
        print(f"  experiment {experiment}, baseline {baseline}", file=stream)
        if not matrix.is_measured:
            print("  match: time: the step times are not measured yet", file=stream)
        if matrix.tuning is not None:
            trials = Counter(job.state() for job in matrix.trials)
            text = ", ".join(f"{count} {state}" for state, count in trials.items())
            tuned = len(matrix.written) - len(matrix.untuned)
            total = f"{tuned} of {len(matrix.written)} variants are tuned"
            print(f"  tuning: {total}; cells of trials: {text}", file=stream)
        _print_warnings(matrix, stream)
        if with_costs:
            _print_costs(matrix, stream)
        width = max((len(job.cell.variant) for job in matrix.jobs), default=0)
        counts: Counter[str] = Counter()
        for job in matrix.jobs:
            state = job.state()
            counts[state] += 1
            cell = job.cell
            print(
                f"  {cell.variant:<{width}}  seed {cell.seed:<4} {job.identity}  {state}",
                file=stream,
            )
        states = ", ".join(f"{count} {state}" for state, count in counts.items())
        product = f"{len(matrix.variants)} variants x {len(matrix.seeds)} seeds"
        print(f"  {product} = {len(matrix.jobs)} cells: {states}\n", file=stream)


def print_estimate(matrices: list[Matrix], jobs: int | None, stream: TextIO) -> bool:
    """Write the costs of each study; return True if every model could be timed."""
    from lit_attn.ablate.slots import make_slots

    slots = make_slots(jobs)
    cells = [job.cell for matrix in matrices for job in (*matrix.trials, *matrix.jobs)]
    slots.check(cells)
    timings = measure(cells, slots)
    for matrix in matrices:
        print(format_estimate(matrix, timings, slots), file=stream)
    return len(timings) == len({cell.kind for cell in cells})


def measure(cells: list[Cell], slots: "Slots") -> dict[str, Timing]:
    """Return the timings of `cells` by `Cell.kind`.

    The cells run in a temporary folder. Cells that fail are reported on standard error and left
    out.
    """
    # Imported here, because a plain dry run starts no processes.
    from lit_attn.ablate.display import Display
    from lit_attn.ablate.launch import Launcher
    from lit_attn.ablate.runner import Runner

    distinct: dict[str, Cell] = {}
    for cell in cells:
        distinct.setdefault(cell.kind, cell)
    launcher = Launcher(TIMING_TARGET)
    launcher.share_cores(slots.at_once(cells))
    with tempfile.TemporaryDirectory(prefix="lit_attn-") as name:
        jobs = {kind: Job(cell, Path(name) / kind) for kind, cell in distinct.items()}
        Runner(launcher, slots, Display(sys.stderr)).run(jobs.values())
        paths = {kind: job.folder / "timing.json" for kind, job in jobs.items()}
        return {
            kind: Timing.model_validate_json(path.read_bytes())
            for kind, path in paths.items()
            if path.exists()
        }


def format_estimate(matrix: Matrix, timings: dict[str, Timing], slots: "Slots") -> str:
    """Return a table of every variant's costs, and the hours that the missing cells need."""
    cells: dict[str, Cell] = {}
    jobs = (*matrix.trials, *matrix.jobs)
    for job in jobs:
        cells.setdefault(job.cell.variant, job.cell)
    width = max(map(len, cells), default=0)
    lines = [
        f"{matrix.name}: {matrix.title}",
        f"  {'':<{width}}  {'ms/step':>9}  {'steps':>8}  {'startup':>7}  {'evaluations':>14}"
        f"  {'one cell':>9}  {'GB':>6}",
    ]
    for name, cell in cells.items():
        if (timing := timings.get(cell.kind)) is None:
            lines.append(f"  {name:<{width}}  could not be measured")
            continue
        evaluations = f"{timing.evaluations} x {timing.evaluation_time:.3g} s"
        lines.append(
            f"  {name:<{width}}  {timing.step_time * 1e3:>9.4g}  {timing.steps:>8,}"
            f"  {timing.startup:>5.1f} s  {evaluations:>14}  {format_seconds(timing.seconds):>9}"
            f"  {timing.memory / 1e9:>6.2f}"
        )
    missing = [job.cell for job in jobs if job.state() != "done"]
    lines.append(f"  {len(missing)} cells to run{_format_hours(missing, timings, slots)}")
    return "\n".join(lines) + "\n"


def _format_hours(missing: list[Cell], timings: dict[str, Timing], slots: "Slots") -> str:
    """Return the hours of one device and of this machine, or nothing if no cell was measured."""
    measured = [(cell, timings[cell.kind]) for cell in missing if cell.kind in timings]
    if not measured:
        return ""
    seconds = sum(timing.seconds for _, timing in measured)
    device_seconds = sum(t.seconds * cell.experiment.training.devices for cell, t in measured)
    device = "core" if slots.devices[0].gpu is None else "GPU"
    at_once = slots.at_once(missing)
    unmeasured = len(missing) - len(measured)
    rest = f", and {unmeasured} that could not be measured" if unmeasured else ""
    return (
        f": {device_seconds / 3600:.2f} {device} hours, {seconds / 3600 / at_once:.2f} hours with "
        f"{at_once} at once{rest}"
    )


def _print_warnings(matrix: Matrix, stream: TextIO) -> None:
    """Write each warning about a learning-rate schedule once, with the variants that it affects."""
    names: dict[str, list[str]] = {}
    for variant in matrix.variants:
        experiment = variant.experiment
        if warning := experiment.schedule.warn(experiment.training.epochs):
            names.setdefault(warning, []).append(variant.name)
    for warning, variants in names.items():
        count = len(variants)
        which = "all variants" if count == len(matrix.variants) else ", ".join(variants)
        print(f"  warning: {which}: {warning}", file=stream)


def _print_costs(matrix: Matrix, stream: TextIO) -> None:
    from lit_attn.models import factory

    width = max(len(variant.name) for variant in matrix.written)
    print(f"  {'':<{width}}  {'parameters':>12}  {'MFLOPs':>9}  FFN width", file=stream)
    for variant in matrix.written:
        data = variant.experiment.data
        try:
            model = factory.resolve(variant.experiment.model, variant.match_to, data)
            cost = factory.describe(model, data)
        except ConfigError as error:
            context = f"{variant.where}: {matrix.source.name}: variant '{variant.name}'"
            raise ConfigError(f"{context}: {error}") from error
        ffn = "none" if cost.ffn_width is None else cost.ffn_width
        matched = "  (matched)" if variant.match_to else ""
        print(
            f"  {variant.name:<{width}}  {cost.parameters:>12,}  {cost.flops / 1e6:>9,.2f}"
            f"  {ffn}{matched}",
            file=stream,
        )
