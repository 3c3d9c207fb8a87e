"""The benchmark of the runner measures every command."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import runner_cost, studies
from helpers.paths import ROOT

from lit_attn.ablate.plan import expand


@pytest.mark.process
def test_the_table_has_a_row_for_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    runner_cost.main(["--cells", "3", "--jobs", "2", "--expand", "90", "--rounds", "1"])
    lines = capsys.readouterr().out.splitlines()
    commands = ["lit_attn", "shell loop"]
    plugins = importlib.util.find_spec("hydra_plugins")
    if plugins and importlib.util.find_spec("hydra_plugins.hydra_joblib_launcher"):
        commands.append("Hydra, joblib")
    labels = [line.split("|")[1].strip() for line in lines[2:-2]]
    assert labels == [
        *(
            f"{command}: {text}"
            for command in commands
            for text in ("3 cells, 2 at once", "each further cell")
        ),
        "--dry-run of 90 cells, none started",
        *(f"{command} of 90 done" for command in ("resume", "status", "report")),
    ]
    for line in lines[2:-2]:
        median, least, most = (float(cell.replace(",", "")) for cell in line.split("|")[2:5])
        assert least <= median <= most
    assert re.fullmatch(r"Memory of the runner: [\d,]+ MB, of the report: [\d,]+ MB\.", lines[-1])


def test_a_command_that_fails_raises_an_error() -> None:
    with pytest.raises(RuntimeError, match="false failed"):
        runner_cost._run(["false"])


@pytest.mark.process
def test_an_importing_cell_imports_training(tmp_path: Path) -> None:
    """A benchmark with --imports measures cells that load torch and Lightning."""
    cell = write_empty_cell(tmp_path)
    command = [sys.executable, "-v", "-m", "helpers.empty_cells", "--imports", str(cell)]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"}
    finished = subprocess.run(
        command, capture_output=True, text=True, check=True, cwd=ROOT, env=environment
    )
    assert "import 'lit_attn.training.build'" in finished.stderr
    assert (cell / "result.json").exists()


def write_empty_cell(folder: Path) -> Path:
    source = studies.study(folder, "baseline: a\ncells: {a: {}}")
    job = expand(source, folder / "runs").jobs[0]
    job.write_config()
    return job.folder
