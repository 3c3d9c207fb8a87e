"""The cell that several files of tests of training compare with."""

from pathlib import Path

import pytest
from helpers.training_cells import digits_cell, folder_of

from lit_attn.train import run_cell


@pytest.fixture(scope="session")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a finished cell that was never stopped."""
    folder = folder_of(digits_cell(), tmp_path_factory.mktemp("uninterrupted"))
    run_cell(folder)
    return folder
