"""Two and four processes with sharded weights compute what one process computes, in float64."""

import json

import pytest
from helpers import sharded_ranks
from helpers.commands import run_python
from helpers.paths import ROOT

from lit_attn.attention.spec import PRESETS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

TOLERANCE = 1e-9
LOOSE = {"muon": 3e-3}
"""Tolerance of optimisers that multiply matrices in bfloat16; the parts decide on the rounding."""


@pytest.fixture(scope="module")
def differences(tmp_path_factory: pytest.TempPathFactory) -> dict[str, float]:
    """Return the largest difference to one process of every training that ranks have shared."""
    folder = tmp_path_factory.mktemp("ranks")
    done = run_python(ROOT / "tests", "-m", "helpers.sharded_ranks", str(folder))
    assert done.returncode == 0, done.stderr
    values: dict[str, float] = {}
    for path in folder.glob("differences*.json"):
        values |= json.loads(path.read_text())
    return values


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("preset", PRESETS)
def test_sharded_ranks_compute_what_one_process_computes(
    preset: str, ranks: int, differences: dict[str, float]
) -> None:
    """Two ranks recompute the blocks too."""
    assert differences[f"{preset} on {ranks}"] < TOLERANCE


@pytest.mark.parametrize("name", sharded_ranks.OPTIMIZERS)
def test_every_optimiser_steps_sharded_weights(name: str, differences: dict[str, float]) -> None:
    assert differences[name] < LOOSE.get(name, TOLERANCE)
