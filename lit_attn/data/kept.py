"""Generated arrays that the first cell draws and later cells read from a file."""

import hashlib
import io
import json
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lit_attn.files import one_at_a_time, write_atomic
from lit_attn.schema.errors import ConfigError

Arrays = dict[str, NDArray[Any]]


def keep_arrays(root: Path, name: str, recipe: Sequence[Any], draw: Callable[[], Arrays]) -> Arrays:
    """Return the arrays that `draw` makes from `recipe`; only the first call with it draws.

    The arrays are kept in an .npz file below `root`, whose name is a hash of the recipe. Cells that
    start at once wait for the first, at a lock with this `name`. Raises ConfigError, which begins
    with `data.root`, if the folder is not writable or the file is damaged.
    """
    path = root / f"{hashlib.sha256(json.dumps(recipe).encode()).hexdigest()[:10]}.npz"
    try:
        root.mkdir(parents=True, exist_ok=True)
        with one_at_a_time(root, name):
            if not path.is_file():
                content = io.BytesIO()
                # The stubs of NumPy take any keyword for `allow_pickle`.
                drawn: dict[str, Any] = draw()
                np.savez(content, **drawn)
                write_atomic(path, content.getvalue())
        with path.open("rb") as stream, np.load(stream, allow_pickle=False) as file:
            return {key: file[key] for key in file.files}
    except OSError as error:
        raise ConfigError(f"data.root: {path}: {error.strerror or error}") from error
    except (ValueError, zipfile.BadZipFile) as error:
        raise ConfigError(f"data.root: {path} is damaged; delete it") from error
