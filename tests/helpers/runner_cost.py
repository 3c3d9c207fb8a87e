"""Cost of the runner itself, next to a shell loop and Hydra's multirun with its joblib launcher,
and of the commands that read the results of many cells.

    PYTHONPATH=tests python -m helpers.runner_cost --cells 64 --jobs 2

The cells are empty (helpers.empty_cells), so all of the time is the runner's. Every row is a
new command, with the start of its interpreter. The commands take turns, so that a slower machine
slows all of them. Hydra is no dependency; its rows appear if `hydra-joblib-launcher` is installed.
"""

import argparse
import importlib.util
import json
import os
import random
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from helpers.fake_cells import result
from helpers.paths import ROOT
from lit_attn.ablate.plan import Matrix, expand
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
    seeds: {seeds}
    axes: {{optimizer.lr: {rates}, training.epochs: {epochs}}}
    baseline: lr=1,epochs=1
"""
SEEDS = 10
"""Seeds of every variant of the large study."""

HYDRA = """\
from pathlib import Path

import hydra
from omegaconf import DictConfig

from helpers.empty_cells import run_cell, run_importing_cell


@hydra.main(version_base=None, config_path=None)
def main(config: DictConfig) -> None:
    (run_importing_cell if config.imports else run_cell)(Path(config.folder), smoke=False)


main()
"""


class Row(NamedTuple):
    """Median, least and greatest seconds of all rounds."""

    label: str
    median: float
    least: float
    most: float


class Run(NamedTuple):
    """Seconds, most bytes in memory and output of a command."""

    seconds: float
    memory: int
    output: str


class Costs(NamedTuple):
    """Rows of the table, and the greatest memory in bytes of the runner and of the report."""

    rows: list[Row]
    runner_memory: int
    report_memory: int


def measure(cells: int, at_once: int, expanded: int, rounds: int, imports: bool) -> Costs:
    """Time a run of `cells` cells, `at_once` at a time, and commands on `expanded` finished cells.

    With `imports` every cell imports the modules of training.
    """
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        (folder / "experiment.yaml").write_text(EXPERIMENT)
        large_study, count = _write_study(folder, "all", expanded, seeds=SEEDS)
        _write_study(folder, "some", cells, column=True)
        commands = _commands(folder, cells, at_once, imports)
        times: dict[str, list[float]] = {name: [] for name in commands}
        single = _commands(folder, 1, 1, imports)
        first: dict[str, list[float]] = {name: [] for name in commands}
        for number in range(rounds):
            for index, name in enumerate(commands):
                # The shell loop would split a folder's name at a space.
                first[name].append(_run(single[name](folder / f"first-{index}-{number}")).seconds)
                times[name].append(_run(commands[name](folder / f"all-{index}-{number}")).seconds)
        rows = []
        for name, seconds in times.items():
            each = [
                (many - one) / max(1, cells - 1)
                for many, one in zip(seconds, first[name], strict=True)
            ]
            rows.append(_make_row(f"{name}: {cells} cells, {at_once} at once", seconds))
            rows.append(_make_row(f"{name}: each further cell", each))

        done = ["--out", str(folder / "done")]
        dry = [sys.executable, "-m", "lit_attn.ablate", str(large_study), "--dry-run", *done]
        listing = [_run(dry).seconds for _ in range(rounds)]
        rows.append(_make_row(f"--dry-run of {count:,} cells, none started", listing))
        draws = random.Random(0)
        matrix = _expand(large_study, folder / "done")
        matrix.write_plan()
        first_result = result(matrix.jobs[0].cell)
        for job in matrix.jobs:
            # `Result.write` would take minutes, because of an fsync for each file.
            job.folder.mkdir(parents=True)
            changes: dict[str, Any] = {
                "variant": job.variant,
                "seed": job.seed,
                "identity": job.identity,
                "metrics": {"test/accuracy": draws.gauss(0.5, 0.01)},
            }
            record = first_result.model_copy(update=changes)
            (job.folder / "result.json").write_text(record.model_dump_json(indent=2))
        command = [sys.executable, "-m", "helpers.empty_cells", str(large_study), *done]
        resumed = [_run(command) for _ in range(rounds)]
        summaries = [json.loads(run.output.splitlines()[-1]) for run in resumed]
        assert {summary["ran"] for summary in summaries} == {0}
        rows.append(_make_row(f"resume of {count:,} done", [run.seconds for run in resumed]))
        status = [sys.executable, "-m", "lit_attn.ablate", "status", str(folder / "done")]
        reads = [_run(status).seconds for _ in range(rounds)]
        rows.append(_make_row(f"status of {count:,} done", reads))
        report = [sys.executable, "-m", "lit_attn.report", str(folder / "done")]
        report += ["--reports", str(folder / "reports")]
        reports = [_run(report) for _ in range(rounds)]
        rows.append(_make_row(f"report of {count:,} done", [run.seconds for run in reports]))
        runner_memory = max(summary["memory"] for summary in summaries)
        return Costs(rows, runner_memory, max(run.memory for run in reports))


def format_table(costs: Costs) -> str:
    """Return a Markdown table in milliseconds."""
    lines = ["| command | median (ms) | least | most |", "|---|---:|---:|---:|"]
    lines += [
        f"| {row.label} | {1e3 * row.median:,.1f} | {1e3 * row.least:,.1f} |"
        f" {1e3 * row.most:,.1f} |"
        for row in costs.rows
    ]
    memory = f"{costs.runner_memory / 1e6:,.0f} MB, of the report: {costs.report_memory / 1e6:,.0f}"
    return "\n".join([*lines, "", f"Memory of the runner: {memory} MB."])


def main(arguments: list[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m helpers.runner_cost", description=__doc__)
    parser.add_argument("--cells", type=int, default=64, help="empty cells to run")
    parser.add_argument("--jobs", type=int, default=2, help="cells at once")
    parser.add_argument(
        "--expand", type=int, default=50_000, help="cells to list, resume and report"
    )
    parser.add_argument("--imports", action="store_true", help="cells import torch and Lightning")
    parser.add_argument("--rounds", type=int, default=5, help="runs of each command")
    options = parser.parse_args(arguments)
    costs = measure(options.cells, options.jobs, options.expand, options.rounds, options.imports)
    print(format_table(costs))


def _commands(
    folder: Path, cells: int, at_once: int, imports: bool
) -> dict[str, Callable[[Path], list[str]]]:
    """Return functions from a folder to the command that runs the cells there, by name.

    They write what the command needs, which is not timed.
    """
    study = folder / "some.yaml"
    options = ["--imports"] if imports else []
    empty = [sys.executable, "-m", "helpers.empty_cells", *options]

    def lit_attn(out: Path) -> list[str]:
        return [*empty, str(study), f"--out={out}", f"--cells={cells}", f"--jobs={at_once}"]

    def write_cells(out: Path) -> list[str]:
        jobs = _expand(study, out).jobs[:cells]
        for job in jobs:
            job.write_config()
        return [str(job.folder) for job in jobs]

    def shell(out: Path) -> list[str]:
        folders = " ".join(shlex.quote(path) for path in write_cells(out))
        loop = f"printf '%s\\n' {folders} | xargs -n 1 -P {at_once} {shlex.join(empty)}"
        return ["sh", "-c", loop]

    def hydra(out: Path) -> list[str]:
        app = folder / "app.py"
        app.write_text(HYDRA)
        quoted = ",".join(f"'{path}'" for path in write_cells(out))
        cell_options = [f"+folder={quoted}", f"+imports={str(imports).lower()}"]
        settings = ["hydra/launcher=joblib", f"hydra.launcher.n_jobs={at_once}"]
        return [
            sys.executable,
            str(app),
            "-m",
            *settings,
            f"hydra.sweep.dir={out}/hydra",
            *cell_options,
        ]

    commands: dict[str, Callable[[Path], list[str]]] = {"lit_attn": lit_attn, "shell loop": shell}
    # `find_spec` of a submodule fails if its package is missing.
    plugins = importlib.util.find_spec("hydra_plugins")
    if plugins and importlib.util.find_spec("hydra_plugins.hydra_joblib_launcher"):
        commands["Hydra, joblib"] = hydra
    return commands


def _run(command: list[str]) -> Run:
    """Run a command; raise RuntimeError if it fails."""
    folders = [str(ROOT / "tests"), str(ROOT), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, folders))}
    with tempfile.TemporaryFile("w+") as output:
        start = time.perf_counter()
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env=environment
        )
        _, status, usage = os.wait4(process.pid, 0)
        seconds = time.perf_counter() - start
        process.returncode = os.waitstatus_to_exitcode(status)
        output.seek(0)
        text = output.read()
    if process.returncode:
        raise RuntimeError(f"{shlex.join(command)[:200]} failed: {text[-500:]}")
    return Run(seconds, usage.ru_maxrss * 1024, text)


def _write_study(
    folder: Path, name: str, cells: int, column: bool = False, seeds: int = 1
) -> tuple[Path, int]:
    """Write a study of about `cells` cells, a square or one `column` of variants.

    Return its path and its number of cells.
    """
    side = round((cells / seeds) ** 0.5)
    rates = list(range(1, (cells if column else side) + 1))
    path = folder / f"{name}.yaml"
    path.write_text(STUDY.format(rates=rates, epochs=[1] if column else rates, seeds=seeds))
    return path, cells if column else side * side * seeds


def _expand(study: Path, out: Path) -> Matrix:
    return expand(read_studies(study)["bench"], out)


def _make_row(label: str, times: list[float]) -> Row:
    return Row(label, statistics.median(times), min(times), max(times))


if __name__ == "__main__":
    main()
