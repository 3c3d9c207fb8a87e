"""Every script of experiments/ refuses a wrong command line in one line, with exit code 2."""

import subprocess
import sys
from pathlib import Path

import pytest
from helpers.paths import EXPERIMENTS

SCRIPTS = [path for path in sorted(EXPERIMENTS.glob("*.py")) if "__main__" in path.read_text()]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_a_wrong_option_is_one_line(script: Path) -> None:
    command = [sys.executable, str(script), "--bogus"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith(f"python experiments/{script.name}: ")
