"""Files and studies that a report skips: readers that warn instead, and the outcome."""

import logging
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from lit_attn.schema.errors import ConfigError, escape_control
from lit_attn.schema.mistakes import describe_mistake

LOG = logging.getLogger(__name__)
"""Logger of everything that a report leaves out. Without a handler Python prints it to stderr."""

Arrays = dict[str, NDArray[Any]]
Content = TypeVar("Content")


class Outcome(NamedTuple):
    """Folders or pages that were written, and names of studies and families that were skipped."""

    written: list[Path]
    skipped: list[str]


def read_or_skip(
    read: Callable[[Path], Content], folder: Path | None, name: str = ""
) -> Content | None:
    """Return `read(folder / name)`, or None (and a warning) for a file that cannot be read."""
    if folder is None:
        return None
    try:
        return read(folder / name)
    except (ConfigError, OSError) as error:
        LOG.warning("%s: unreadable and skipped: %s", folder / name, error)
        return None


def read_arrays(path: Path) -> Arrays:
    """Return the arrays of an .npz file, or nothing for a missing or damaged file (a warning)."""
    try:
        with path.open("rb") as stream, np.load(stream, allow_pickle=False) as arrays:
            return dict(arrays)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, EOFError, KeyError, zipfile.BadZipFile):
        LOG.warning("%s: unreadable and skipped", path)
        return {}


def describe_failure(error: Exception) -> str:
    """Return an exception as a line: what is wrong with the records, or a mistake of lit_attn.

    Whatever reads records raises ConfigError or OSError for damaged ones.
    """
    if isinstance(error, ConfigError | OSError):
        return escape_control(" ".join(str(error).split()))
    return escape_control(describe_mistake(error))
