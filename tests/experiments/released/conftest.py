"""The model that the tests of several scripts read."""

from pathlib import Path

import pytest
from helpers.language_models import train_model


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train a language model once, and return its folder."""
    return train_model(tmp_path_factory.mktemp("models"))
