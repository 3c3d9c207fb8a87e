"""Digests of data: they identify what a cell trained on by its content."""

import hashlib
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

Part = bytes | str | NDArray[np.generic]


def digest(parts: Iterable[Part]) -> str:
    """Return twelve hexadecimal digits of SHA-256 over bytes, text, and arrays with their types."""
    total = hashlib.sha256()
    for part in parts:
        if isinstance(part, str):
            total.update(part.encode())
        elif isinstance(part, bytes):
            total.update(part)
        else:
            total.update(np.ascontiguousarray(part).data)
    return total.hexdigest()[:12]
