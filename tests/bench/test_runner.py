"""The runner's benchmark measures what it says."""

import importlib.util

import pytest

from lit_attn.bench import runner
from lit_attn.bench.__main__ import main


def test_bench_runner(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["runner", "--cells", "3", "--jobs", "2", "--expand", "9", "--rounds", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    ways = ["lit_attn", "shell loop"]
    plugins = importlib.util.find_spec("hydra_plugins")
    if plugins and importlib.util.find_spec("hydra_plugins.hydra_joblib_launcher"):
        ways.append("Hydra, joblib")
    whats = [line.split("|")[1].strip() for line in lines[2:-2]]
    assert whats == [
        *(f"{way}: {what}" for way in ways for what in ("3 cells, 2 at once", "each further cell")),
        "--dry-run of 9 cells, none begun",
        "resume with 9 cells done",
    ]
    for line in lines[2:-2]:
        median, least, most = (float(cell.replace(",", "")) for cell in line.split("|")[2:5])
        assert least <= median <= most
    assert lines[-1].startswith("Memory of the runner: ")


def test_a_command_that_fails_is_no_time() -> None:
    with pytest.raises(RuntimeError, match="false failed"):
        runner._seconds(["false"])
