"""Small random images in the layout of an .npz data set."""

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray


def write(path: Path, **changes: NDArray[Any]) -> Path:
    """Write 40 training and 10 test images of 8 x 8 coloured pixels in 4 classes to `path`.

    `changes` replace arrays by their names.
    """
    generator = np.random.default_rng(0)
    arrays: dict[str, NDArray[Any]] = {
        "x_train": generator.integers(256, size=(40, 8, 8, 3), dtype=np.uint8),
        "y_train": np.arange(40) % 4,
        "x_test": generator.integers(256, size=(10, 8, 8, 3), dtype=np.uint8),
        "y_test": np.arange(10) % 4,
    }
    np.savez(path, **arrays | changes)
    return path
