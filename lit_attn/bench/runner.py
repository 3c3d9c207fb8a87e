"""What the runner itself costs: expanding a matrix, looking at its folders, and starting cells.

The cells are trivial (they write a made-up result), so all of the time is the runner's.
"""

import io
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from lit_attn.ablate.display import Lines
from lit_attn.ablate.launch import Launcher
from lit_attn.ablate.plan import Matrix, expand
from lit_attn.ablate.runner import Runner
from lit_attn.ablate.slots import make_slots
from lit_attn.config.cell import Cell
from lit_attn.config.study import read_studies
from lit_attn.records import Result, Spread

EXPERIMENT = """\
data: digits
model: {kind: vit, dim: 16, depth: 1, heads: 2, patch: 4, ffn: {width: 32}}
optimizer: {kind: adamw, lr: 1}
training: {epochs: 1}
"""
STUDY = """\
studies:
  bench:
    title: The runner's own cost
    experiment: experiment.yaml
    seeds: 1
    axes: {{optimizer.lr: {rates}, training.epochs: {epochs}}}
    baseline: lr=1,epochs=1
"""


class Row(NamedTuple):
    """Seconds: the median over all rounds, and the least and the most."""

    what: str
    median: float
    least: float
    most: float


def run(cells: int, at_once: int, expanded: int, rounds: int) -> list[Row]:
    """Time the listing of about `expanded` cells, and the running of `cells`, `at_once` at a time.

    The server that cells are forked from is started first, and its start is a row of its own.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "experiment.yaml").write_text(EXPERIMENT)
        side = round(expanded**0.5)
        steps = list(range(1, side + 1))
        study = folder / "ablations.yaml"
        study.write_text(STUDY.format(rates=steps, epochs=steps))
        listed = f"{side * side:,} cells"

        def matrix(out: str) -> Matrix:
            return expand(read_studies(study)["bench"], folder / out)

        unfinished = matrix("listed")
        runs = iter(range(rounds))

        def run_cells() -> None:
            _run(matrix(f"runs-{next(runs)}"), cells, at_once)

        expansion = _timed(f"read and expand {listed}", rounds, lambda: matrix("listed"))
        states = _timed(
            f"look at {listed}", rounds, lambda: [job.state() for job in unfinished.jobs]
        )
        first = _timed("start the server and run 1 cell", 1, lambda: _run(matrix("first"), 1, 1))
        whole = _timed(f"run {cells} cells, {at_once} at once", rounds, run_cells)
        each = Row("the same, per cell", *(seconds / cells for seconds in whole[1:]))
    return [expansion, states, first, whole, each]


def table(rows: list[Row]) -> str:
    """Markdown, in milliseconds."""
    lines = ["| what | median (ms) | least | most |", "|---|---:|---:|---:|"]
    lines += [
        f"| {row.what} | {row.median * 1e3:,.1f} | {row.least * 1e3:,.1f} | {row.most * 1e3:,.1f} |"
        for row in rows
    ]
    return "\n".join(lines)


def trivial_cell(folder: Path, *, smoke: bool) -> None:
    """Writes a result without training."""
    cell = Cell.read(folder / "config.yaml")
    Result(
        study=cell.study,
        variant=cell.variant,
        seed=cell.seed,
        identity=cell.fingerprint,
        metrics={},
        selected_epoch=0,
        steps=0,
        epochs=0,
        parameters=0,
        flops=0,
        ffn_width=None,
        step_time=Spread(median=0.0, iqr=0.0, count=0),
        peak_memory=0,
        wall_time=0.0,
        device="none",
        attempts=1,
        code="",
        data="",
        versions={},
        finished="",
    ).write(folder / "result.json")


def _run(matrix: Matrix, cells: int, at_once: int) -> None:
    launcher = Launcher(f"{__name__}:{trivial_cell.__name__}")
    runner = Runner(launcher, make_slots(at_once), Lines(io.StringIO()))
    summary = runner.run(matrix.jobs[:cells])
    if summary.failed:
        raise RuntimeError(f"a trivial cell failed: {summary.failed[0].message}")


def _timed(what: str, rounds: int, action: Callable[[], object]) -> Row:
    times = []
    for _ in range(rounds):
        begun = time.perf_counter()
        action()
        times.append(time.perf_counter() - begun)
    return Row(what, statistics.median(times), min(times), max(times))
