"""Random sentences in pairs of files."""

from pathlib import Path

import numpy as np

WORDS = ("ein", "hund", "läuft", "über", "die", "wiese", "und", "bellt", "laut", "heute")


def write(folder: Path, train: int = 120, evaluated: int = 7) -> Path:
    """Write `train` training pairs and `evaluated` pairs of each evaluated split to `folder`."""
    drawn = np.random.default_rng(0)
    for name, count in (("train", train), ("valid", evaluated), ("test", evaluated)):
        for language in ("de", "en"):
            lines = (" ".join(drawn.choice(WORDS, drawn.integers(1, 15))) for _ in range(count))
            (folder / f"{name}.{language}").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder
