"""Studies of cells that train, run to their end or killed before it."""

import json
import os
from pathlib import Path

from helpers.commands import run_python, start_python
from helpers.paths import ROOT
from helpers.runs import wait_until
from lit_attn.cells.records import Plan

COMMAND = ("-m", "lit_attn.ablate", "ablations.yaml")


def run_study(folder: Path, *options: str) -> str:
    """Run the study of `folder` to its end, and return the output."""
    done = run_python(folder, *COMMAND, *options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def kill_study(folder: Path, results: int, *options: str) -> None:
    """Run the study of `folder`; kill the runner with SIGKILL when there are `results` results."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with (folder / "log.txt").open("ab") as log:
        files = (log.fileno(), log.fileno())
        process = start_python(folder, (*COMMAND, *options), environment, *files)

    def has_results() -> bool:
        return len(list(folder.glob("runs/**/result.json"))) >= results

    try:
        wait_until(lambda: has_results() or process.poll() is not None)
        assert process.poll() is None, (folder / "log.txt").read_text()
    finally:
        process.kill()
        process.wait()


def read_metrics(folder: Path) -> dict[str, dict[str, float]]:
    """Return the metrics of the final cells of the study `tiny` by variant and seed."""
    place = folder / "runs" / "tiny"
    metrics = {}
    for cell in Plan.load(place / "plan.json").cells:
        result = json.loads((place / cell.path / "result.json").read_text())
        del result["metrics"]["evaluation/seconds"]
        metrics[f"{cell.variant}/{cell.seed}"] = result["metrics"]
    return metrics
