"""Plug-ins and data files of results, so that `status` notices a change without reading the data.

`<study>/.inputs/<hash>.json` has the inputs of all results with the same hashes of code and data.
"""

import contextlib
import hashlib
import os
from collections.abc import Iterable, Iterator
from functools import cache
from itertools import chain, islice
from pathlib import Path
from typing import Any, Self

from lit_attn.cells.records import Record, Result
from lit_attn.schema.errors import ConfigError
from lit_attn.schema.plugins import FILE_HASHES, hash_source

MAX_FILES = 2000  # Data files that are recorded; ImageNet has 1.3 million.


class Inputs(Record):
    """Files by path: plug-ins with a hash of their code, data with size and modification time."""

    parts: dict[str, str]
    data: dict[str, str]

    @classmethod
    def collect(cls, parts: Iterable[Path], data: dict[str, Any]) -> Self:
        """Return the imported plug-ins `parts` and the files in the configuration `data`."""
        files = islice(chain.from_iterable(_list_files(path) for path in _paths(data)), MAX_FILES)
        return cls(
            parts={str(path.absolute()): FILE_HASHES[path.resolve()].hex() for path in parts},
            data={str(path.absolute()): _stamp(path) for path in files},
        )

    def write_for(self, cell: Path, result: Result) -> None:
        """Write the inputs of the result in the folder `cell`, if it belongs to a study."""
        path = locate_inputs(cell, result)
        if (path.parents[1] / "plan.json").exists():
            self.write(path)

    def find_change(self) -> str:
        """Return what has changed, or nothing. Folders that this machine does not see are equal."""
        for read, files in ((_hash_part, self.parts), (_stamp, self.data)):
            for name, before in files.items():
                path = Path(name)
                if path.parent.exists() and (not path.exists() or read(path) != before):
                    return f"{name} {'has changed' if path.exists() else 'is missing'}"
        return ""


def find_stale(results: Iterable[tuple[Path, Result | None]]) -> dict[Path, str]:
    """Return, by folder, why results of cells are stale: which of their inputs has changed."""

    find = cache(find_change)
    changes = ((cell, find(locate_inputs(cell, r))) for cell, r in results if r is not None)
    return {cell: change for cell, change in changes if change}


def find_change(path: Path) -> str | None:
    """Return which of the inputs at `path` has changed, "" if none has, and None if unknown."""
    with contextlib.suppress(ConfigError):
        if (inputs := Inputs.read(path)) is not None:
            change = inputs.find_change()
            # Data of a hub have no files here, and of many files only some are recorded.
            return change or ("" if 0 < len(inputs.data) < MAX_FILES else None)
    return None


def locate_inputs(cell: Path, result: Result) -> Path:
    """Return the path of the inputs of a result in the folder `cell`."""
    name = hashlib.sha256(f"{result.code} {result.data}".encode()).hexdigest()[:16]
    return cell.parents[1] / ".inputs" / f"{name}.json"


def _hash_part(path: Path) -> str:
    try:
        return hash_source(path.read_bytes()).hex()
    except (OSError, SyntaxError, ValueError):
        return ""


def _stamp(path: Path) -> str:
    status = path.stat()
    return f"{status.st_size} {status.st_mtime_ns}"


def _paths(value: Any) -> Iterator[Path]:
    """Yield the paths in a configuration."""
    if isinstance(value, Path):
        yield value
    elif isinstance(value, dict | list | tuple):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _paths(item)


def _list_files(path: Path) -> Iterator[Path]:
    """Yield `path` if it is a file, or the files below it."""
    if path.is_file():
        yield path
    for folder, _, names in os.walk(path):
        yield from (file for name in names if (file := Path(folder, name)).is_file())
