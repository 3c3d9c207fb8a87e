"""Two and four processes with sharded weights compute what one process computes, in float64."""

import json
from pathlib import Path

import pytest
from helpers import sharded_ranks
from helpers.commands import run_python
from helpers.paths import ROOT

from lit_attn.attention.spec import PRESETS

TOLERANCE = 1e-9
LOOSE = {"muon": 3e-3}
"""Tolerance of optimisers that multiply matrices in bfloat16; the parts decide on the rounding."""


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_sharded_ranks_compute_what_one_process_computes(tmp_path: Path) -> None:
    """Every preset and every optimiser on two ranks, and some presets on four.

    It is one test, because processes of pytest that share its cases would each train all of them.
    """
    done = run_python(ROOT / "tests", "-m", "helpers.sharded_ranks", str(tmp_path))
    assert done.returncode == 0, done.stderr
    differences: dict[str, float] = {}
    for path in tmp_path.glob("differences*.json"):
        differences |= json.loads(path.read_text())
    names = [f"{preset} on 2" for preset in PRESETS]
    names += [f"{preset} on 4" for preset in sharded_ranks.ON_FOUR]
    assert sorted(differences) == sorted([*names, *sharded_ranks.OPTIMIZERS])
    for name, difference in differences.items():
        assert difference < LOOSE.get(name, TOLERANCE), name
