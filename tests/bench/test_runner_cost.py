"""The benchmark of the runner measures every command."""

import importlib.util
import re
from pathlib import Path

import pytest
from helpers import empty_cells, runner_cost, studies

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


def test_an_importing_cell_imports_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A benchmark with --imports measures cells that load torch and Lightning."""
    imported: list[str] = []
    monkeypatch.setattr(empty_cells, "import_module", imported.append)
    job = expand(studies.study(tmp_path, "baseline: a\ncells: {a: {}}"), tmp_path / "runs").jobs[0]
    job.write_config()
    assert empty_cells.main(["--imports", str(job.folder)]) == 0
    (name,) = imported
    assert name == "lit_attn.training.build"
    assert importlib.util.find_spec(name) is not None
    assert (job.folder / "result.json").exists()
