"""Overhead of the runner, compared with Hydra's multirun (joblib launcher) and a shell loop.

The cells are trivial (they write an invented result), so the time is the runner's. Every row times
a complete command, including the interpreter. The commands take turns, so a slow moment of the
machine affects all of them. Hydra is optional: its rows need `hydra-joblib-launcher`.
"""

import importlib.util
import json
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from lit_attn.ablate.plan import Job, expand
from lit_attn.bench import empty_cells
from lit_attn.config.study import read_studies

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
    default: true
    seeds: 1
    axes: {{optimizer.lr: {rates}, training.epochs: {epochs}}}
    baseline: lr=1,epochs=1
"""
HYDRA = """\
from pathlib import Path

import hydra
from omegaconf import DictConfig

from lit_attn.bench.empty_cells import cell, training_cell


@hydra.main(version_base=None, config_path=None)
def main(config: DictConfig) -> None:
    (training_cell if config.imports else cell)(Path(config.folder), smoke=False)


main()
"""


class Row(NamedTuple):
    """Median, smallest and largest time over all rounds, in seconds."""

    what: str
    median: float
    least: float
    most: float


class Costs(NamedTuple):
    """Rows of the table, and the peak memory of the runner over all cells, in bytes."""

    rows: list[Row]
    memory: int


def run(cells: int, at_once: int, expanded: int, rounds: int, imports: bool) -> Costs:
    """Time running `cells` cells, `at_once` at a time, and listing and resuming about `expanded`.

    With `imports`, cells import what training imports.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "experiment.yaml").write_text(EXPERIMENT)
        whole, side = _study(folder, "all", expanded)
        _study(folder, "some", cells, column=True)
        ways = _ways(folder, cells, at_once, imports)
        times: dict[str, list[float]] = {way: [] for way in ways}
        alone = _ways(folder, 1, 1, imports)
        first: dict[str, list[float]] = {way: [] for way in ways}
        for number in range(rounds):
            for place, way in enumerate(ways):
                # The shell loop would split a name that contains a space.
                first[way].append(_timed(alone[way], folder / f"first-{place}-{number}"))
                times[way].append(_timed(ways[way], folder / f"all-{place}-{number}"))
        rows = []
        for way, totals in times.items():
            each = [
                (many - one) / max(1, cells - 1)
                for many, one in zip(totals, first[way], strict=True)
            ]
            rows.append(_row(f"{way}: {cells} cells, {at_once} at once", totals))
            rows.append(_row(f"{way}: each further cell", each))

        listed = f"{side * side:,} cells"
        dry = [sys.executable, "-m", "lit_attn.ablate", str(whole), "--dry-run"]
        dry += ["--out", str(folder / "done")]
        command = [sys.executable, "-m", "lit_attn.bench.empty_cells", str(whole)]
        command += ["--out", str(folder / "done")]
        new = _row(f"--dry-run of {listed}, none begun", [_seconds(dry)[0] for _ in range(rounds)])
        for job in _jobs(whole, folder / "done"):
            # Written without fsync, which would take minutes for all cells.
            job.folder.mkdir(parents=True)
            record = empty_cells.result(job.cell).model_dump_json(indent=2)
            (job.folder / "result.json").write_text(record)
        resumed = [_seconds(command) for _ in range(rounds)]
        summaries = [json.loads(output) for _, output in resumed]
        assert {summary["ran"] for summary in summaries} == {0}
        rows += [new, _row(f"resume with {listed} done", [seconds for seconds, _ in resumed])]
        return Costs(rows, max(summary["memory"] for summary in summaries))


def table(costs: Costs) -> str:
    """Return the costs as a Markdown table, in milliseconds."""
    lines = ["| what | median (ms) | least | most |", "|---|---:|---:|---:|"]
    lines += [
        f"| {row.what} | {row.median * 1e3:,.1f} | {row.least * 1e3:,.1f} | {row.most * 1e3:,.1f} |"
        for row in costs.rows
    ]
    return "\n".join([*lines, "", f"Memory of the runner: {costs.memory / 1e6:,.0f} MB."])


def _ways(
    folder: Path, cells: int, at_once: int, imports: bool
) -> dict[str, Callable[[Path], list[str]]]:
    """Return the functions that prepare a folder and return the command that runs its cells."""
    study = folder / "some.yaml"
    also = ["--imports"] if imports else []
    one = [sys.executable, "-m", "lit_attn.bench.empty_cells", *also]

    def ours(out: Path) -> list[str]:
        return [*one, str(study), f"--out={out}", f"--cells={cells}", f"--jobs={at_once}"]

    def prepared(out: Path) -> list[str]:
        jobs = _jobs(study, out)[:cells]
        for job in jobs:
            _prepare(job)
        return [str(job.folder) for job in jobs]

    def shell(out: Path) -> list[str]:
        folders = " ".join(shlex.quote(path) for path in prepared(out))
        loop = f"printf '%s\\n' {folders} | xargs -n 1 -P {at_once} {shlex.join(one)}"
        return ["sh", "-c", loop]

    def hydra(out: Path) -> list[str]:
        app = folder / "app.py"
        app.write_text(HYDRA)
        quoted = ",".join(f"'{path}'" for path in prepared(out))
        swept = [f"+folder={quoted}", f"+imports={str(imports).lower()}"]
        settings = ["hydra/launcher=joblib", f"hydra.launcher.n_jobs={at_once}"]
        return [sys.executable, str(app), "-m", *settings, f"hydra.sweep.dir={out}/hydra", *swept]

    ways: dict[str, Callable[[Path], list[str]]] = {"lit_attn": ours, "shell loop": shell}
    # `find_spec` of a submodule fails if its package is missing.
    plugins = importlib.util.find_spec("hydra_plugins")
    if plugins and importlib.util.find_spec("hydra_plugins.hydra_joblib_launcher"):
        ways["Hydra, joblib"] = hydra
    return ways


def _timed(way: Callable[[Path], list[str]], out: Path) -> float:
    return _seconds(way(out))[0]


def _seconds(command: list[str]) -> tuple[float, str]:
    """Run a command; return its seconds and its output. Raises RuntimeError if it fails."""
    begun = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    seconds = time.perf_counter() - begun
    if done.returncode:
        raise RuntimeError(f"{shlex.join(command)[:200]} failed: {done.stderr[-500:]}")
    return seconds, done.stdout


def _study(folder: Path, name: str, cells: int, column: bool = False) -> tuple[Path, int]:
    """Write a study of about `cells` cells: a square of two axes, or one `column`."""
    side = round(cells**0.5)
    rates = list(range(1, (cells if column else side) + 1))
    path = folder / f"{name}.yaml"
    path.write_text(STUDY.format(rates=rates, epochs=[1] if column else rates))
    return path, side


def _jobs(study: Path, out: Path) -> list[Job]:
    return expand(read_studies(study)["bench"], out).jobs


def _prepare(job: Job) -> None:
    job.cell.write(job.folder / "config.yaml")


def _row(what: str, times: list[float]) -> Row:
    return Row(what, statistics.median(times), min(times), max(times))
