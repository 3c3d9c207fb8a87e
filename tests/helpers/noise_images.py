"""Small random images in the layout of an .npz data set."""

from pathlib import Path

import numpy as np


def write(path: Path) -> Path:
    """Write 40 training and 10 test images of 8 x 8 coloured pixels in 4 classes to `path`."""
    generator = np.random.default_rng(0)
    np.savez(
        path,
        x_train=generator.integers(256, size=(40, 8, 8, 3), dtype=np.uint8),
        y_train=np.arange(40) % 4,
        x_test=generator.integers(256, size=(10, 8, 8, 3), dtype=np.uint8),
        y_test=np.arange(10) % 4,
    )
    return path
