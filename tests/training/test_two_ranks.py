"""Two processes that share a batch compute what one process computes, in float64."""

from pathlib import Path

import pytest
import torch
from helpers import two_ranks
from helpers.commands import run_python
from helpers.paths import ROOT

# Rounding grows over the steps, most with composed heads; the mistakes that were mended gave 1e-4.
TOLERANCE = 1e-9


@pytest.mark.slow
def test_two_ranks_compute_what_one_process_computes(tmp_path: Path) -> None:
    """All cases are one test, so that one process of pytest trains them, and once."""
    done = run_python(ROOT / "tests", "-m", "helpers.two_ranks", str(tmp_path))
    assert done.returncode == 0, done.stderr
    files: list[Path] = sorted(tmp_path.glob("errors*.pt"))
    errors = {name: error for path in files for name, error in torch.load(path).items()}
    assert errors.keys() == two_ranks.cases().keys()
    assert {name: error for name, error in errors.items() if not error < TOLERANCE} == {}
