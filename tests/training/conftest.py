"""The cell that several files of tests of training compare with."""

from pathlib import Path

import pytest
from helpers.finished_cells import train_cell
from helpers.training_cells import digits_cell


@pytest.fixture(scope="session")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a finished cell that was never stopped."""
    return train_cell(digits_cell(), tmp_path_factory.mktemp("uninterrupted"))
