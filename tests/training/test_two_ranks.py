"""Two processes that share a batch compute what one process computes, in float64."""

from pathlib import Path

import pytest
import torch
from helpers import two_ranks
from torch import multiprocessing

# Rounding grows over the steps, most with composed heads; the mistakes that were mended gave 1e-4.
TOLERANCE = 1e-9


@pytest.fixture(scope="module")
def errors(tmp_path_factory: pytest.TempPathFactory) -> dict[str, float]:
    """Return the largest difference of the states after some steps, by the name of the case."""
    folder = tmp_path_factory.mktemp("ranks")
    multiprocessing.spawn(two_ranks.train_everything, (str(folder),), two_ranks.WORLD)
    files: list[Path] = sorted(folder.glob("errors*.pt"))
    return {name: error for path in files for name, error in torch.load(path).items()}


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", two_ranks.cases())
def test_two_ranks_compute_what_one_process_computes(name: str, errors: dict[str, float]) -> None:
    assert errors[name] < TOLERANCE
